"""Parameters, FLOPs and bytes of a looped model, by section, from its config alone.

Convention of the paper (arXiv 2609.19107): a token costs 6 FLOPs per executed parameter of a matrix product, head
included (2 forward, 4 backward), plus attention; the embedding is a look-up and free, and so are norms, activations,
the softmax and anything recomputed. Causal attention counts the pairs of query and key that the mask leaves.
Every count is formed twice, by section and from the order of execution, and the two must agree. `config.vocab_size`
counts the rows as stored; the paper's counts use rows padded to a multiple of 64: pass `pad_vocab_size(vocab_size)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .boundary import make_boundary_operator
from .configuration_looped import LoopedConfig

SECTIONS = ("embedding", "prelude", "core", "boundary", "coda", "head", "norms", "attention")


@dataclass(frozen=True)
class SectionCount:
    """A count by section; `total` is formed in another way and must be the sum.

    `prelude`, `core` and `coda` are the matrices of their blocks. `attention` is what attention does besides its
    projections (scores and weighted values), so it is 0 where parameters are counted. `norms` are all gains.
    """

    total: int
    embedding: int = 0
    prelude: int = 0
    core: int = 0
    boundary: int = 0
    coda: int = 0
    head: int = 0
    norms: int = 0
    attention: int = 0

    def __post_init__(self):
        by_section = sum(getattr(self, section) for section in SECTIONS)
        assert by_section == self.total, f"sections sum to {by_section}, the total is {self.total}: {self}"


def pad_vocab_size(vocab_size: int, multiple: int = 64) -> int:
    """Rows of embedding and head in the paper's counts: `vocab_size` up to the next multiple (50257 -> 50304)."""
    return multiple * -(-vocab_size // multiple)


def stored_parameters(config: LoopedConfig, *, padded_vocab_size: int | None = None) -> SectionCount:
    """Parameters of the checkpoint. A tied core counts once, dormant cores of an untied model count too.

    Args:
        padded_vocab_size: rows of embedding and head; None for `config.vocab_size`, what the model really holds.
    """
    rows = config.vocab_size if padded_vocab_size is None else padded_vocab_size
    embedding = rows * config.hidden_size
    head = 0 if config.tie_word_embeddings else embedding
    block = _block_matrices(config)
    boundary = _boundary_parameters(config)
    norms = _norm_parameters(config, config.num_stored_blocks)
    return SectionCount(
        total=embedding + config.num_stored_blocks * block + boundary + head + norms,
        embedding=embedding,
        prelude=config.num_prelude_blocks * block,
        core=config.num_stored_cores * config.num_core_blocks * block,
        boundary=boundary,
        coda=config.num_coda_blocks * block,
        head=head,
        norms=norms,
    )


def executed_parameters(
    config: LoopedConfig, *, num_loops: int | None = None, padded_vocab_size: int | None = None
) -> SectionCount:
    """Parameters times their executions in one forward: the core and the boundary operator `num_loops` times.

    Raises:
        ValueError: the model cannot execute `num_loops` passes.
    """
    num_loops = _num_loops(config, num_loops)
    rows = config.vocab_size if padded_vocab_size is None else padded_vocab_size
    block = _block_matrices(config)
    boundary = _boundary_parameters(config) * num_loops
    num_executed_blocks = len(config.schedule(num_loops))
    norms = _norm_parameters(config, num_executed_blocks)
    return SectionCount(
        total=2 * rows * config.hidden_size + num_executed_blocks * block + boundary + norms,
        embedding=rows * config.hidden_size,
        prelude=config.num_prelude_blocks * block,
        core=num_loops * config.num_core_blocks * block,
        boundary=boundary,
        coda=config.num_coda_blocks * block,
        head=rows * config.hidden_size,
        norms=norms,
    )


def matrix_parameters(
    config: LoopedConfig, *, num_loops: int | None = None, padded_vocab_size: int | None = None
) -> SectionCount:
    """Executed parameters of matrix products, head included: what 6 FLOPs each are counted for.

    Raises:
        ValueError: the model cannot execute `num_loops` passes.
    """
    num_loops = _num_loops(config, num_loops)
    rows = config.vocab_size if padded_vocab_size is None else padded_vocab_size
    block = _block_matrices(config)
    head = rows * config.hidden_size
    boundary = _boundary_parameters(config, matrices_only=True) * num_loops
    return SectionCount(
        total=len(config.schedule(num_loops)) * block + boundary + head,
        prelude=config.num_prelude_blocks * block,
        core=num_loops * config.num_core_blocks * block,
        boundary=boundary,
        coda=config.num_coda_blocks * block,
        head=head,
    )


def training_flops_per_token(
    config: LoopedConfig,
    *,
    num_loops: int | None = None,
    sequence_length: int | None = None,
    padded_vocab_size: int | None = None,
    causal: bool = True,
) -> SectionCount:
    """FLOPs of forward and backward per trained token, the mean over a sequence of `sequence_length` tokens.

    6 * (executed matrix parameters + head) + executed blocks * 6 * A * (T + 1), with T = sequence_length and
    A = num_attention_heads * head_dim (hidden_size in the paper's models).

    Args:
        num_loops: passes of the core; None for the config's.
        sequence_length: T; None for `max_position_embeddings`.
        padded_vocab_size: rows of the head; None for `config.vocab_size`.
        causal: a query meets the keys up to its own, (T + 1) / 2 of them on average, as the paper counts. False counts
            all T keys, as a FLOP counter does that sees dense products.

    Raises:
        ValueError: the model cannot execute `num_loops` passes, or a sequence length below 1.
    """
    return _scaled(
        3,
        forward_flops_per_token(
            config,
            num_loops=num_loops,
            sequence_length=sequence_length,
            padded_vocab_size=padded_vocab_size,
            causal=causal,
        ),
    )


def forward_flops_per_token(
    config: LoopedConfig,
    *,
    num_loops: int | None = None,
    sequence_length: int | None = None,
    padded_vocab_size: int | None = None,
    causal: bool = True,
) -> SectionCount:
    """FLOPs of a forward over `sequence_length` tokens, per token: a third of `training_flops_per_token`.

    Scores and weighted values cost 2 * A FLOPs each per pair of query and key: 4 * A * (T + 1) / 2 for a token of a
    block.
    """
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    if length < 1:
        raise ValueError(f"`sequence_length` must be at least 1, got {length}.")
    pairs_times_two = length + 1 if causal else 2 * length
    return _forward_flops(config, num_loops, padded_vocab_size, pairs_times_two)


def decode_flops_per_token(
    config: LoopedConfig, *, context_length: int, num_loops: int | None = None, padded_vocab_size: int | None = None
) -> SectionCount:
    """FLOPs to decode one token with a cache, when it attends to `context_length` tokens, itself included.

    Raises:
        ValueError: the model cannot execute `num_loops` passes, or a context length below 1.
    """
    if context_length < 1:
        raise ValueError(f"`context_length` must be at least 1, got {context_length}.")
    return _forward_flops(config, num_loops, padded_vocab_size, 2 * context_length)


def training_flops(
    phases: Sequence[tuple[LoopedConfig | int, int]],
    *,
    config: LoopedConfig | None = None,
    sequence_length: int | None = None,
    padded_vocab_size: int | None = None,
) -> int:
    """FLOPs of a training run, summed over its phases.

    Args:
        phases: (config or num_loops, tokens) of each phase, in order. A number of loops stands for `config` with it.
        sequence_length, padded_vocab_size: as in `training_flops_per_token`.

    Raises:
        ValueError: a number of loops without `config`, negative tokens, or what a phase's model cannot execute.
    """
    total = 0
    for phase, tokens in phases:
        if tokens < 0:
            raise ValueError(f"A phase has {tokens} tokens; it needs 0 or more.")
        if isinstance(phase, LoopedConfig):
            phase_config, num_loops = phase, phase.num_loops
        elif config is not None:
            phase_config, num_loops = config, phase
        else:
            raise ValueError(f"The phase ({phase!r}, {tokens}) names a number of loops: pass `config` too.")
        per_token = training_flops_per_token(
            phase_config, num_loops=num_loops, sequence_length=sequence_length, padded_vocab_size=padded_vocab_size
        )
        total += per_token.total * tokens
    return total


def cache_bytes_per_token(
    config: LoopedConfig, *, num_loops: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes of keys and values that one token adds to a cache: every executed block has a slot of its own."""
    num_executed_blocks = len(config.schedule(_num_loops(config, num_loops)))
    return 2 * num_executed_blocks * config.num_key_value_heads * config.head_dim * dtype.itemsize


def weights_bytes(config: LoopedConfig, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the stored parameters in one dtype."""
    return stored_parameters(config).total * dtype.itemsize


def summary_table(
    config: LoopedConfig,
    *,
    num_loops: int | None = None,
    sequence_length: int | None = None,
    padded_vocab_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Sections as plain text: stored and executed parameters, FLOPs per token; then bytes and decoding costs.

    Args: as in `training_flops_per_token`; `dtype` is that of weights and cache.
    """
    num_loops = _num_loops(config, num_loops)
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    rows = {"padded_vocab_size": padded_vocab_size}
    columns = {
        "stored parameters": stored_parameters(config, **rows),
        "executed parameters": executed_parameters(config, num_loops=num_loops, **rows),
        "training FLOPs/token": training_flops_per_token(config, num_loops=num_loops, sequence_length=length, **rows),
        "forward FLOPs/token": forward_flops_per_token(config, num_loops=num_loops, sequence_length=length, **rows),
    }
    lines = [f"{'section':<10}" + "".join(f"{name:>22}" for name in columns)]
    for section in (*SECTIONS, "total"):
        counts = [getattr(count, section) for count in columns.values()]
        lines.append(f"{section:<10}" + "".join(f"{count:>22,}" for count in counts))
    stored_cores = f"{config.num_stored_cores} stored core{'s' if config.num_stored_cores > 1 else ''}"
    executed = f"{config.num_prelude_blocks} + {num_loops} x {config.num_core_blocks} + {config.num_coda_blocks}"
    name = str(dtype).removeprefix("torch.")
    decode = decode_flops_per_token(config, context_length=length, num_loops=num_loops, **rows)
    facts = {
        "blocks": f"{config.num_stored_blocks} stored ({'tied' if config.tie_core else 'untied'}, {stored_cores}), "
        f"{len(config.schedule(num_loops))} executed ({executed})",
        "lengths": f"FLOPs/token over sequences of {length:,} tokens, causal attention",
        "weights": f"{weights_bytes(config, dtype=dtype):,} bytes in {name}",
        "cache": f"{cache_bytes_per_token(config, num_loops=num_loops, dtype=dtype):,} bytes per token in {name}",
        "decoding": f"{decode.total:,} FLOPs for the token at position {length:,}",
    }
    return "\n".join([*lines, "", *(f"{name:<10}{text}" for name, text in facts.items())])


def _num_loops(config: LoopedConfig, num_loops: int | None) -> int:
    num_loops = config.num_loops if num_loops is None else num_loops
    config.check_num_loops(num_loops)
    return num_loops


def _block_matrices(config: LoopedConfig) -> int:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    # q and o, k and v; gate, up and down
    attention = 2 * config.hidden_size * queries + 2 * config.hidden_size * keys
    return attention + 3 * config.hidden_size * config.intermediate_size


def _norm_parameters(config: LoopedConfig, num_blocks: int) -> int:
    if not config.norm_affine:
        return 0
    per_block = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm is not None else 0)
    return num_blocks * per_block + config.hidden_size * (1 + config.embedding_norm)


def _boundary_parameters(config: LoopedConfig, matrices_only: bool = False) -> int:
    # The operator itself is asked, so that a new one counts without a line here. On meta it costs no memory.
    with torch.device("meta"):
        operator = make_boundary_operator(config)
    if matrices_only:
        return sum(module.weight.numel() for module in operator.modules() if isinstance(module, nn.Linear))
    return sum(parameter.numel() for parameter in operator.parameters())


def _forward_flops(
    config: LoopedConfig, num_loops: int | None, padded_vocab_size: int | None, pairs_times_two: int
) -> SectionCount:
    """2 FLOPs per executed matrix parameter, and 4 * A per pair of query and key in each executed block."""
    num_loops = _num_loops(config, num_loops)
    matrices = matrix_parameters(config, num_loops=num_loops, padded_vocab_size=padded_vocab_size)
    # 4 * A * pairs, with twice the pairs given: the mean number of pairs may be a half
    per_block = 2 * config.num_attention_heads * config.head_dim * pairs_times_two
    return SectionCount(
        total=2 * matrices.total + len(config.schedule(num_loops)) * per_block,
        **{section: 2 * getattr(matrices, section) for section in SECTIONS if section != "attention"},
        attention=(config.num_prelude_blocks + num_loops * config.num_core_blocks + config.num_coda_blocks)
        * per_block,
    )


def _scaled(factor: int, count: SectionCount) -> SectionCount:
    return SectionCount(
        total=factor * count.total, **{section: factor * getattr(count, section) for section in SECTIONS}
    )
