import dataclasses
import re

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from modeling_looped.growth import GROWTH_OPERATORS
from modeling_looped.variants import VARIANTS
from training.config import (
    BUDGET_KEYS,
    RECIPES,
    find_recipe,
    load_command_line,
    load_recipe,
    parse_overrides,
    recipe_names,
    to_yaml,
)
from training.optim import OptimizerSettings
from training.recipe_yaml import read_mapping
from training.values import RecipeError


def refused(words, message):
    with pytest.raises(RecipeError, match=message):
        load_command_line(words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("-2.5e-10", -2.5e-10),
        (".5", 0.5),
        ("5.", 5.0),
        ("12", 12),
        ("524_288", 524288),
        ("010", 10),
        ("1:30", "1:30"),
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("no", "no"),
        ("null", None),
        ("~", None),
        ("[tensorboard, wandb]", ["tensorboard", "wandb"]),
        ("{6: 0.6, 8: .7}", {6: 0.6, 8: 0.7}),
        ("corpus/a=b", "corpus/a=b"),
        ("9bb295d", "9bb295d"),
        ("1e", "1e"),
    ],
)
def test_values_are_read_as_people_write_them(text, value):
    read = parse_overrides([f"key={text}"])["key"]
    assert read == value and type(read) is type(value)


def test_words_nest_by_dots():
    assert parse_overrides(["depth=12", "optimizer.matrix_lr=0.03", "model.overrides.boundary_operator=norm"]) == {
        "depth": 12,
        "optimizer": {"matrix_lr": 0.03},
        "model": {"overrides": {"boundary_operator": "norm"}},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["depth"], "'depth' is not of the form key=value"),
        (["--depth=12"], "as in depth=12"),
        (["depth="], "depth=null"),
        (["depth=1", "depth=2"], "depth is given twice"),
        (["growth=null", "growth.fraction=0.5"], "growth.fraction is set although growth is set as a whole"),
        (["depth=[1"], "is not YAML"),
        (["optimizer..lr=1"], "not of the form"),
        (["x={a: 1, a: 2}"], "a is given twice"),
    ],
)
def test_words_that_are_no_override(words, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_overrides(words)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("dpth=6", "command line: dpth is unknown. Did you mean depth?"),
        ("optimizer.matrx_lr=0.1", "optimizer.matrx_lr is unknown. Did you mean optimizer.matrix_lr?"),
        ("matrix_lr=0.1", "matrix_lr is unknown. Did you mean optimizer.matrix_lr?"),
        ("model.boundary_operator=norm", "Did you mean model.overrides.boundary_operator?"),
        ("model.overrides.boundary_opertor=norm", "Did you mean model.overrides.boundary_operator?"),
        ("model.overrides.vocab_size=97", "set by data.vocab_size"),
        ("model.overrides.num_loops=3", "set by model.num_loops"),
        ("data.paths=corpus", "Did you mean data.options.paths?"),
        ("data.options.paths=corpus", "data.options.paths is unknown"),
        ("optimizer.nesterov=false", "Did you mean optimizer.options.nesterov?"),
        ("optimizer.options.matrix_lr=0.1", "set by optimizer.matrix_lr"),
        ("data.source=pile", "data.source='pile' must be one of stdlib, text, hub"),
        ("optimizer.name=muno", "optimizer.name='muno' must be one of muon_adamw"),
        ("growth=4", "growth=4 must be a section"),
    ],
)
def test_misspelt_keys_are_refused_with_the_nearest_name(word, message):
    refused(["vanilla", "depth=6", word], re.escape(message))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("depth=six", "depth='six' must be an integer of at least 1"),
        ("depth=6.5", "depth=6.5 must be an integer"),
        ("depth=true", "depth=True must be an integer"),
        ("depth=0", "depth=0 must be an integer of at least 1"),
        ("optimizer.matrix_lr=fast", "optimizer.matrix_lr='fast' must be a number of at least 0"),
        ("optimizer.matrix_lr=-0.1", "optimizer.matrix_lr=-0.1 must be a number of at least 0"),
        ("optimizer.weight_decay=null", "optimizer.weight_decay=None must be a number"),
        ("optimizer.adam_betas=[0.9]", "optimizer.adam_betas=[0.9] must be a list of 2"),
        ("optimizer.adam_betas=0.9", "optimizer.adam_betas=0.9 must be a list of 2"),
        ("schedule.warmdown_ratio=60", "schedule.warmdown_ratio=60 must be a number of at least 0 and at most 1"),
        ("growth.fraction={six: 0.6}", "or a table from an integer"),
        ("growth.fraction={6: 1.6}", "or a table from an integer"),
        ("growth.optimizer_state=half", "must be one of zero, copy"),
        ("training.precision=fp16", "training.precision='fp16' must be one of fp32, bf16"),
        ("training.compile=yes", "training.compile='yes' must be true or false"),
        ("training.trackers=tensorboard", "training.trackers='tensorboard' must be a list"),
        ("training.save_every_steps=-1", "must be an integer of at least 1, or null"),
        ("data.tokenizer=2", "data.tokenizer=2 must be text, or null"),
        ("data.tokenizer=[gpt2]", "must be text, or null"),
        ("model.overrides=norm", "must be a table"),
        ("budget.flops=0", "budget.flops=0 must be a number above 0, or null"),
    ],
)
def test_wrong_types_are_refused_by_name(word, message):
    words = [word] if word.startswith("depth") else ["depth=6", word]
    refused(["vanilla", *words], "^command line: .*" + re.escape(message))


def test_whole_floats_are_integers():
    budget = load_command_line(["vanilla", "depth=6", "budget.tokens=1e9"]).budget
    assert budget.tokens == 10**9 and type(budget.tokens) is int


def test_sections_check_their_values_without_a_file_too():
    recipe = load_command_line(["vanilla", "depth=6"])
    with pytest.raises(RecipeError, match="schedule.warmup_steps=-1"):
        dataclasses.replace(recipe.schedule, warmup_steps=-1)
    assert dataclasses.replace(recipe.optimizer, adam_betas=[0.5, 1]).adam_betas == (0.5, 1.0)


def test_the_variant_names_the_recipe_when_none_is_given():
    words = ["depth=12", "optimizer.matrix_lr=0.03"]
    assert load_command_line(["variant=untied-grow", *words]) == load_command_line(["untied-grow", *words])
    assert load_command_line(["recipes/untied-grow.yaml", *words]) == load_command_line(["untied-grow", *words])
    assert load_command_line([str(RECIPES / "untied-grow.yaml"), *words]).optimizer.matrix_lr == 0.03
    other = load_command_line(["untied-grow", "variant=loop-2", *words])
    assert (other.name, other.variant) == ("untied-grow", "loop-2")
    refused(["depth=12"], "name a recipe, or give variant=NAME")
    refused(["vanilla", "loop-2", "depth=6"], "name one recipe, got vanilla and loop-2")
    refused(["untied-grw", "depth=6"], "did you mean untied-grow")
    refused(["nowhere/untied-gro.yaml", "depth=6"], "did you mean untied-grow")
    refused(["vanilla"], "depth is not set: add depth=NUMBER")
    refused(["base", "depth=6"], "variant, optimizer.embedding_lr")


def test_one_budget_replaces_another_but_two_at_once_are_refused():
    recipe = load_command_line(["untied-grow", "depth=6", "budget.steps=100"])
    assert [getattr(recipe.budget, name) for name in BUDGET_KEYS] == [None, None, 100, None]
    refused(["vanilla", "depth=6", "budget.steps=1", "budget.flops=1e18"], "got budget.steps and budget.flops")
    refused(["vanilla", "depth=6", "budget.tokens_per_parameter=null"], "got none of them")


def test_open_tables_add_up_and_others_are_replaced():
    recipe = load_command_line(
        ["untied-grow", "depth=6", "model.overrides.norm_affine=true", "growth.fraction={6: 0.5}"]
    )
    assert recipe.model.overrides == {"norm_affine": True}
    assert recipe.growth.fraction == {6: 0.5}
    again = load_recipe(
        "untied-grow", {"depth": 6, "model": {"overrides": {"norm_affine": True, "qk_norm": "before_rope"}}}
    )
    assert again.model.overrides == {"norm_affine": True, "qk_norm": "before_rope"}


def write(folder, name, text):
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def test_a_recipe_of_ones_own(tmp_path):
    path = write(
        tmp_path,
        "mine",
        "base: base\nvariant: vanilla\ndepth: 6\n"
        "optimizer: {embedding_lr: 1e-3, head_lr: 1e-3, lr_exponent: 0, weight_decay: 0, adam_betas: [0.9, 0.95],\n"
        "  adam_eps: 1e-8}\n"
        "schedule: {warmup_steps: 5, warmdown_ratio: 1}\n"
        "data: {source: text, options: {paths: corpus/}}\n"
        "budget: {tokens: 1e8}\n",
    )
    recipe = load_recipe(path)
    assert (recipe.name, recipe.variant, recipe.optimizer.embedding_lr) == ("mine", "vanilla", 0.001)
    assert recipe.data.options == {"paths": "corpus/"}
    # The options of a source go with it
    assert load_recipe(path, {"data": {"source": "stdlib"}}).data.options == {}
    beside = write(tmp_path, "beside", to_yaml(recipe))
    above = write(tmp_path, "above", "base: beside\nname: above\ndepth: 8\n")
    assert load_recipe(beside) == recipe
    assert load_recipe(above) == dataclasses.replace(recipe, name="above", depth=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: demo\ndepth: 8\n", "has a base of its own"),
        ("base: nothing\n", "there is no recipe nothing"),
        ("base: base\noptimizer:\n  matrix_lr: 0.1\n  matrx_lr: 0.1\n", "mine.yaml, line 4: optimizer.matrx_lr is un"),
        ("base: base\n\ntraining:\n  seed: many\n", "mine.yaml, line 4: training.seed='many' must be an integer"),
        ("base: base\n\nmodle: {}\n", "mine.yaml, line 3: modle is unknown. Did you mean model?"),
        ("base: base\ndepth: 6\ndepth: 8\n", "depth is given twice"),
        ("base: [base\n", "is not a readable recipe"),
        ("- base\n", "it holds list where keys with values belong"),
        ("", "it holds NoneType"),
    ],
)
def test_errors_in_a_file_say_where_they_stand(tmp_path, text, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(write(tmp_path, "mine", text))


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_files(name):
    text = find_recipe(name).read_text()
    assert re.match(r"# \S.*\.\n", text), "the first line says what the recipe is to show"
    recipe = load_recipe(name, {"depth": 6})
    # A file shows only the difference to its base
    own, base = read_mapping(find_recipe(name)), read_mapping(find_recipe("base"))
    for section, values in own.items():
        if isinstance(values, dict):
            same = [key for key, value in values.items() if key in base[section] and base[section][key] == value]
            assert not same, f"{section}: {same} are the base's values"
    variant = VARIANTS[recipe.variant]
    assert recipe.growth.num_loops == variant.grown_num_loops
    assert recipe.growth.operator in GROWTH_OPERATORS
    if not name.startswith("demo"):
        assert recipe.variant == name


def test_every_variant_has_a_recipe():
    assert set(VARIANTS) <= set(recipe_names())


def test_the_demos_differ_in_their_variants_recipe_alone():
    demo, baseline = (dataclasses.asdict(load_recipe(name)) for name in ("demo", "demo-vanilla"))
    for section in ("model", "data", "budget", "training"):
        assert demo[section] == baseline[section]
    assert demo["budget"]["flops"] is not None


@pytest.mark.parametrize("path", sorted((RECIPES / "launch").glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_describe_machines_and_accelerate_reads_them(path):
    config = load_config_from_file(str(path))
    assert config.num_processes % config.num_machines == 0
    assert config.mixed_precision is None, "precision is the recipe's"


def test_optimizer_fields_have_the_names_of_the_optimizer():
    settings = {field.name for field in dataclasses.fields(OptimizerSettings)}
    section = {field.name for field in dataclasses.fields(load_command_line(["vanilla", "depth=6"]).optimizer)}
    assert section - settings == {"name", "lr_reference_depth", "lr_exponent", "options"}
