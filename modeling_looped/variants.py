"""The named variants of the paper (arXiv 2609.19107): (variant, depth) -> LoopedConfig.

A variant fixes everything that does not follow from the size: whether the core is tied, how often it runs, the
boundary operator and the constants of the initialisation. Depth d is the one size dial: d blocks split over prelude,
core and coda, width `width_ratio * d`. A variant that grows starts at `num_loops` and ends at `grown_num_loops`.
Tokens, learning rates and schedules are no architecture: they stand in the recipes of the same names.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields

from .configuration_looped import LoopedConfig

MAX_DEPTH = 10_000  # far beyond any model, and small enough to list the blocks of


def split_thirds(depth: int) -> tuple[int, int, int]:
    """Blocks of prelude, core and coda: thirds of `depth`, the first remainder to the core, the second to the coda.

    Raises:
        ValueError: `depth` is not an integer of at least 3, so that a section would be empty.
    """
    _check_depth(depth, minimum=3)
    third, remainder = divmod(depth, 3)
    return third, third + (remainder >= 1), third + (remainder >= 2)


def split_universal(depth: int) -> tuple[int, int, int]:
    """No prelude, one core block, no coda: the block is applied `depth` times.

    Raises:
        ValueError: `depth` is not an integer of at least 1.
    """
    _check_depth(depth, minimum=1)
    return 0, 1, 0


def _check_depth(depth: int, minimum: int) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < minimum:
        raise ValueError(f"`depth` must be an integer of at least {minimum}, got {depth!r}.")
    if depth > MAX_DEPTH:
        raise ValueError(f"`depth` must be at most {MAX_DEPTH}, got {depth}.")


@dataclass(frozen=True)
class Variant:
    """What a variant fixes at every depth.

    Attributes:
        description: one line.
        tie_core, boundary_operator, boundary_alpha, residual_multiplier, logit_scale, initializer_range,
            uniform_init_scale: fields of LoopedConfig.
        num_loops: passes at the start of training; None for `depth` passes.
        grown_num_loops: passes at the end of training; None for a variant that does not grow.
        split: depth -> blocks of (prelude, core, coda).
    """

    description: str
    tie_core: bool
    num_loops: int | None
    grown_num_loops: int | None
    boundary_operator: str
    boundary_alpha: float
    residual_multiplier: float
    logit_scale: float
    initializer_range: float
    uniform_init_scale: float
    split: Callable[[int], tuple[int, int, int]] = split_thirds


def build_config(
    variant: str,
    depth: int,
    *,
    width_ratio: int = 128,
    head_dim: int = 128,
    num_loops: int | None = None,
    vocab_size: int = 50257,
    max_position_embeddings: int = 2048,
    **overrides,
) -> LoopedConfig:
    """The architecture of a variant at one depth.

    Args:
        variant: a name in VARIANTS.
        depth: d; hidden_size is `width_ratio * d`, with `hidden_size / head_dim` attention heads unless overridden.
        num_loops: passes of the core; None for the variant's at the start of training. An untied core stores as many.
        vocab_size: rows of embedding and head. With fewer than GPT-2's 50257 the bos and eos ids are left unset: they
            are the tokenizer's to say.
        max_position_embeddings: tokens of context.
        **overrides: fields of LoopedConfig, which win over the variant.

    Raises:
        ValueError: an unknown variant or override (the nearest name is given), a depth that does not fit, or a width
            that the heads do not divide.
    """
    chosen = get_variant(variant)
    known = [field.name for field in fields(LoopedConfig)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"LoopedConfig has no field `{name}`.{_nearest(name, known)}")
    num_prelude_blocks, num_core_blocks, num_coda_blocks = chosen.split(depth)
    for name, value in {"width_ratio": width_ratio, "head_dim": head_dim}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
    hidden_size = overrides.get("hidden_size", width_ratio * depth)
    if "num_attention_heads" not in overrides and hidden_size % head_dim != 0:
        raise ValueError(
            f"The width of {variant} at depth {depth} is {hidden_size} (`width_ratio` {width_ratio} x {depth}), not a "
            f"multiple of `head_dim` ({head_dim}). Choose a head_dim that divides it, or set num_attention_heads."
        )
    if num_loops is None:
        num_loops = depth if chosen.num_loops is None else chosen.num_loops
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_prelude_blocks": num_prelude_blocks,
        "num_core_blocks": num_core_blocks,
        "num_coda_blocks": num_coda_blocks,
        "num_loops": num_loops,
        "tie_core": chosen.tie_core,
        "num_attention_heads": hidden_size // head_dim,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "boundary_operator": chosen.boundary_operator,
        "boundary_alpha": chosen.boundary_alpha,
        "residual_multiplier": chosen.residual_multiplier,
        "logit_scale": chosen.logit_scale,
        "initializer_range": chosen.initializer_range,
        "uniform_init_scale": chosen.uniform_init_scale,
    }
    if vocab_size < LoopedConfig.vocab_size:
        settings |= {"bos_token_id": None, "eos_token_id": None}
    return LoopedConfig(**(settings | overrides))


def get_variant(name: str) -> Variant:
    """The variant called `name`; raises ValueError with the known names and the nearest one."""
    if name not in VARIANTS:
        raise ValueError(f"`variant` is {name!r}, allowed are: {', '.join(VARIANTS)}.{_nearest(name, VARIANTS)}")
    return VARIANTS[name]


def _nearest(name, known) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean `{near[0]}`?" if near else ""


# Constants of the paper's published runs, with the digits that their settings give: .00707106781187 = .01 / sqrt(2),
# .11313708499 = .08 sqrt(2), .353553390593 = sqrt(2) / 4, .0441941738242 = sqrt(2) / 32, .707106781187 = 1 / sqrt(2).
VARIANTS: dict[str, Variant] = {
    "vanilla": Variant(
        description="a plain transformer of d blocks",
        tie_core=True,
        num_loops=1,
        grown_num_loops=None,
        boundary_operator="none",
        boundary_alpha=1.0,
        residual_multiplier=0.25,
        logit_scale=0.5,
        initializer_range=0.00707106781187,
        uniform_init_scale=0.0625,
    ),
    "deep-vanilla": Variant(
        description="a plain transformer with the blocks of untied-2 and no boundary operator",
        tie_core=False,
        num_loops=2,
        grown_num_loops=None,
        boundary_operator="none",
        boundary_alpha=1.0,
        residual_multiplier=0.5,
        logit_scale=1.0,
        initializer_range=0.005,
        uniform_init_scale=0.5,
    ),
    "deep-vanilla-grow": Variant(
        description="deep-vanilla grown by copies of its middle third, no boundary operator",
        tie_core=False,
        num_loops=2,
        grown_num_loops=4,
        boundary_operator="none",
        boundary_alpha=1.0,
        residual_multiplier=0.5,
        logit_scale=1.0,
        initializer_range=0.005,
        uniform_init_scale=0.5,
    ),
    "operator-1": Variant(
        description="vanilla plus the boundary operator before the coda: what the operator alone gives",
        tie_core=True,
        num_loops=1,
        grown_num_loops=None,
        boundary_operator="norm_inject",
        boundary_alpha=1.0,
        residual_multiplier=0.5,
        logit_scale=1.0,
        initializer_range=0.11313708499,
        uniform_init_scale=0.353553390593,
    ),
    "loop-2": Variant(
        description="one core applied twice",
        tie_core=True,
        num_loops=2,
        grown_num_loops=None,
        boundary_operator="norm_inject",
        boundary_alpha=0.707106781187,
        residual_multiplier=0.25,
        logit_scale=1.0,
        initializer_range=0.02,
        uniform_init_scale=0.0441941738242,
    ),
    "untied-2": Variant(
        description="two cores, one for each pass: the compute graph of loop-2 with more parameters",
        tie_core=False,
        num_loops=2,
        grown_num_loops=None,
        boundary_operator="norm_inject",
        boundary_alpha=1.0,
        residual_multiplier=0.25,
        logit_scale=1.0,
        initializer_range=0.01,
        uniform_init_scale=0.353553390593,
    ),
    "loop-grow": Variant(
        description="loop-2, whose core is applied four times in the last part of training",
        tie_core=True,
        num_loops=2,
        grown_num_loops=4,
        boundary_operator="norm_inject",
        boundary_alpha=0.707106781187,
        residual_multiplier=0.25,
        logit_scale=1.0,
        initializer_range=0.02,
        uniform_init_scale=0.0441941738242,
    ),
    "untied-grow": Variant(
        description="untied-2, whose two cores are copied to four in the last part of training",
        tie_core=False,
        num_loops=2,
        grown_num_loops=4,
        boundary_operator="norm_inject",
        boundary_alpha=1.0,
        residual_multiplier=0.25,
        logit_scale=1.0,
        initializer_range=0.01,
        uniform_init_scale=0.353553390593,
    ),
    # Not one of the paper's runs. Its constants are those of loop-2, untuned.
    "universal": Variant(
        description="a universal transformer: one block applied d times, no prelude, no coda, no operator",
        tie_core=True,
        num_loops=None,
        grown_num_loops=None,
        boundary_operator="none",
        boundary_alpha=1.0,
        residual_multiplier=0.25,
        logit_scale=1.0,
        initializer_range=0.02,
        uniform_init_scale=0.0441941738242,
        split=split_universal,
    ),
}
