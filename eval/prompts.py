"""From rows to token sequences: order, few-shot draw, rendering, tokenisation, scored spans, truncation.

The rules are those of nanochat's evaluator (COMPAT["nanochat"]) and of the looped-models paper (COMPAT["paper"]),
which differ in the few-shot seeds, in stripping the rendered prompt, and in the answer loss, which only the paper
reports. Where both crash there is a rule here: fewer rows than shots draws what there is; a token that spans the join
of context and continuation belongs to the continuation; a span never starts at the first token, which nothing
predicts.
"""

import random
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.tasks import Task, TaskError

SHUFFLE_SEED = 1337  # decides which rows max_per_task keeps; the same in nanochat and the paper
BOS_NAMES = ("<|bos|>", "<|endoftext|>")  # looked for in this order, as nanochat does, before the tokenizer's own


@dataclass(frozen=True)
class Compat:
    """What differs between the evaluators that one can be compatible with.

    seeds: shots of row `idx` come from Random(seed + idx), one evaluation per seed. strip_prompt: the rendered prompt
    of multiple choice and schema is stripped. answer_loss: also score the whole gold continuation.
    """

    seeds: tuple[int, ...]
    strip_prompt: bool
    answer_loss: bool


COMPAT = {
    "nanochat": Compat(seeds=(1234,), strip_prompt=False, answer_loss=False),
    "paper": Compat(seeds=(0, 1, 2), strip_prompt=True, answer_loss=True),
}


@dataclass
class Example:
    """One question as token sequences: an option each for multiple choice and schema, one for language modelling.

    starts[i] is the first scored token of sequences[i]; the span runs to its end and may be empty. answer_start is the
    first token of the whole gold continuation in sequences[gold], None when it is not asked for.
    """

    task: str
    seed: int
    index: int
    sequences: list[np.ndarray]
    starts: list[int]
    gold: int
    is_choice: bool
    answer_start: int | None = None


class Encoder:
    """Texts to token ids with exactly one BOS in front, whatever the tokenizer's own defaults.

    The BOS is `bos_token` where it is given, else `<|bos|>`, else `<|endoftext|>`, else the tokenizer's BOS, else its
    EOS. Raises ValueError when there is none of them, or when `bos_token` is not one token of the vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, bos_token: str | None = None):
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        names = [bos_token] if bos_token is not None else [*BOS_NAMES, tokenizer.bos_token, tokenizer.eos_token]
        found = [name for name in names if name is not None and name in vocabulary]
        if not found:
            wanted = f"has no token {bos_token!r}" if bos_token is not None else "has neither a BOS nor an EOS token"
            raise ValueError(
                f"The tokenizer {wanted}, and every prompt must begin with one. "
                f"Name a token of its vocabulary with --bos-token."
            )
        self.bos_token = found[0]
        self.bos_id = vocabulary[found[0]]

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of every text, BOS first, as int32 arrays."""
        # verbose=False: no warning about model_max_length, truncation is this module's own
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array([self.bos_id, *ids], dtype=np.int32) for ids in encoded]


def order_rows(rows: list[dict], max_per_task: int | None = None) -> list[dict]:
    """The rows in evaluation order: always shuffled by SHUFFLE_SEED, then cut to `max_per_task`."""
    if max_per_task is not None and max_per_task < 1:
        raise ValueError(f"max_per_task must be at least 1, or None for every row; got {max_per_task}.")
    rows = list(rows)
    random.Random(SHUFFLE_SEED).shuffle(rows)
    return rows[:max_per_task]


def draw_shots(num_rows: int, index: int, num_fewshot: int, seed: int) -> list[int]:
    """Indices of the demonstrations for row `index`: without it, in the order drawn, at most num_rows - 1."""
    if num_fewshot == 0:
        return []
    # the draw depends on positions only: position j of the rows without `index` is row j, or j + 1 after it
    drawn = random.Random(seed + index).sample(range(num_rows - 1), min(num_fewshot, num_rows - 1))
    return [j + (j >= index) for j in drawn]


def render(task: Task, row: dict, shots: list[dict], strip: bool = False) -> list[str]:
    """The prompts of a row: one per option; for language modelling the one without and the one with continuation."""
    if task.type == "multiple_choice":
        solved = [f"{shot['query']}{task.delimiter}{shot['choices'][shot['gold']]}" for shot in shots]
        ends = [f"{row['query']}{task.delimiter}{choice}" for choice in row["choices"]]
    elif task.type == "schema":
        solved = [f"{shot['context_options'][shot['gold']]}{task.delimiter}{shot['continuation']}" for shot in shots]
        ends = [f"{context}{task.delimiter}{row['continuation']}" for context in row["context_options"]]
    else:
        solved = [f"{shot['context'].strip()}{task.delimiter}{shot['continuation']}" for shot in shots]
        context = "\n\n".join([*solved, f"{row['context'].strip()}{task.delimiter}"])
        return [context.strip(), context + row["continuation"]]
    prompts = ["\n\n".join([*solved, end]) for end in ends]
    return [prompt.strip() for prompt in prompts] if strip else prompts


def common_length(sequences: list[np.ndarray]) -> int:
    """Number of leading tokens that all sequences share."""
    shortest = min(len(sequence) for sequence in sequences)
    first = sequences[0][:shortest]
    for other in sequences[1:]:
        differs = np.flatnonzero(first != other[: len(first)])
        if len(differs):
            first = first[: differs[0]]
    return len(first)


def spans(task_type: str, encoded: list[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """(sequences, first scored token of each) from a row's encoded prompts; spans end where sequences do.

    Multiple choice scores what follows the tokens that all options share, schema the tokens that all share at the end.
    Language modelling scores what the prompt with continuation has beyond the one without; a token that spans the join
    counts as continuation.
    """
    if task_type == "language_modeling":
        without, complete = encoded
        return [complete], [min(common_length([without, complete]), len(complete) - 1)]
    if task_type == "multiple_choice":
        return encoded, [max(common_length(encoded), 1)] * len(encoded)
    suffix = common_length([sequence[::-1] for sequence in encoded])
    return encoded, [max(len(sequence) - suffix, 1) for sequence in encoded]


def fill_empty_spans(sequences: list[np.ndarray], starts: list[int]) -> list[int]:
    """The finite rule for options of which one is a token prefix of another, so that its span is empty.

    The spans of all options then also take in the last token that they share. Every option has at least one scored
    token, all are treated alike, and the order of the options does not matter.
    """
    if all(start < len(sequence) for sequence, start in zip(sequences, starts, strict=True)):
        return starts
    return [max(start - 1, 1) for start in starts]


def crop(sequence: np.ndarray, starts: list[int], length: int | None, where: str) -> tuple[np.ndarray, list[int]]:
    """The last `length` tokens and the shifted starts.

    Raises TaskError when a scored token, or the token that predicts the first of them, would be cut off.
    """
    if length is None or len(sequence) <= length:
        return sequence, starts
    cut = len(sequence) - length
    if min(starts) - cut < 1:
        raise TaskError(
            f"{where}: the scored continuation has {len(sequence) - min(starts)} tokens, which with one token of "
            f"context does not fit a context length of {length}."
        )
    return sequence[cut:], [start - cut for start in starts]


def build_examples(
    task: Task,
    rows: list[dict],
    encoder: Encoder,
    compat: Compat,
    seed: int,
    context_length: int | None = None,
    finite_spans: bool = False,
    chunk_size: int = 256,
):
    """Yields the Example of every row of `rows` (in evaluation order, see `order_rows`)."""
    for first in range(0, len(rows), chunk_size):
        indices = range(first, min(first + chunk_size, len(rows)))
        prompts, answers = [], []
        for index in indices:
            shots = [rows[shot] for shot in draw_shots(len(rows), index, task.num_fewshot, seed)]
            prompts.append(render(task, rows[index], shots, compat.strip_prompt))
            if compat.answer_loss and task.type != "language_modeling":
                answers.append(_without_answer(task, rows[index], prompts[-1]))
        encoded = iter(encoder([text for texts in prompts for text in texts]))
        encoded_answers = iter(encoder(answers) if answers else [])
        for index, texts in zip(indices, prompts, strict=True):
            sequences, starts = spans(task.type, [next(encoded) for _ in texts])
            gold = rows[index]["gold"] if task.type != "language_modeling" else 0
            answer_start = None
            if compat.answer_loss:
                answer_start = starts[0]
                if task.type != "language_modeling":
                    answer_start = max(common_length([sequences[gold], next(encoded_answers)]), 1)
            yield _example(task, seed, index, sequences, starts, gold, answer_start, context_length, finite_spans)


def _without_answer(task: Task, row: dict, prompts: list[str]) -> str:
    """The gold prompt up to its answer, whose tokens show where the whole answer starts."""
    prompt = prompts[row["gold"]]
    answer = row["choices"][row["gold"]] if task.type == "multiple_choice" else row["continuation"]
    if not prompt.endswith(answer):  # the prompt was stripped
        answer = answer.rstrip()
    return prompt[: len(prompt) - len(answer)]


def _example(task, seed, index, sequences, starts, gold, answer_start, context_length, finite_spans) -> Example:
    where = f"task {task.name}, example {index}"
    is_choice = task.type != "language_modeling"
    if finite_spans and is_choice:
        starts = fill_empty_spans(sequences, starts)
    for i, sequence in enumerate(sequences):
        positions = [starts[i]] if answer_start is None or i != gold else [starts[i], answer_start]
        sequences[i], positions = crop(sequence, positions, context_length, where)
        starts[i] = positions[0]
        if len(positions) == 2:
            answer_start = positions[1]
    if answer_start is not None and answer_start >= len(sequences[gold]):
        raise TaskError(f"{where}: no token of the answer is left to score.")
    return Example(task.name, seed, index, sequences, starts, gold, is_choice, answer_start)
