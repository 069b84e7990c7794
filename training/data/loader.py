"""Batches of windows out of a token pool, as a pure function of the step.

Documents are shuffled per epoch, joined, and cut into windows of sequence_length + 1 tokens, which are shuffled in
turn; step s of a run takes the next `global_batch_windows` of them. Nothing is remembered between calls and no global
random state is touched: a resumed run, a run on more processes, with another accumulation, or on a grown model reads
the same tokens at the same step. Only the order of the documents is held in memory, tokens stay in the memory maps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from training.data.shards import TokenPool

IGNORED_TARGET = -100  # torch's default ignore_index in cross_entropy


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        input_ids: int64 (B, T).
        targets: int64 (B, T), the next token at every position: already shifted. IGNORED_TARGET in filler rows, which
            only validation has.
        epoch: from 1; 0 for validation.
        windows: int64 (B,), the windows' indices in the epoch's joined documents; filler rows repeat one.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    epoch: int
    windows: np.ndarray


class _Stream:
    """The documents of a pool, up to `num_tokens` in file order, joined in a given order: where each position lies."""

    def __init__(self, pool: TokenPool, num_tokens: int, order: np.ndarray | None):
        starts = pool.document_starts[: np.searchsorted(pool.document_starts, num_tokens, side="left")]
        lengths = np.diff(starts, append=num_tokens)
        self._pool = pool
        self._starts = starts if order is None else starts[order]
        self._begins = np.concatenate([[0], np.cumsum(lengths if order is None else lengths[order])])

    def windows(self, indices: np.ndarray, length: int) -> torch.Tensor:
        """The windows [i * length, (i + 1) * length) of the stream: int64 (len(indices), length)."""
        begins = indices * length
        first = np.searchsorted(self._begins, begins, side="right") - 1
        counts = np.searchsorted(self._begins, begins + length, side="left") - first
        # One row per span of a document inside a window.
        window = np.repeat(np.arange(len(indices)), counts)
        document = np.arange(len(window)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        span_begins = np.maximum(self._begins[document], begins[window])
        span_ends = np.minimum(self._begins[document + 1], begins[window] + length)
        tokens = self._pool.gather(
            self._starts[document] + span_begins - self._begins[document], span_ends - span_begins
        )
        return torch.from_numpy(tokens).view(len(indices), length)


class WindowLoader:
    """Training batches: each epoch goes once through the pool in its own order.

    Epoch e (from 1) permutes the documents with a torch generator seeded seed + 1000003 e, joins them, cuts windows of
    T + 1 tokens (one may start inside a document, and its last target is not used again as input), permutes these with
    seed + 1000003 e + 101, and keeps the largest multiple of `window_multiple` of them. They are dealt as
    [step, micro-step, rank, row]. This is the order of the paper's training code, and its fixtures hold it to that.

    Args:
        pool: the training pool.
        sequence_length: T, the positions the model sees.
        global_batch_windows: windows per optimizer step, over all ranks and micro-steps.
        seed: of both shuffles.
        token_limit: use the pool's first so many tokens only, in file order; null uses all.
        shuffle_documents, shuffle_windows: turn a shuffle off.
        window_multiple: an epoch's windows are cut to a multiple of this, itself a multiple of `global_batch_windows`
            and by default equal to it. A larger one gives runs of different batch sizes the same epochs.

    Attributes:
        num_windows, steps_per_epoch: per epoch, after the cut.
        tokens_per_step: targets in one step, global_batch_windows * T.

    Raises:
        ValueError: a size is not positive, window_multiple does not fit, or the pool has too few tokens for one step.
    """

    def __init__(
        self,
        pool: TokenPool,
        sequence_length: int,
        global_batch_windows: int,
        seed: int,
        token_limit: int | None = None,
        shuffle_documents: bool = True,
        shuffle_windows: bool = True,
        window_multiple: int | None = None,
    ):
        _check_positive(
            sequence_length=sequence_length,
            global_batch_windows=global_batch_windows,
            token_limit=token_limit,
            window_multiple=window_multiple,
        )
        multiple = window_multiple or global_batch_windows
        if multiple % global_batch_windows:
            raise ValueError(
                f"window_multiple={multiple} must be a multiple of global_batch_windows={global_batch_windows}"
            )
        self.pool = pool
        self.sequence_length = sequence_length
        self.global_batch_windows = global_batch_windows
        self.seed = seed
        self.shuffle_documents = shuffle_documents
        self.shuffle_windows = shuffle_windows
        self.num_tokens = pool.num_tokens if token_limit is None else min(token_limit, pool.num_tokens)
        self._num_cut_windows = self.num_tokens // (sequence_length + 1)
        self.num_windows = self._num_cut_windows // multiple * multiple
        if self.num_windows == 0:
            raise ValueError(
                f"{pool.folder} gives {self._num_cut_windows} windows of sequence_length + 1 = {sequence_length + 1} "
                f"tokens ({self.num_tokens} tokens), one step needs {multiple}: prepare more text, or lower "
                "sequence_length or the tokens per step"
            )
        self.steps_per_epoch = self.num_windows // global_batch_windows
        self.tokens_per_step = global_batch_windows * sequence_length
        self._epoch: tuple[int, _Stream, np.ndarray] | None = None

    def identity(self) -> dict[str, Any]:
        """What decides which tokens a step reads, as JSON: a resumed run compares it with its checkpoint's."""
        return {
            "pool_sha256": self.pool.sha256,
            "num_tokens": self.num_tokens,
            "sequence_length": self.sequence_length,
            "global_batch_windows": self.global_batch_windows,
            "num_windows": self.num_windows,
            "seed": self.seed,
            "shuffle_documents": self.shuffle_documents,
            "shuffle_windows": self.shuffle_windows,
        }

    def epoch_of(self, step: int) -> int:
        """The epoch, from 1, that step (from 0) belongs to."""
        return step // self.steps_per_epoch + 1

    def step_windows(self, step: int) -> np.ndarray:
        """The windows of one step over all ranks, in dealing order: int64 (global_batch_windows,)."""
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        _, order = self._layout(self.epoch_of(step))
        first = step % self.steps_per_epoch * self.global_batch_windows
        return order[first : first + self.global_batch_windows]

    def batch(
        self, step: int, rank: int = 0, world_size: int = 1, micro_batch: int | None = None, micro_step: int = 0
    ) -> Batch:
        """The windows that one rank reads in one micro-step of a step.

        Args:
            step: optimizer step, from 0.
            micro_batch: windows per rank and micro-step; null means no accumulation, the rank's whole share at once.
            micro_step: which of the step's `num_micro_steps`, from 0.

        Raises:
            ValueError: ranks and micro-batch do not divide the global batch, or an index is out of range.
        """
        num_micro_steps = self.num_micro_steps(world_size, micro_batch)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must lie in [0, world_size={world_size})")
        if not 0 <= micro_step < num_micro_steps:
            raise ValueError(f"micro_step={micro_step} must lie in [0, {num_micro_steps})")
        indices = self.step_windows(step).reshape(num_micro_steps, world_size, -1)[micro_step, rank]
        epoch = self.epoch_of(step)
        tokens = self._layout(epoch)[0].windows(indices, self.sequence_length + 1)
        return Batch(tokens[:, :-1], tokens[:, 1:], epoch, indices)

    def num_micro_steps(self, world_size: int = 1, micro_batch: int | None = None) -> int:
        """Accumulation steps that make up the global batch.

        Raises:
            ValueError: world_size * micro_batch does not divide global_batch_windows.
        """
        _check_positive(world_size=world_size, micro_batch=micro_batch)
        at_once = world_size * (micro_batch or 1)
        if self.global_batch_windows % at_once:
            raise ValueError(
                f"global_batch_windows={self.global_batch_windows} is not a multiple of "
                f"world_size * micro_batch = {world_size} * {micro_batch or 1}: change one of them"
            )
        return 1 if micro_batch is None else self.global_batch_windows // at_once

    def _layout(self, epoch: int) -> tuple[_Stream, np.ndarray]:
        if self._epoch is None or self._epoch[0] != epoch:
            seed = self.seed + 1000003 * epoch
            num_documents = int(np.searchsorted(self.pool.document_starts, self.num_tokens, side="left"))
            documents = _permutation(num_documents, seed) if self.shuffle_documents else None
            windows = np.arange(self._num_cut_windows)
            if self.shuffle_windows:
                windows = _permutation(self._num_cut_windows, seed + 101)
            self._epoch = (epoch, _Stream(self.pool, self.num_tokens, documents), windows[: self.num_windows])
        return self._epoch[1:]


class ValidationLoader:
    """The first `token_limit` tokens of a pool in file order, in windows, each scored exactly once.

    Args:
        pool: the validation pool.
        sequence_length: T; windows hold T + 1 tokens.
        token_limit: null uses the whole pool. The paper's is 10,000,000.
        window_multiple: cut the windows to a multiple of this. The paper's code cuts to its global batch: of 4,880
            windows 4,864 are used. The default, 1, drops nothing.

    Attributes:
        num_windows, num_targets: scored in one pass over the data.

    Raises:
        ValueError: a size is not positive, or there is not a single window.
    """

    def __init__(
        self, pool: TokenPool, sequence_length: int, token_limit: int | None = None, window_multiple: int = 1
    ):
        _check_positive(sequence_length=sequence_length, token_limit=token_limit, window_multiple=window_multiple)
        self.pool = pool
        self.sequence_length = sequence_length
        self.num_tokens = pool.num_tokens if token_limit is None else min(token_limit, pool.num_tokens)
        self.num_windows = self.num_tokens // (sequence_length + 1) // window_multiple * window_multiple
        if self.num_windows == 0:
            raise ValueError(
                f"{pool.folder} gives no validation window: it has {self.num_tokens} tokens, a window takes "
                f"{sequence_length + 1}, and windows come in multiples of {window_multiple}. Prepare more validation "
                "text (validation_fraction, validation_tokens) or lower sequence_length"
            )
        self.num_targets = self.num_windows * sequence_length
        self._stream = _Stream(pool, self.num_tokens, None)

    def num_batches(self, world_size: int = 1, batch_windows: int = 1) -> int:
        """Batches per rank, the same for every rank."""
        return -(-self.num_windows // (world_size * batch_windows))

    def batches(self, rank: int = 0, world_size: int = 1, batch_windows: int = 1) -> Iterator[Batch]:
        """One rank's part, dealt as [batch, rank, row].

        Every rank gets the same number of batches of one shape, because sharded models compute in lockstep; rows
        beyond the last window are filler whose targets are all IGNORED_TARGET, so no row counts twice.
        """
        _check_positive(world_size=world_size, batch_windows=batch_windows)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must lie in [0, world_size={world_size})")
        for number in range(self.num_batches(world_size, batch_windows)):
            first = (number * world_size + rank) * batch_windows
            indices = np.arange(first, first + batch_windows)
            filler = indices >= self.num_windows
            indices = np.minimum(indices, self.num_windows - 1)
            tokens = self._stream.windows(indices, self.sequence_length + 1)
            targets = tokens[:, 1:].clone()
            targets[torch.from_numpy(filler)] = IGNORED_TARGET
            yield Batch(tokens[:, :-1], targets, 0, indices)

    def mean_loss(
        self,
        loss_sum: Callable[[Batch], torch.Tensor],
        rank: int = 0,
        world_size: int = 1,
        batch_windows: int = 1,
    ) -> float:
        """Mean loss per target over all ranks, each target once: the sum of losses over the number of targets.

        Args:
            loss_sum: the summed loss of a batch over its targets that are not IGNORED_TARGET, a scalar tensor on the
                device the process group communicates on. With world_size > 1 every rank calls this method.
        """
        total, device = 0.0, torch.device("cpu")
        for batch in self.batches(rank, world_size, batch_windows):
            loss = loss_sum(batch)
            total, device = total + float(loss), loss.device
        if world_size > 1:
            summed = torch.tensor(total, dtype=torch.float64, device=device)
            torch.distributed.all_reduce(summed)
            total = float(summed)
        return total / self.num_targets


def _permutation(num: int, seed: int) -> np.ndarray:
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed)).numpy()


def _check_positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}={size!r} must be a positive integer")
