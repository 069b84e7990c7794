"""Which tokens run together: questions of many tasks in batches by length, with what they share run once.

A group is one or more examples whose sequences begin alike: the options of a question, or questions on one passage.
Its shared prefix is one row of the first forward; the suffixes are packed side by side into rows of a second forward
that reads the prefix's cache. Grouping minimises the number of executed tokens (dynamic programming over the examples
in lexicographic order). The last token of a sequence predicts nothing that is scored and is never run. The plan
depends on the examples and the budget alone, so that any number of processes executes the same batches.
"""

from dataclasses import dataclass

import numpy as np

from eval.prompts import Example, common_length

PACKED_ROW_TOKENS = 256  # suffixes of a group share a row of the second forward up to this many tokens
SUFFIX_OVERHEAD = 2  # what a suffix costs beyond its tokens, in tokens: mask, cache and padding
MAX_GROUP_EXAMPLES = 32
EFFICIENT_TOKENS = 256  # a forward of that many tokens is about as fast per token as a larger one
MAX_PADDING = 0.2  # share of a row that may be padding, once a forward is large enough to be efficient
MIN_SHARED_TOKENS = 8  # groups of several examples share at least this many


class SequenceStore:
    """The distinct sequences of a list of examples in one flat array, with what is scored of each.

    Per sequence s: offset[s], length[s], first[s] (first token whose loss is needed) and needed[s] (tokens that must
    run: all but the last, none when nothing is scored). Per option o of all examples in order: option_sequence[o],
    option_start[o]; example e has the options option_range[e] to option_range[e + 1]. Identical options of an example
    are one sequence, so that they tie exactly. The examples' own arrays become views of the flat one: a full run of
    CORE is 159 million tokens.
    """

    def __init__(self, examples: list[Example]):
        tokens, first, option_sequence, option_start, option_range = [], [], [], [], [0]
        for example in examples:
            known = {}
            for option, (sequence, start) in enumerate(zip(example.sequences, example.starts, strict=True)):
                s = known.setdefault(sequence.tobytes(), len(tokens))
                if s == len(tokens):
                    tokens.append(sequence)
                    first.append(start)
                if example.answer_start is not None and option == example.gold:
                    first[s] = min(first[s], example.answer_start)
                option_sequence.append(s)
                option_start.append(start)
            option_range.append(len(option_sequence))
        self.examples = examples
        self.length = np.array([len(sequence) for sequence in tokens], dtype=np.int64)
        self.offset = np.concatenate([[0], np.cumsum(self.length)])[:-1]
        self.first = np.array(first, dtype=np.int64)
        self.tokens = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int32)
        self.needed = np.where(self.first < self.length, self.length - 1, 0)
        for example, begin in zip(examples, option_range, strict=False):
            stop = begin + len(example.sequences)
            example.sequences = [self.sequence(s) for s in option_sequence[begin:stop]]
        self.option_sequence = np.array(option_sequence, dtype=np.int64)
        self.option_start = np.array(option_start, dtype=np.int64)
        self.option_range = np.array(option_range, dtype=np.int64)

    def sequence(self, s: int) -> np.ndarray:
        return self.tokens[self.offset[s] : self.offset[s] + self.length[s]]

    def sequences_of(self, e: int) -> np.ndarray:
        """The distinct sequences of example `e`."""
        return np.unique(self.option_sequence[self.option_range[e] : self.option_range[e + 1]])


@dataclass
class Group:
    """Examples that run together: `prefix` tokens are shared by all `sequences` (0: every sequence has its own row).

    packed_row and packed_column place the suffix of every sequence in the group's rows of the second forward.
    """

    examples: list[int]
    sequences: np.ndarray
    prefix: int
    packed_row: np.ndarray
    packed_column: np.ndarray
    row_length: int
    num_rows: int


@dataclass
class Batch:
    """Groups of one pair of forwards, and the tokens that these execute without padding."""

    groups: list[Group]
    num_tokens: int

    @property
    def examples(self) -> list[int]:
        return [e for group in self.groups for e in group.examples]


def plan_batches(store: SequenceStore, tokens_per_batch: int, share_prefixes: bool = True) -> list[Batch]:
    """Batches of at most `tokens_per_batch` tokens in the first forward (padding included), longest rows first.

    A group that is larger alone is a batch of its own. share_prefixes=False runs every sequence whole.
    """
    if tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}.")
    groups = [_group(store, *found) for found in _find_groups(store, share_prefixes)]
    groups.sort(key=lambda group: (-group.row_length, group.examples[0]))
    batches, current, rows = [], [], 0
    for group in groups:
        longest = current[0].row_length if current else group.row_length
        full = (rows + group.num_rows) * longest > tokens_per_batch
        if current and (full or (too_short(group.row_length, longest) and rows * longest >= EFFICIENT_TOKENS)):
            batches.append(_batch(store, current))
            current, rows = [], 0
        current.append(group)
        rows += group.num_rows
    if current:
        batches.append(_batch(store, current))
    return batches


def too_short(length: int, longest: int) -> bool:
    """Whether a row of `length` tokens is better run apart from one of `longest`."""
    return length < (1 - MAX_PADDING) * longest


def _batch(store: SequenceStore, groups: list[Group]) -> Batch:
    return Batch(groups, sum(executed_tokens(store, group.sequences, group.prefix) for group in groups))


def executed_tokens(store: SequenceStore, sequences: np.ndarray, prefix: int) -> int:
    """Tokens that run for `sequences` with `prefix` shared tokens."""
    return int(prefix + np.maximum(store.needed[sequences] - prefix, 0).sum())


def _group(store: SequenceStore, examples: list[int], prefix: int) -> Group:
    sequences = np.concatenate([store.sequences_of(e) for e in examples])
    needed = store.needed[sequences]
    packed_row = np.zeros(len(sequences), dtype=np.int64)
    packed_column = np.zeros(len(sequences), dtype=np.int64)
    if prefix:
        row = column = 0
        for i, suffix in enumerate(np.maximum(needed - prefix, 0)):
            if column and column + suffix > PACKED_ROW_TOKENS:
                row, column = row + 1, 0
            packed_row[i], packed_column[i] = row, column
            column += suffix
    row_length = prefix or int(needed.max(initial=0))
    return Group(examples, sequences, prefix, packed_row, packed_column, row_length, 1 if prefix else len(sequences))


def _find_groups(store: SequenceStore, share_prefixes: bool):
    """Yields (examples, shared prefix) so that the fewest tokens run."""
    num_examples = len(store.examples)
    if not share_prefixes:
        yield from (([e], 0) for e in range(num_examples))
        return
    # big-endian bytes sort as the tokens do
    keys = [store.sequence(store.option_sequence[store.option_range[e]]) for e in range(num_examples)]
    order = sorted(range(num_examples), key=lambda e: keys[e].astype(">i4").tobytes())
    own, needed, num_sequences, alone = [], [], [], []
    for e in order:
        sequences = store.sequences_of(e)
        lengths = store.needed[sequences]
        scored = lengths[lengths > 0]
        shared = common_length([store.sequence(s) for s in sequences])
        own.append(int(min(shared, scored.min(initial=shared))) if len(scored) else 0)
        needed.append(int(lengths.sum()))
        num_sequences.append(len(scored))
        alone.append(_best_alone(own[-1], needed[-1], num_sequences[-1]))
    neighbours = [common_length([keys[a], keys[b]]) for a, b in zip(order, order[1:], strict=False)]

    cost, choice = [0.0], []
    for end in range(1, num_examples + 1):
        best = (cost[end - 1] + alone[end - 1][0], end - 1, alone[end - 1][1])
        shared, total, count = own[end - 1], needed[end - 1], num_sequences[end - 1]
        for start in range(end - 2, max(end - 1 - MAX_GROUP_EXAMPLES, -1), -1):
            shared = min(shared, own[start], neighbours[start])
            if shared < MIN_SHARED_TOKENS:
                break
            total, count = total + needed[start], count + num_sequences[start]
            together = cost[start] + _shared_cost(shared, total, count)
            if together < best[0]:
                best = (together, start, shared)
        cost.append(best[0])
        choice.append(best[1:])
    end = num_examples
    while end:
        start, prefix = choice[end - 1]
        yield [order[i] for i in range(start, end)], prefix
        end = start


def _shared_cost(prefix: int, needed: int, count: int) -> float:
    return prefix + needed - count * prefix + SUFFIX_OVERHEAD * count


def _best_alone(prefix: int, needed: int, count: int) -> tuple[float, int]:
    """(cost, shared prefix) of an example by itself."""
    if count > 1 and prefix > 0 and (shared := _shared_cost(prefix, needed, count)) < needed:
        return shared, prefix
    return needed, 0
