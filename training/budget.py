"""Every number that follows from a recipe, derived once, with its rule and where the rule comes from.

`resolve(recipe)` gives the Plan of a run: sizes, learning rates, steps, growth step, FLOPs. The rules are those of the
paper (arXiv 2609.19107, "paper" below) and give all of its 67 published models; `python -m training.plan` prints both.
Parameters and FLOPs are counted with the rows of embedding and head padded to a multiple of 64, as the paper does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.table import Table

from modeling_looped import LoopedConfig
from modeling_looped.flops import matrix_parameters, pad_vocab_size, stored_parameters, training_flops_per_token
from modeling_looped.growth import GrowthPlan
from modeling_looped.variants import build_config
from training.config import BudgetSection, Recipe, as_dict
from training.optim import OptimizerSettings
from training.values import RecipeError

# Data for a little more than the run is prepared: windows are cut to whole steps after every epoch
TRAIN_TOKENS_MARGIN = 1.01


class Rule(NamedTuple):
    """How a number was derived, and who says so: "paper", "recipe" or "ours"."""

    text: str
    source: str


@dataclass(frozen=True)
class Plan:
    """A recipe with every number that follows from it. What only a growing run has is None in others.

    Attributes:
        recipe: what was asked for.
        config, grown_config: the model at the start, and after growth.
        optimizer_settings: what training/optim.py is told.
        rules: for each of the numbers below, how it was derived.
        padded_vocab_size: rows of embedding and head in the counts of parameters and FLOPs.
        stored_parameters, final_stored_parameters: at the start (N of the paper's rules), and at the end of training.
        lr_reference_parameters: N at the depth for which the recipe gives its learning rates.
        lr_scale: factor from those rates to this run's.
        matrix_lr, embedding_lr, head_lr, scalar_lr: base learning rates.
        flops_per_token, grown_flops_per_token: training FLOPs, forward and backward, attention included.
        growth_fraction: share of the steps before growth.
        mean_matrix_flops: FLOPs of matrix products over the run, relative to a run without growth.
        tokens_per_step: over all devices.
        num_steps, num_tokens: of the whole run.
        growth_step: the model grows before the forward of this step, counted from 0.
        training_flops: of the whole run.
        warmup_steps, decay_start_step: of the schedule, whose ramp after growth comes on top.
        windows_per_step, micro_batches_per_step: over all devices.
        train_tokens: distinct tokens to prepare.
        num_epochs: passes over them.
        run_dir: folder of the run.
    """

    recipe: Recipe
    config: LoopedConfig
    grown_config: LoopedConfig | None
    optimizer_settings: OptimizerSettings
    rules: dict[str, Rule]
    padded_vocab_size: int
    stored_parameters: int
    final_stored_parameters: int
    lr_reference_parameters: int
    lr_scale: float
    matrix_lr: float
    embedding_lr: float
    head_lr: float
    scalar_lr: float
    flops_per_token: int
    tokens_per_step: int
    num_steps: int
    num_tokens: int
    training_flops: int
    warmup_steps: int
    decay_start_step: int
    windows_per_step: int
    micro_batches_per_step: int
    train_tokens: int
    num_epochs: float
    run_dir: str
    grown_flops_per_token: int | None = None
    growth_fraction: float | None = None
    mean_matrix_flops: float | None = None
    growth_step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Recipe, derived numbers and their rules as plain dicts and scalars, for resolved.yaml."""
        return {
            "recipe": as_dict(self.recipe),
            "derived": {name: getattr(self, name) for name in self.rules},
            "rules": {name: f"{rule.text} ({rule.source})" for name, rule in self.rules.items()},
        }


class _Ledger:
    """Numbers in the order in which they are derived, each entered once, with its rule."""

    def __init__(self):
        self.numbers: dict[str, Any] = {}
        self.rules: dict[str, Rule] = {}

    def enter(self, name: str, value: Any, text: str, source: str) -> Any:
        assert name not in self.numbers, f"{name} is derived twice"
        self.numbers[name] = value
        self.rules[name] = Rule(text, source)
        return value


def resolve(recipe: Recipe) -> Plan:
    """Derive the plan of a run.

    Raises:
        RecipeError: a run that cannot be: no steps, a growth outside the run or to no more passes, a warmup or ramp
            longer than what is left, a step that is no whole number of micro-batches.
        ValueError: a variant, depth or override that gives no model, or a setting that the optimizer refuses.
    """
    ledger = _Ledger()
    config = _config(recipe, recipe.depth)
    grown = _grown_config(recipe, config)
    _sizes(ledger, recipe, config, grown)
    settings = _learning_rates(ledger, recipe)
    _costs(ledger, recipe, config, grown)
    _steps(ledger, recipe)
    _schedule(ledger, recipe)
    _batches(ledger, recipe)
    return Plan(
        recipe=recipe,
        config=config,
        grown_config=grown,
        optimizer_settings=settings,
        rules=ledger.rules,
        **ledger.numbers,
    )


def _sizes(ledger: _Ledger, recipe: Recipe, config: LoopedConfig, grown: LoopedConfig | None) -> None:
    final = config if grown is None else grown
    reference_depth = recipe.optimizer.lr_reference_depth
    rows = pad_vocab_size(config.vocab_size)
    ledger.enter("padded_vocab_size", rows, f"data.vocab_size {config.vocab_size:,} up to a multiple of 64", "paper")
    for name, model, text in (
        ("stored_parameters", config, f"{_blocks(config)}, embedding, head: N"),
        ("final_stored_parameters", final, f"{_blocks(final)}, embedding, head"),
        (
            "lr_reference_parameters",
            _config(recipe, reference_depth),
            f"N at depth {reference_depth}, same width ratio and overrides",
        ),
    ):
        ledger.enter(name, stored_parameters(model, padded_vocab_size=rows).total, text, "paper")


def _learning_rates(ledger: _Ledger, recipe: Recipe) -> OptimizerSettings:
    section, numbers = recipe.optimizer, ledger.numbers
    scale = ledger.enter(
        "lr_scale",
        (numbers["lr_reference_parameters"] / numbers["stored_parameters"]) ** section.lr_exponent,
        f"(N({section.lr_reference_depth}) / N({recipe.depth})) ^ {section.lr_exponent:g}",
        "paper",
    )
    rates = {}
    for role in ("matrix_lr", "embedding_lr", "head_lr", "scalar_lr"):
        rate = getattr(section, role)
        source = "ours" if role == "scalar_lr" else "paper"
        rates[role] = ledger.enter(role, rate * scale, f"optimizer.{role} {rate:g} x lr_scale", source)
    return OptimizerSettings(
        **rates,
        weight_decay=section.weight_decay,
        adam_betas=section.adam_betas,
        adam_eps=section.adam_eps,
        **section.options,
    )


def _costs(ledger: _Ledger, recipe: Recipe, config: LoopedConfig, grown: LoopedConfig | None) -> None:
    rows = {"padded_vocab_size": ledger.numbers["padded_vocab_size"]}
    length = recipe.model.sequence_length
    ledger.enter(
        "flops_per_token",
        training_flops_per_token(config, sequence_length=length, **rows).total,
        f"6 x executed matrix parameters + executed blocks x 6 x width x (T + 1), K = {config.num_loops}",
        "paper",
    )
    if grown is None:
        return
    ledger.enter(
        "grown_flops_per_token",
        training_flops_per_token(grown, sequence_length=length, **rows).total,
        f"the same, K = {grown.num_loops}",
        "paper",
    )
    fraction = ledger.enter("growth_fraction", *_growth_fraction(recipe.growth.fraction, recipe.depth))
    ratio = matrix_parameters(grown, **rows).total / matrix_parameters(config, **rows).total
    ledger.enter(
        "mean_matrix_flops",
        fraction + (1 - fraction) * ratio,
        f"matrix FLOPs against a run without growth: {fraction:g} + {1 - fraction:g} x {ratio:.4f}",
        "paper",
    )


def _steps(ledger: _Ledger, recipe: Recipe) -> None:
    numbers = ledger.numbers
    per_step = ledger.enter(
        "tokens_per_step", recipe.budget.tokens_per_step, "budget.tokens_per_step, over all devices", "recipe"
    )
    fraction = numbers.get("growth_fraction")

    def run_flops(num_steps: int) -> int:
        if fraction is None:
            return num_steps * per_step * numbers["flops_per_token"]
        num_before = int(fraction * num_steps)
        num_after = num_steps - num_before
        return per_step * (num_before * numbers["flops_per_token"] + num_after * numbers["grown_flops_per_token"])

    num_steps = ledger.enter("num_steps", *_num_steps(recipe.budget, numbers, run_flops))
    ledger.enter("num_tokens", num_steps * per_step, "num_steps x tokens_per_step", "recipe")
    if fraction is not None:
        ledger.enter("growth_step", int(fraction * num_steps), f"int({fraction:g} x num_steps), from 0", "paper")
    cost = "num_tokens x flops_per_token" if fraction is None else "tokens x FLOPs per token, before and after growth"
    ledger.enter("training_flops", run_flops(num_steps), cost, "paper")


def _schedule(ledger: _Ledger, recipe: Recipe) -> None:
    schedule, num_steps = recipe.schedule, ledger.numbers["num_steps"]
    growth_step = ledger.numbers.get("growth_step")
    if schedule.warmup_steps > num_steps:
        raise RecipeError(
            f"schedule.warmup_steps={schedule.warmup_steps} is longer than the run of {num_steps} steps: lower it or "
            "raise the budget"
        )
    if growth_step is not None and not 0 < growth_step < num_steps:
        raise RecipeError(
            f"growth at step {growth_step} is not inside the run of {num_steps} steps, so that one phase would be "
            "empty: change growth.fraction or the budget, or train without growth by growth.num_loops=null"
        )
    if growth_step is not None and schedule.ramp_steps > num_steps - growth_step:
        raise RecipeError(
            f"schedule.ramp_steps={schedule.ramp_steps} is longer than the {num_steps - growth_step} steps left after "
            f"growth at step {growth_step} of {num_steps}: lower it, raise the budget or lower growth.fraction"
        )
    warmup_steps = ledger.enter("warmup_steps", schedule.warmup_steps, "schedule.warmup_steps", "recipe")
    ledger.enter(
        "decay_start_step",
        max(warmup_steps, num_steps - round(schedule.warmdown_ratio * num_steps)),
        f"max(warmup_steps, num_steps - round({schedule.warmdown_ratio:g} x num_steps))",
        "paper",
    )


def _batches(ledger: _Ledger, recipe: Recipe) -> None:
    numbers, length, micro_batch_size = ledger.numbers, recipe.model.sequence_length, recipe.budget.micro_batch_size
    per_step, num_tokens = numbers["tokens_per_step"], numbers["num_tokens"]
    if per_step % (micro_batch_size * length):
        raise RecipeError(
            f"budget.tokens_per_step={per_step:,} is not a whole number of micro-batches of budget.micro_batch_size="
            f"{micro_batch_size} windows of model.sequence_length={length} tokens: make it a multiple of "
            f"{micro_batch_size * length:,}"
        )
    windows = ledger.enter("windows_per_step", per_step // length, f"tokens_per_step / {length}", "recipe")
    ledger.enter(
        "micro_batches_per_step",
        windows // micro_batch_size,
        f"windows_per_step / {micro_batch_size}, over all devices",
        "recipe",
    )
    if recipe.data.train_tokens is None:
        tokens = int(TRAIN_TOKENS_MARGIN * num_tokens)
        ledger.enter("train_tokens", tokens, f"int({TRAIN_TOKENS_MARGIN} x num_tokens)", "paper")
    else:
        ledger.enter("train_tokens", recipe.data.train_tokens, "data.train_tokens", "recipe")
    ledger.enter(
        "num_epochs",
        num_tokens / numbers["train_tokens"],
        "num_tokens / train_tokens, if the source has so many",
        "ours",
    )
    if recipe.training.run_dir is None:
        run_dir = f"runs/{recipe.name}-d{recipe.depth}-seed{recipe.training.seed}"
        ledger.enter("run_dir", run_dir, "runs/<recipe>-d<depth>-seed<seed>", "ours")
    else:
        ledger.enter("run_dir", recipe.training.run_dir, "training.run_dir", "recipe")


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print every derived number with its rule and source as a table."""
    console = Console() if console is None else console
    recipe = plan.recipe
    table = Table(title=f"{recipe.name}: {recipe.variant} at depth {recipe.depth}", title_justify="left")
    table.add_column("number", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("rule", overflow="fold")
    table.add_column("source", no_wrap=True)
    for name, rule in plan.rules.items():
        table.add_row(name, _shown(name, getattr(plan, name)), rule.text, rule.source)
    console.print(table)


def _shown(name: str, value: Any) -> str:
    if name == "training_flops":
        return f"{value:.6e}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _config(recipe: Recipe, depth: int) -> LoopedConfig:
    model = recipe.model
    positions = {"max_position_embeddings": model.sequence_length} | model.overrides
    try:
        config = build_config(
            recipe.variant,
            depth,
            width_ratio=model.width_ratio,
            head_dim=model.head_dim,
            num_loops=model.num_loops,
            vocab_size=recipe.data.vocab_size,
            **positions,
        )
    except StrictDataclassError as error:
        # its last line says which field; the ones before only which validator
        raise RecipeError(f"model: {str(error).splitlines()[-1].strip().partition(': ')[2] or error}") from error
    if config.max_position_embeddings < model.sequence_length:
        raise RecipeError(
            f"model.sequence_length={model.sequence_length} is more than the model's context, "
            f"model.overrides.max_position_embeddings={config.max_position_embeddings}"
        )
    return config


def _grown_config(recipe: Recipe, config: LoopedConfig) -> LoopedConfig | None:
    growth = recipe.growth
    if growth.num_loops is None:
        return None
    if growth.num_loops <= config.num_loops:
        kind = "tied" if config.tie_core else "untied"
        raise RecipeError(
            f"growth.num_loops={growth.num_loops} must be more than the {config.num_loops} passes with which this "
            f"{kind} model starts; growth.num_loops=null trains without growth"
        )
    if growth.fraction is None:
        raise RecipeError(f"growth.num_loops={growth.num_loops} needs growth.fraction, the share of steps before it")
    return GrowthPlan(config, growth.num_loops, growth.operator).config


def _growth_fraction(fraction: float | dict[int, float], depth: int) -> tuple[float, str, str]:
    """The fraction at a depth, with its rule: from the table, or linear between its depths, or that of the nearest."""
    if not isinstance(fraction, dict):
        return fraction, "growth.fraction", "recipe"
    if not fraction:
        raise RecipeError("growth.fraction is an empty table: give a number, or depths with numbers")
    if depth in fraction:
        return fraction[depth], f"growth.fraction at depth {depth}", "recipe"
    below = max((known for known in fraction if known < depth), default=None)
    above = min((known for known in fraction if known > depth), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        return fraction[nearest], f"growth.fraction at depth {nearest}, the nearest in the table", "ours"
    share = (depth - below) / (above - below)
    value = fraction[below] + share * (fraction[above] - fraction[below])
    return value, f"growth.fraction, linear between depths {below} and {above}", "ours"


def _num_steps(
    budget: BudgetSection, numbers: dict[str, Any], run_flops: Callable[[int], int]
) -> tuple[int, str, str]:
    """Steps of the run with their rule and source; raises RecipeError where there would be none."""
    per_step = numbers["tokens_per_step"]
    if budget.steps is not None:
        return budget.steps, "budget.steps", "recipe"
    if budget.tokens is not None:
        given, source = f"budget.tokens={budget.tokens:,}", "recipe"
        num_steps = round(budget.tokens / per_step)
        text = f"round({budget.tokens:,} / {per_step:,})"
    elif budget.flops is not None:
        given, source = f"budget.flops={budget.flops:g}", "ours"
        num_steps = _nearest_steps(budget.flops, run_flops)
        text = f"the run that costs nearest to budget.flops {budget.flops:g}, all phases"
    else:
        # Rounded once, at the end: rounding the budget before it is divided misses two of the paper's runs by a step
        given, source = f"budget.tokens_per_parameter={budget.tokens_per_parameter:g}", "paper"
        ratio, stored = budget.tokens_per_parameter, numbers["stored_parameters"]
        num_steps = round(ratio * stored / per_step / numbers.get("mean_matrix_flops", 1.0))
        divisor = " / mean_matrix_flops" if "mean_matrix_flops" in numbers else ""
        text = f"round({ratio:g} x {stored:,} / {per_step:,}{divisor})"
    if num_steps < 1:
        raise RecipeError(
            f"{given} gives 0 steps of budget.tokens_per_step={per_step:,} tokens: raise the budget or lower "
            "budget.tokens_per_step"
        )
    return num_steps, text, source


def _nearest_steps(flops: float, run_flops: Callable[[int], int]) -> int:
    """Number of steps whose cost is nearest to `flops`. A run's cost grows with its steps, so bisection finds it."""
    high = 1
    while run_flops(high) < flops:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if run_flops(middle) < flops else (low, middle)
    return min((low, high), key=lambda steps: abs(run_flops(steps) - flops))


def _blocks(config: LoopedConfig) -> str:
    cores = f"{config.num_stored_cores} x {config.num_core_blocks}"
    return f"{config.num_prelude_blocks} + {cores} + {config.num_coda_blocks} blocks of width {config.hidden_size}"
