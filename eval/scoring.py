"""Losses and outcomes of examples: a plain path that can be read at a glance, and a fast one that must equal it.

Multiple choice and schema: the option with the smallest mean loss over its span, the first one of equals. Language
modelling: every token of the span is the argmax. An empty span has no mean: option 0 wins if its span is empty, other
empty spans never win (what a Python minimum over NaN gives, and hence nanochat and the paper);
`prompts.fill_empty_spans` avoids the case.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from eval.batching import EFFICIENT_TOKENS, Batch, SequenceStore, too_short
from eval.forward import cache_name, scored_logits, suffix_logits
from eval.prompts import Example


@dataclass
class Outcome:
    """What was found for one example; losses in nats.

    option_losses: mean loss over each option's span, NaN for an empty one. span_loss: sum over the span of the gold
    sequence. answer_loss: mean over the whole gold answer, answer_bits_per_byte its bits per UTF-8 byte; NaN when not
    asked for.
    """

    correct: bool
    prediction: int
    option_losses: list[float]
    span_loss: float
    answer_loss: float = math.nan
    answer_bits_per_byte: float = math.nan


def choose(option_losses: np.ndarray) -> np.ndarray:
    """Index of the chosen option in each row of (examples, options); inf stands for "no such option"."""
    first_is_empty = np.isnan(option_losses[:, 0])
    return np.where(first_is_empty, 0, np.argmin(np.where(np.isnan(option_losses), np.inf, option_losses), axis=1))


@torch.no_grad()
def score_plain(
    model: nn.Module, example: Example, token_bytes: np.ndarray | None = None, forward_kwargs: dict | None = None
) -> Outcome:
    """One example in one forward over its whole, right-padded sequences, with all logits."""
    device = next(model.parameters()).device
    distinct = {sequence.tobytes(): sequence for sequence in example.sequences}
    input_ids = torch.zeros(len(distinct), max(len(s) for s in example.sequences), dtype=torch.long)
    for row, sequence in enumerate(distinct.values()):
        input_ids[row, : len(sequence)] = torch.from_numpy(sequence)
    logits = model(input_ids=input_ids.to(device), use_cache=False, **(forward_kwargs or {})).logits
    rows = {key: row for row, key in enumerate(distinct)}

    def scored(sequence: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """(losses, is the argmax) of the tokens from `start` to the sequence's end."""
        predictions = logits[rows[sequence.tobytes()], start - 1 : len(sequence) - 1].float()
        targets = torch.from_numpy(sequence[start:].astype(np.int64)).to(predictions.device)
        losses = nn.functional.cross_entropy(predictions, targets, reduction="none")
        return losses.double().cpu().numpy(), (predictions.argmax(-1) == targets).cpu().numpy()

    spans = [scored(*option)[0] for option in zip(example.sequences, example.starts, strict=True)]
    means = [float(span.mean()) if len(span) else math.nan for span in spans]
    gold = example.sequences[example.gold]
    if example.is_choice:
        prediction = int(choose(np.array([means]))[0])
        correct = prediction == example.gold
    else:
        prediction, correct = 0, bool(scored(gold, example.starts[0])[1].all())
    outcome = Outcome(correct, prediction, means, float(spans[example.gold].sum()))
    if example.answer_start is not None:
        answer, _ = scored(gold, example.answer_start)
        outcome.answer_loss = float(answer.mean())
        if token_bytes is not None:
            outcome.answer_bits_per_byte = _bits_per_byte(answer, token_bytes[gold[example.answer_start :]])
    return outcome


def _bits_per_byte(losses: np.ndarray, num_bytes: np.ndarray) -> float:
    """Bits per byte over the tokens that stand for bytes (special tokens stand for none)."""
    counted = num_bytes > 0
    return float(losses[counted].sum() / (math.log(2) * num_bytes[counted].sum())) if counted.any() else math.nan


def score_batch(
    model: nn.Module,
    store: SequenceStore,
    batch: Batch,
    token_bytes: np.ndarray | None = None,
    forward_kwargs: dict | None = None,
    logits_per_forward: int = 1024,
) -> Iterator[tuple[int, Outcome]]:
    """(example, outcome) for every example of a batch; the numbers of `score_plain` up to rounding."""
    sequences, ranges, losses, hits = batch_losses(model, store, batch, forward_kwargs, logits_per_forward)
    order = np.argsort(sequences)
    # sums over any span are differences of running sums
    loss_sums = np.concatenate([[0.0], np.cumsum(losses)])
    hit_sums = np.concatenate([[0], np.cumsum(hits)])

    examples = np.array(batch.examples)
    options = np.concatenate([np.arange(store.option_range[e], store.option_range[e + 1]) for e in examples])
    of_option = order[np.searchsorted(sequences, store.option_sequence[options], sorter=order)]
    begin = ranges[of_option] + store.option_start[options] - store.first[sequences[of_option]]
    end = ranges[of_option + 1]
    num_scored = np.maximum(end - begin, 0)
    begin = np.minimum(begin, end)
    sums = loss_sums[end] - loss_sums[begin]
    means = np.where(num_scored > 0, sums / np.maximum(num_scored, 1), np.nan)
    all_hit = hit_sums[end] - hit_sums[begin] == num_scored

    num_options = store.option_range[examples + 1] - store.option_range[examples]
    first_option = np.concatenate([[0], np.cumsum(num_options)])
    table = np.full((len(examples), num_options.max()), np.inf)
    of_example = np.repeat(np.arange(len(examples)), num_options)
    table[of_example, np.arange(len(options)) - first_option[of_example]] = means
    predictions = choose(table)
    for row, e in enumerate(examples):
        example = store.examples[e]
        gold = first_option[row] + example.gold
        prediction = int(predictions[row]) if example.is_choice else 0
        correct = prediction == example.gold if example.is_choice else bool(all_hit[gold])
        option_losses = means[first_option[row] : first_option[row + 1]].tolist()
        outcome = Outcome(correct, prediction, option_losses, float(sums[gold]))
        if example.answer_start is not None:
            stop = end[gold]
            start = stop - (len(example.sequences[example.gold]) - example.answer_start)
            outcome.answer_loss = float((loss_sums[stop] - loss_sums[start]) / (stop - start))
            if token_bytes is not None:
                answer = example.sequences[example.gold][example.answer_start :]
                outcome.answer_bits_per_byte = _bits_per_byte(losses[start:stop], token_bytes[answer])
        yield int(e), outcome


@torch.no_grad()
def batch_losses(
    model: nn.Module, store: SequenceStore, batch: Batch, forward_kwargs: dict | None, logits_per_forward: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(sequences, ranges, losses, hits): the loss of every scored token and whether it is the argmax.

    The scored tokens of sequences[i] are entries ranges[i] to ranges[i + 1] of losses (float64) and hits.
    """
    device = next(model.parameters()).device
    kwargs = forward_kwargs or {}
    sequences = np.concatenate([group.sequences for group in batch.groups])
    group_of = np.repeat(np.arange(len(batch.groups)), [len(group.sequences) for group in batch.groups])
    prefix = np.array([group.prefix for group in batch.groups])[group_of]
    needed = store.needed[sequences]
    num_scored = np.where(needed > 0, store.length[sequences] - store.first[sequences], 0)
    ranges = np.concatenate([[0], np.cumsum(num_scored)])

    # scored token t of a sequence is predicted at position t - 1: in its row of the first forward, or in its suffix
    of_token = np.repeat(np.arange(len(sequences)), num_scored)
    predictor = np.arange(ranges[-1]) - ranges[of_token] + store.first[sequences[of_token]] - 1
    targets = store.tokens[store.offset[sequences[of_token]] + predictor + 1].astype(np.int64)
    losses, hits = np.empty(len(targets)), np.empty(len(targets), dtype=bool)

    # rows of the first forward: the shared prefix of a group, or every sequence where nothing is shared
    opens_row = (prefix == 0) | np.concatenate([[True], group_of[1:] != group_of[:-1]])
    row_of = np.cumsum(opens_row) - 1
    in_first = np.where(prefix > 0, prefix, needed)
    input_ids = _padded(store, sequences[opens_row], in_first[opens_row])
    chosen = predictor < in_first[of_token]
    flat = row_of[of_token[chosen]] * input_ids.shape[1] + predictor[chosen]
    positions, inverse = np.unique(flat, return_inverse=True)
    suffix = np.maximum(needed - in_first, 0)
    logits, output = scored_logits(
        model, torch.from_numpy(input_ids).to(device), positions, use_cache=bool(suffix.any()), **kwargs
    )
    losses[chosen], hits[chosen] = _token_losses(logits, inverse, targets[chosen])
    if not suffix.any():
        return sequences, ranges, losses, hits

    cache = getattr(output, cache_name(model))
    del output, logits
    packed_row = np.concatenate([group.packed_row for group in batch.groups])
    packed_column = np.concatenate([group.packed_column for group in batch.groups])
    # ids of the packed rows that hold a suffix at all, and their widths
    _, packed_row = np.unique(group_of * (packed_row.max() + 1) + packed_row, return_inverse=True)
    widths = np.zeros(packed_row.max() + 1, dtype=np.int64)
    np.maximum.at(widths, packed_row, np.where(suffix > 0, packed_column + suffix, 0))
    for rows in _chunks(widths, logits_per_forward):
        local = np.full(len(widths), -1)
        local[rows] = np.arange(len(rows))
        width = int(widths[rows].max())
        members = np.flatnonzero((local[packed_row] >= 0) & (suffix > 0))
        of_slot = np.repeat(members, suffix[members])
        step = np.arange(len(of_slot)) - np.repeat(np.cumsum(suffix[members]) - suffix[members], suffix[members])
        slot = local[packed_row[of_slot]] * width + packed_column[of_slot] + step
        filled = np.zeros((3, len(rows) * width), dtype=np.int64)
        filled[2] = -1
        filled[0, slot] = store.tokens[store.offset[sequences[of_slot]] + prefix[of_slot] + step]
        filled[1, slot] = prefix[of_slot] + step
        filled[2, slot] = of_slot
        suffix_ids, position_ids, segments = torch.from_numpy(filled).view(3, len(rows), width)
        source = np.zeros(len(rows), dtype=np.int64)
        source[local[packed_row[members]]] = row_of[members]
        prefix_lengths = np.zeros(len(rows), dtype=np.int64)
        prefix_lengths[local[packed_row[members]]] = prefix[members]

        chosen = np.isin(of_token, members) & (predictor >= in_first[of_token])
        of_chosen = of_token[chosen]
        flat = local[packed_row[of_chosen]] * width + packed_column[of_chosen] + predictor[chosen] - prefix[of_chosen]
        positions, inverse = np.unique(flat, return_inverse=True)
        logits = suffix_logits(
            model,
            cache,
            suffix_ids.to(device),
            position_ids,
            segments,
            torch.from_numpy(source),
            torch.from_numpy(prefix_lengths),
            positions,
            **kwargs,
        )
        losses[chosen], hits[chosen] = _token_losses(logits, inverse, targets[chosen])
    return sequences, ranges, losses, hits


def _padded(store: SequenceStore, sequences: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The first lengths[i] tokens of each sequence as int64 rows, padded on the right by token 0.

    Causality makes the padding invisible to what stands before it, so no mask is needed.
    """
    columns = np.arange(max(int(lengths.max()), 1))
    inside = columns < lengths[:, None]
    source = np.where(inside, store.offset[sequences][:, None] + columns, 0)
    return np.where(inside, store.tokens[source], 0).astype(np.int64)


def _chunks(widths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Rows that hold anything, by width, in chunks of at most `budget` slots (at least one row) and little padding."""
    order = np.argsort(-widths, kind="stable")
    order = order[widths[order] > 0]
    first = 0
    for i in range(1, len(order) + 1):
        longest = int(widths[order[first]])
        used = (i - first) * longest
        if i < len(order) and used + longest <= budget:
            if used < EFFICIENT_TOKENS or not too_short(int(widths[order[i]]), longest):
                continue
        yield order[first:i]
        first = i


def _token_losses(logits: torch.Tensor, row: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(losses in float64, argmax is target) of `targets` under the logits rows `row`."""
    row, targets = (torch.from_numpy(array).to(logits.device) for array in (row, targets))
    normalizer, best = logits.logsumexp(-1), logits.argmax(-1)
    losses = normalizer[row] - logits[row, targets]
    return losses.double().cpu().numpy(), (best[row] == targets).cpu().numpy()
