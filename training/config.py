"""Recipes: YAML files and `key=value` words become one frozen Recipe, and nothing misspelt gets through.

A recipe file may name one `base:` and shows only what it changes. Words on the command line win over both:

    python -m training.plan show untied-grow depth=12 optimizer.matrix_lr=0.03
    python -m training.plan show variant=untied-grow depth=12 budget.steps=100

Dots lead into a section; a value is YAML, where 1e-3 is a number and null means off. The recipe files hold every
value: no section here has a default, so that a number stands in one place. training/budget.py derives the rest.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import yaml

from modeling_looped import LoopedConfig
from training.data.sources import SOURCES
from training.optim import OPTIMIZERS, OptimizerSettings
from training.recipe_yaml import line_of, parse_value, read_mapping
from training.values import (
    Count,
    CountFrom0,
    NotNegative,
    Positive,
    RecipeError,
    Section,
    Share,
    convert,
    field_types,
    plain,
)

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class ModelSection(Section):
    """The architecture beside what the variant and the depth fix.

    Attributes:
        width_ratio: hidden_size / depth.
        head_dim: hidden_size / number of heads.
        num_loops: passes of the core when training starts; null for the variant's.
        sequence_length: tokens of a training window, T.
        overrides: fields of LoopedConfig that win over the variant, as in model.overrides.boundary_operator=norm.
    """

    section: ClassVar[str] = "model"
    width_ratio: Count
    head_dim: Count
    num_loops: Count | None
    sequence_length: Count
    overrides: dict[str, Any]


@dataclass(frozen=True)
class DataSection(Section):
    """What is trained on; the fields are options of training.data.preparation.prepare.

    Attributes:
        source: a name in SOURCES (training/data/sources.py).
        out: folder of the prepared data; null for one in the cache, named after what it was made of.
        tokenizer: folder or Hub name; null trains one on the source.
        vocab_size: rows of embedding and head, and the size of a trained tokenizer.
        tokenizer_chars: characters that a tokenizer is trained on.
        train_tokens: distinct tokens to train on, over and over if the budget is larger; null takes as many as one
            epoch needs.
        validation_tokens: tokens kept for validation; null for all that the source sets aside.
        shard_tokens: tokens of a file of the prepared data.
        options: options of the source, as in data.options.paths=corpus/.
    """

    section: ClassVar[str] = "data"
    source: str
    out: str | None
    tokenizer: str | None
    vocab_size: Count
    tokenizer_chars: Count
    train_tokens: Count | None
    validation_tokens: Count | None
    shard_tokens: Count
    options: dict[str, Any]


@dataclass(frozen=True)
class OptimizerSection(Section):
    """The optimizer. Learning rates are those of depth `lr_reference_depth`; training/budget.py scales them.

    Attributes:
        name: a name in OPTIMIZERS (training/optim.py).
        matrix_lr, embedding_lr, head_lr, scalar_lr: learning rate of each role of parameters at the reference depth.
        lr_reference_depth: depth for which they are given.
        lr_exponent: x in LR(d) = LR(reference) * (N(reference) / N(d))^x; 0 for the same rates at every depth.
        weight_decay, adam_betas, adam_eps: as in OptimizerSettings.
        options: further fields of OptimizerSettings, as in optimizer.options.nesterov=false.
    """

    section: ClassVar[str] = "optimizer"
    name: str
    matrix_lr: NotNegative
    embedding_lr: NotNegative
    head_lr: NotNegative
    scalar_lr: NotNegative
    lr_reference_depth: Count
    lr_exponent: float
    weight_decay: NotNegative
    adam_betas: tuple[Share, Share]
    adam_eps: NotNegative
    options: dict[str, Any]


@dataclass(frozen=True)
class ScheduleSection(Section):
    """The learning-rate factor over the run (training/schedule.py).

    Attributes:
        warmup_steps: steps of linear warmup; 0 for none.
        warmdown_ratio: share of the run that decays linearly to 0.
        ramp_steps: steps from 0 back to 1 after a growth; 0 leaves the rate alone.
    """

    section: ClassVar[str] = "schedule"
    warmup_steps: CountFrom0
    warmdown_ratio: Share
    ramp_steps: CountFrom0


@dataclass(frozen=True)
class GrowthSection(Section):
    """Growth of the core during training.

    Attributes:
        num_loops: passes after growth; null trains the same model to the end.
        fraction: share of the steps before growth: a number, or a table from depth to number, linear in between.
        operator: a name in GROWTH_OPERATORS (modeling_looped/growth.py), for untied cores.
        optimizer_state: state of new parameters, "zero" or "copy" of those that they were copied from.
    """

    section: ClassVar[str] = "growth"
    num_loops: Count | None
    fraction: Share | dict[Count, Share] | None
    operator: str
    optimizer_state: Literal["zero", "copy"]


BUDGET_KEYS = ("tokens_per_parameter", "tokens", "steps", "flops")


@dataclass(frozen=True)
class BudgetSection(Section):
    """How long to train: exactly one of the first four. A file or word that sets one unsets the others below it.

    Attributes:
        tokens_per_parameter: tokens per stored parameter before growth, embedding and head padded to 64 rows. A growth
            run is shortened so that its matrix products cost what the run without growth would.
        tokens: tokens of the whole run.
        steps: optimizer steps of the whole run.
        flops: training FLOPs of the whole run, attention included: runs of different variants at equal FLOPs.
        tokens_per_step: tokens of an optimizer step over all devices.
        micro_batch_size: windows that one device takes at once.
    """

    section: ClassVar[str] = "budget"
    tokens_per_parameter: Positive | None
    tokens: Count | None
    steps: Count | None
    flops: Positive | None
    tokens_per_step: Count
    micro_batch_size: Count

    def __post_init__(self):
        super().__post_init__()
        given = [name for name in BUDGET_KEYS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"budget.{name}" for name in given) or "none of them"
            raise RecipeError(f"exactly one of {', '.join(BUDGET_KEYS)} sets the budget, got {found}")


@dataclass(frozen=True)
class TrainingSection(Section):
    """The run itself.

    Attributes:
        seed: of initialisation and data order.
        precision: "fp32", or "bf16" for autocast over fp32 weights.
        compile: torch.compile the model.
        eval_every_steps: validation loss every so many steps; null for the end alone.
        eval_tokens: validation tokens of one evaluation; null for all.
        save_every_steps: checkpoint every so many steps; null for the end alone.
        keep_last: checkpoints kept; null for all.
        activation_checkpointing: recompute activations in the backward, block by block.
        log_every_steps: steps between two lines of the log.
        trackers: names that Accelerate knows, as in [tensorboard].
        run_dir: folder of the run; null for runs/<recipe>-d<depth>-seed<seed>.
    """

    section: ClassVar[str] = "training"
    seed: CountFrom0
    precision: Literal["fp32", "bf16"]
    compile: bool
    eval_every_steps: Count | None
    eval_tokens: Count | None
    save_every_steps: Count | None
    keep_last: Count | None
    activation_checkpointing: bool
    log_every_steps: Count
    trackers: tuple[str, ...]
    run_dir: str | None


@dataclass(frozen=True)
class Recipe(Section):
    """A variant at a depth with everything that training needs to know, as written: nothing in it is derived.

    Attributes:
        name: of the recipe; by default the file's.
        variant: a name in modeling_looped.variants.VARIANTS.
        depth: d, the one size dial.
    """

    section: ClassVar[str] = ""
    name: str
    variant: str
    depth: Count
    model: ModelSection
    data: DataSection
    optimizer: OptimizerSection
    schedule: ScheduleSection
    growth: GrowthSection
    budget: BudgetSection
    training: TrainingSection

    def __post_init__(self):
        super().__post_init__()
        for where, value, allowed in (
            ("data.source", self.data.source, SOURCES),
            ("optimizer.name", self.optimizer.name, OPTIMIZERS),
        ):
            if value not in allowed:
                raise RecipeError(f"{where}={value!r} must be one of {', '.join(allowed)}")
        for path, (allowed, elsewhere) in _open_fields(self.data.source).items():
            section, name = path.split(".")
            for key in getattr(getattr(self, section), name):
                if key in elsewhere:
                    raise RecipeError(f"{path}.{key} is set by {elsewhere[key]}: set that instead")
                if key not in allowed:
                    raise RecipeError(f"{path}.{key} is unknown.{_did_you_mean(path, key, allowed)}")


def _open_fields(source: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Fields whose keys belong to another dataclass: its field names, and those that a recipe sets elsewhere."""
    config = [field.name for field in dataclasses.fields(LoopedConfig)]
    settings = [field.name for field in dataclasses.fields(OptimizerSettings)]
    options = [field.name for field in dataclasses.fields(SOURCES[source])]
    own = {field.name for field in dataclasses.fields(OptimizerSection)}
    return {
        "model.overrides": (
            config,
            {
                "vocab_size": "data.vocab_size",
                "num_loops": "model.num_loops",
                "head_dim": "model.head_dim",
                "num_hidden_layers": "the blocks of prelude, core and coda and model.num_loops",
            },
        ),
        "data.options": (options, {}),
        "optimizer.options": (settings, {name: f"optimizer.{name}" for name in settings if name in own}),
    }


def load_recipe(path_or_name: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe and lay `overrides` over it.

    Args:
        path_or_name: a file, from the working directory or from training/, the resolved.yaml of a run too; or the
            bare name of one in training/recipes. None takes the recipe named by overrides["variant"].
        overrides: nested as in the file; `parse_overrides` makes them from `key=value` words.

    Raises:
        RecipeError: no such recipe, YAML that cannot be read, a base with a base, an unknown key, a missing or wrong
            value.
    """
    overrides = {} if overrides is None else dict(overrides)
    if path_or_name is None:
        if "variant" not in overrides:
            raise RecipeError(f"name a recipe, or give variant=NAME; recipes are: {', '.join(recipe_names())}")
        path_or_name = str(overrides["variant"])
    path = find_recipe(path_or_name)
    values = read_mapping(path)
    if {"recipe", "derived"} <= values.keys():  # a run's resolved.yaml: its recipe, to be run anew
        values = {**values["recipe"], "training": {**values["recipe"]["training"], "run_dir": None}}
    layers = [(path, values)]
    if base_name := layers[0][1].pop("base", None):
        base_path = path.parent / f"{base_name}.yaml"
        if not base_path.is_file():
            base_path = find_recipe(base_name)
        base = read_mapping(base_path)
        if "base" in base:
            raise RecipeError(
                f"{path}: its base {base_path} has a base of its own, but one level is allowed. Make "
                f"{base['base']} the base and repeat what {base_name} changes"
            )
        layers.insert(0, (base_path, base))
    layers.append((None, overrides))
    merged: dict[str, Any] = {"name": path.stem}
    for origin, values in layers:
        _check_layer(values, origin)
        merged = _lay_over(merged, values)
    missing = _missing(merged)
    if missing:
        hint = ": add depth=NUMBER" if missing == ["depth"] else ""
        raise RecipeError(f"{path}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set{hint}")
    sections = {
        name: hint(**merged[name]) if _is_section(hint) else merged[name] for name, hint in field_types(Recipe).items()
    }
    return Recipe(**sections)


def load_command_line(arguments: Sequence[str]) -> Recipe:
    """The recipe of a command line: at most one file or recipe name, and `key=value` words.

    Raises:
        RecipeError: as `load_recipe` and `parse_overrides` do, and more than one recipe.
    """
    names = [argument for argument in arguments if "=" not in argument]
    if len(names) > 1:
        raise RecipeError(f"name one recipe, got {' and '.join(names)}; everything else is key=value")
    words = [argument for argument in arguments if "=" in argument]
    return load_recipe(names[0] if names else None, parse_overrides(words))


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`["depth=12", "optimizer.matrix_lr=1e-2"]` to `{"depth": 12, "optimizer": {"matrix_lr": 0.01}}`.

    Raises:
        RecipeError: a word that is not key=value, is given twice, or has a value that is not YAML.
    """
    overrides: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if word.startswith("-") or not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            plain = word.lstrip("-")
            example = plain if equals and re.match(r"\w", plain) else "depth=12"
            raise RecipeError(f"command line: {word!r} is not of the form key=value, as in {example}")
        if not text:
            raise RecipeError(f"command line: {key}= has no value; write {key}=null to turn it off")
        try:
            value = parse_value(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"command line: the value of {word!r} is not YAML: {error}") from error
        *sections, name = key.split(".")
        place = overrides
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise RecipeError(f"command line: {key} is set although {section} is set as a whole")
        if name in place:
            raise RecipeError(f"command line: {key} is given twice")
        place[name] = value
    return overrides


def recipe_names() -> list[str]:
    """Names of the recipes in training/recipes that can be run."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "base")


def find_recipe(path_or_name: str | Path) -> Path:
    """The file of a recipe; raises RecipeError with the known names if there is none."""
    given = str(path_or_name)
    if given.endswith((".yaml", ".yml")) or "/" in given:
        candidates = [Path(given), RECIPES.parent / given, RECIPES / f"{given}.yaml"]
    else:
        candidates = [RECIPES / f"{given}.yaml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = recipe_names()
    near = difflib.get_close_matches(Path(given).stem, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(f"there is no recipe {given}: {hint}Recipes are: {', '.join(names)}; or give a path to a file")


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain dicts, lists and scalars; `load_recipe` reads them back as overrides of any recipe."""
    return plain(dataclasses.asdict(recipe))


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as a file that `load_recipe` reads back to an equal one."""
    return yaml.safe_dump(as_dict(recipe), sort_keys=False, allow_unicode=True)


def _check_layer(values: Mapping[str, Any], origin: Path | None) -> None:
    """Refuse unknown keys and wrong types of one file, or of the command line, saying where they stand."""
    types = field_types(Recipe)
    for name, value in values.items():
        if name not in types:
            _refuse(origin, name, f"{name} is unknown.{_did_you_mean('', name, types)}")
        if not _is_section(types[name]):
            _check(value, types[name], name, origin)
            continue
        if not isinstance(value, Mapping):
            _refuse(origin, name, f"{name}={value!r} must be a section with keys of its own")
        inner_types = field_types(types[name])
        for key, inner in value.items():
            where = f"{name}.{key}"
            if key not in inner_types:
                _refuse(origin, where, f"{where} is unknown.{_did_you_mean(name, key, inner_types)}")
            _check(inner, inner_types[key], where, origin)


def _check(value: Any, annotation: Any, where: str, origin: Path | None) -> None:
    try:
        convert(value, annotation, where)
    except RecipeError as error:
        _refuse(origin, where, str(error))


def _refuse(origin: Path | None, where: str, message: str) -> NoReturn:
    place = "command line" if origin is None else f"{origin}, line {line_of(origin, where)}"
    raise RecipeError(f"{place}: {message}") from None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _lay_over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for name, value in upper.items():
        if not isinstance(value, Mapping):
            merged[name] = value
            continue
        section = dict(merged.get(name, {}))
        if name == "budget" and any(value.get(key) is not None for key in BUDGET_KEYS):
            section |= dict.fromkeys(BUDGET_KEYS)
        if name == "data" and value.get("source", section.get("source")) != section.get("source"):
            section["options"] = {}  # they are options of the source that is replaced
        for key, inner in value.items():
            keeps_others = f"{name}.{key}" in ("model.overrides", "data.options", "optimizer.options")
            section[key] = {**section.get(key, {}), **inner} if keeps_others else inner
        merged[name] = section
    return merged


def _missing(merged: Mapping[str, Any]) -> list[str]:
    missing = []
    for name, hint in field_types(Recipe).items():
        if name not in merged:
            missing.append(name)
        elif _is_section(hint):
            missing += [f"{name}.{key}" for key in field_types(hint) if key not in merged[name]]
    return missing


def _did_you_mean(section: str, key: Any, known) -> str:
    if section in ("model", "data", "optimizer"):
        open_name = {"model": "overrides", "data": "options", "optimizer": "options"}[section]
        owners = {"model": [LoopedConfig], "data": list(SOURCES.values()), "optimizer": [OptimizerSettings]}[section]
        if any(key == field.name for owner in owners for field in dataclasses.fields(owner)):
            return f" Did you mean {section}.{open_name}.{key}?"
    prefix = f"{section}." if section else ""
    near = difflib.get_close_matches(str(key), list(known), n=1)
    if near:
        return f" Did you mean {prefix}{near[0]}?"
    for name, hint in field_types(Recipe).items():
        if _is_section(hint) and key in field_types(hint):
            return f" Did you mean {name}.{key}?"
    return f" Known are: {', '.join(prefix + name for name in known)}"
