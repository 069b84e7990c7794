"""Prompts, token ids and scored spans, against nanochat's and against cases that broke other evaluators."""

import hashlib
import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eval.bundle import open_bundle
from eval.prompts import (
    COMPAT,
    Encoder,
    build_examples,
    draw_shots,
    fill_empty_spans,
    order_rows,
    render,
    spans,
)
from eval.tasks import Task, TaskError, load_task_set, read_rows
from tests.core_helpers import make_tokenizer

# one item per kind of task, with the text that must come out
GOLDEN = {
    "multiple_choice": (
        {"query": "Question: why?", "choices": ["No.", "Yes."], "gold": 1},
        {"query": "Question: how?", "choices": ["So.", "Thus."], "gold": 0},
        "\nAnswer: ",
        [
            "Question: how?\nAnswer: So.\n\nQuestion: why?\nAnswer: No.",
            "Question: how?\nAnswer: So.\n\nQuestion: why?\nAnswer: Yes.",
        ],
    ),
    "schema": (
        {"context_options": ["The cup, for the cup", "The cup, for the box"], "continuation": "was small.", "gold": 1},
        {"context_options": ["Ann asked Bob, since Ann", "... Bob"], "continuation": "was lost.", "gold": 0},
        " ",
        [
            "Ann asked Bob, since Ann was lost.\n\nThe cup, for the cup was small.",
            "Ann asked Bob, since Ann was lost.\n\nThe cup, for the box was small.",
        ],
    ),
    "language_modeling": (
        {"context": " 1 2 3 ", "continuation": "4"},
        {"context": "a b\n", "continuation": "c"},
        " ",
        ["a b c\n\n1 2 3", "a b c\n\n1 2 3 4"],
    ),
}


def make_task(kind, delimiter=" ", num_fewshot=1):
    return Task("toy", kind, num_fewshot, delimiter, "toy.jsonl", {"v1": 0.0, "v2": 0.0})


@pytest.mark.parametrize("kind", GOLDEN)
def test_rendered_text(kind):
    row, shot, delimiter, expected = GOLDEN[kind]
    prompts = render(make_task(kind, delimiter), row, [shot])
    assert prompts == expected
    assert "  " not in prompts[-1] and prompts[-1].count("\n\n") == 1


@pytest.mark.parametrize("kind", GOLDEN)
def test_ten_shots_are_ten_demonstrations(kind):
    row, shot, _, _ = GOLDEN[kind]
    task = make_task(kind, " => ", num_fewshot=10)
    rows = [row] + [shot] * 19
    prompts = render(task, rows[0], [rows[i] for i in draw_shots(len(rows), 0, 10, seed=1234)])
    assert prompts[-1].count(" => ") == 11 and prompts[-1].count("\n\n") == 10


def test_paper_strips_the_prompt_and_nanochat_does_not():
    row = {"query": " q", "choices": ["a", "b "], "gold": 0}
    task = make_task("multiple_choice", num_fewshot=0)
    assert render(task, row, []) == [" q a", " q b "]
    assert render(task, row, [], strip=True) == ["q a", "q b"]


@pytest.mark.parametrize(
    "num_rows, index, seed", [(50, 0, 1234), (50, 49, 0), (50, 17, 2), (2000, 1234, 1), (12, 3, 1)]
)
def test_shots_are_a_sample_of_the_other_rows(num_rows, index, seed):
    others = [i for i in range(num_rows) if i != index]
    assert draw_shots(num_rows, index, 10, seed) == random.Random(seed + index).sample(others, 10)


def test_fewer_rows_than_shots_draws_all_others():
    assert sorted(draw_shots(4, 1, 10, seed=1234)) == [0, 2, 3]
    assert draw_shots(1, 0, 10, seed=1234) == []


def test_rows_are_shuffled_before_they_are_cut():
    rows = [{"i": i} for i in range(100)]
    expected = list(rows)
    random.Random(1337).shuffle(expected)
    assert order_rows(rows) == expected and order_rows(rows, 7) == expected[:7]
    with pytest.raises(ValueError, match="max_per_task must be at least 1"):
        order_rows(rows, 0)


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def test_spans_of_every_kind():
    assert spans("multiple_choice", [ids(0, 1, 2, 3), ids(0, 1, 4)])[1] == [2, 2]
    assert spans("schema", [ids(0, 1, 7, 8), ids(0, 2, 3, 7, 8)])[1] == [2, 3]
    sequences, starts = spans("language_modeling", [ids(0, 1, 2), ids(0, 1, 2, 3, 4)])
    assert [list(s) for s in sequences] == [[0, 1, 2, 3, 4]] and starts == [3]


def test_a_token_that_spans_the_join_is_scored():
    # the prompt without continuation ends in token 2, the one with it has token 9 in its place
    assert spans("language_modeling", [ids(0, 1, 2), ids(0, 1, 9)])[1] == [2]
    assert spans("language_modeling", [ids(0, 1, 2), ids(0, 1, 9, 4)])[1] == [2]


def test_answer_spanning_token_with_a_real_tokenizer():
    vocabulary = {c: i for i, c in enumerate("Answer")}
    vocabulary = {**vocabulary, "An": 6, "Ans": 7, "we": 8, "wer": 9, "Answer": 10, "<|endoftext|>": 11}
    merges = [("A", "n"), ("An", "s"), ("w", "e"), ("we", "r"), ("Ans", "wer")]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|endoftext|>"))
    task = make_task("language_modeling", delimiter="", num_fewshot=0)
    (example,) = build_examples(task, [{"context": "Ans", "continuation": "wer"}], encoder, COMPAT["paper"], 0)
    assert example.sequences[0].tolist() == [11, 10] and example.starts == [1] and example.answer_start == 1


def test_identical_options_never_read_before_the_first_token():
    assert spans("schema", [ids(0, 1, 2), ids(0, 1, 2)])[1] == [1, 1]
    assert spans("multiple_choice", [ids(5, 1), ids(6, 1)])[1] == [1, 1]


def test_finite_rule_gives_every_option_a_token_whatever_the_order():
    options = [ids(0, 1, 2), ids(0, 1, 2, 3), ids(0, 1, 2, 4, 5)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        sequences, starts = spans("multiple_choice", [options[i] for i in order])
        assert min(len(s) - start for s, start in zip(sequences, starts, strict=True)) == 0
        filled = fill_empty_spans(sequences, starts)
        assert filled == [2, 2, 2]
    assert fill_empty_spans([ids(0, 1), ids(0, 2)], [1, 1]) == [1, 1]


def test_truncation_keeps_the_end_and_every_scored_token():
    encoder = Encoder(make_tokenizer())
    row = {"context": "one two three four five " * 8, "continuation": "six seven"}
    task = make_task("language_modeling", num_fewshot=0)
    (whole,) = build_examples(task, [row], encoder, COMPAT["nanochat"], 0)
    (cropped,) = build_examples(task, [row], encoder, COMPAT["nanochat"], 0, context_length=32)
    scored = len(whole.sequences[0]) - whole.starts[0]
    assert len(whole.sequences[0]) > 64 and scored >= 2
    assert cropped.sequences[0].tolist() == whole.sequences[0][-32:].tolist()
    assert cropped.starts == [32 - scored]
    # the token before the span must stay: it predicts the span's first token
    assert list(build_examples(task, [row], encoder, COMPAT["nanochat"], 0, context_length=scored + 1))
    with pytest.raises(TaskError, match="task toy, example 0: the scored continuation has .* context length"):
        list(build_examples(task, [row], encoder, COMPAT["nanochat"], 0, context_length=scored))


def test_options_are_cropped_one_by_one():
    encoder = Encoder(make_tokenizer())
    row = {"query": "word " * 40, "choices": ["yes", "a much longer answer than that"], "gold": 0}
    task = make_task("multiple_choice", num_fewshot=0)
    (whole,) = build_examples(task, [row], encoder, COMPAT["paper"], 0)
    (cropped,) = build_examples(task, [row], encoder, COMPAT["paper"], 0, context_length=24)
    for full, part, start, moved in zip(whole.sequences, cropped.sequences, whole.starts, cropped.starts, strict=True):
        assert part.tolist() == full[-24:].tolist() and len(full) - start == 24 - moved
    assert len(whole.sequences[0]) - whole.answer_start == 24 - cropped.answer_start


def with_own_bos(bos_token, adds_itself):
    """A word tokenizer, with or without a template that puts the BOS in front by itself."""
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, "<s>": 4, "<|bos|>": 5, "<|endoftext|>": 6}
    backend = Tokenizer(models.WordLevel({k: v for k, v in vocabulary.items() if v < 5 or k == bos_token}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_itself:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 4)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="[UNK]")


@pytest.mark.parametrize("bos_token", ["<s>", "<|bos|>", "<|endoftext|>"])
@pytest.mark.parametrize("adds_itself", [False, True])
def test_bos_exactly_once_for_every_kind(bos_token, adds_itself):
    tokenizer = with_own_bos(bos_token, adds_itself)
    encoder = Encoder(tokenizer)
    assert encoder.bos_token == bos_token
    rows = {
        "multiple_choice": {"query": "a", "choices": ["b", "c"], "gold": 0},
        "schema": {"context_options": ["a", "b"], "continuation": "c", "gold": 0},
        "language_modeling": {"context": "a", "continuation": "b"},
    }
    for kind, row in rows.items():
        for example in build_examples(make_task(kind), [row, row], encoder, COMPAT["paper"], 0):
            for sequence in example.sequences:
                assert sequence[0] == encoder.bos_id and 4 not in sequence[1:] and encoder.bos_id not in sequence[1:]


def test_tokenizer_without_any_bos_is_refused_or_told_one():
    with pytest.raises(ValueError, match="neither a BOS nor an EOS.*--bos-token"):
        Encoder(make_tokenizer(None))
    assert Encoder(make_tokenizer(None), bos_token="!").bos_token == "!"
    with pytest.raises(ValueError, match="no token '<nope>'"):
        Encoder(make_tokenizer(None), bos_token="<nope>")


def test_hashes_of_nanochats_prompts_tokens_and_spans(reference_dir):
    path = reference_dir / "data" / "core" / "reference_prompt_hashes_gpt2.json"
    if not path.is_file():
        pytest.skip(f"reference data not found at {path}")

    def digest(value):
        return hashlib.sha256(json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()

    encoder = Encoder(AutoTokenizer.from_pretrained(reference_dir / "data" / "gpt2-tokenizer"))
    read = open_bundle(path.parent / "eval_bundle.zip")
    tasks = load_task_set("core").tasks
    checked = 0
    for name, reference in json.loads(path.read_text())["tasks"].items():
        task = tasks[name]
        rows = order_rows(read_rows(task, read))
        for index, expected in enumerate(reference["examples"]):
            shots = [rows[i] for i in draw_shots(len(rows), index, task.num_fewshot, 1234)]
            prompts = render(task, rows[index], shots)
            sequences, starts = spans(task.type, encoder(prompts))
            assert digest(prompts) == expected["prompts"], (name, index)
            ends = [len(sequence) for sequence in sequences]
            assert [digest([s.tolist() for s in sequences]), starts, ends] == expected["gpt2"], (name, index)
            checked += 1
    assert checked == 440
