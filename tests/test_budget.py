import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from modeling_looped.flops import pad_vocab_size, stored_parameters, training_flops
from modeling_looped.variants import build_config
from training.budget import Plan, print_plan, resolve
from training.config import load_command_line, load_recipe, recipe_names
from training.optim import OptimizerSettings
from training.plan import main, plan_of_row
from training.schedule import wsd_factor
from training.values import RecipeError

ROOT = Path(__file__).parent.parent
LADDER = json.loads((ROOT / "tests" / "assets" / "ladder.json").read_text())["checkpoints"]


def plan_of(*words: str) -> Plan:
    return resolve(load_command_line(words))


def refused(message, *words):
    with pytest.raises(RecipeError, match=message):
        plan_of(*words)


@pytest.mark.parametrize("row", LADDER, ids=lambda row: row["hub_id"].split("/")[1])
def test_published_runs(row):
    plan = plan_of_row(row)
    assert plan.stored_parameters == row["tpp_reference_parameters"]
    assert plan.final_stored_parameters == row["stored_parameters"]
    assert plan.num_steps == row["optimizer_steps"]
    assert plan.num_tokens == row["tokens"]
    assert plan.growth_step == row["growth_step"]
    assert plan.training_flops == pytest.approx(row["training_flops"], rel=1e-6)
    assert plan.matrix_lr == pytest.approx(row["matrix_lr"], rel=1e-6)
    assert plan.embedding_lr == pytest.approx(row["embedding_lr"], rel=1e-6)
    assert plan.head_lr == pytest.approx(row["unembedding_lr"], rel=1e-6)
    recipe = plan.recipe
    assert recipe.budget.tokens_per_parameter == row["tokens_per_parameter"]
    assert recipe.schedule.warmup_steps == row["warmup_steps"]
    assert recipe.schedule.warmdown_ratio == row["warmdown_ratio"]
    assert plan.growth_fraction == row["growth_fraction"]
    assert (plan.grown_config is None) == (row["core_repetitions_low"] is None)
    assert plan.optimizer_settings.weight_decay == row["weight_decay"]
    assert plan.optimizer_settings.adam_betas == tuple(row["adam_betas"])
    assert plan.optimizer_settings.adam_eps == row["adam_eps"]


def published_control():
    with open(ROOT / "tests" / "assets" / "laws" / "qlabs_fineweb_ladders.csv") as file:
        return [row for row in csv.DictReader(file) if row["arm"] == "deep_vanilla_grow"]


@pytest.mark.parametrize("row", published_control(), ids=lambda row: f"d{row['depth']}")
def test_published_flops_of_the_growing_control(row):
    # Its settings are not published; seven digits of its FLOPs are
    plan = plan_of("deep-vanilla-grow", f"depth={row['depth']}")
    assert plan.training_flops == pytest.approx(float(row["compute_flops"]), rel=3e-7)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["vanilla", "depth=6"], 604_724_264),
        (["operator-1", "depth=16"], 6_230_460_334),
        (["deep-vanilla", "depth=18"], 10_669_517_701),
        (["vanilla", "depth=6", "data.train_tokens=1e8"], 100_000_000),
    ],
)
def test_tokens_to_prepare(words, tokens):
    # The first three are the limits of the paper's code
    plan = plan_of(*words)
    assert plan.train_tokens == tokens
    assert plan.num_epochs == plan.num_tokens / tokens


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("depth", range(6, 27))
def test_recipes_resolve_at_every_depth(name, depth):
    # The FLOPs of a demo are for its own depth
    budget = {"budget": {"tokens_per_parameter": 5}} if name.startswith("demo") else {}
    plan = resolve(load_recipe(name, {"depth": depth, **budget}))
    assert plan.warmup_steps < plan.num_steps
    assert plan.num_tokens == plan.num_steps * plan.tokens_per_step
    assert plan.windows_per_step * plan.recipe.model.sequence_length == plan.tokens_per_step
    assert plan.config.max_position_embeddings == plan.recipe.model.sequence_length
    if plan.growth_step is not None:
        assert 0 < plan.growth_step < plan.num_steps
        assert plan.grown_flops_per_token > plan.flops_per_token


@pytest.mark.parametrize("variant", ["vanilla", "loop-2", "untied-grow", "loop-grow"])
@pytest.mark.parametrize("flops", [3e17, 1e18])
def test_equal_flops_budgets_are_met_to_half_a_step(variant, flops):
    plan = plan_of(variant, "depth=6", f"budget.flops={flops}")
    last_step = plan.tokens_per_step * (plan.grown_flops_per_token or plan.flops_per_token)
    assert abs(plan.training_flops - flops) <= last_step / 2
    # Spent as the run will spend it: phase by phase, at the config that each one executes
    rule = {"sequence_length": 2048, "padded_vocab_size": pad_vocab_size(50257)}
    if plan.growth_step is None:
        phases = [(plan.config, plan.num_tokens)]
    else:
        before = plan.growth_step * plan.tokens_per_step
        phases = [(plan.config, before), (plan.grown_config, plan.num_tokens - before)]
    assert training_flops(phases, **rule) == plan.training_flops


def test_a_growing_run_costs_in_matrix_flops_what_the_run_without_growth_does():
    # Both rounded to whole steps
    grown = plan_of("untied-grow", "depth=10")
    plain = plan_of("untied-grow", "depth=10", "growth.num_loops=null")
    assert plain.growth_step is None and plain.grown_config is None
    assert grown.mean_matrix_flops * grown.num_steps == pytest.approx(plain.num_steps, abs=1)


def test_tokens_and_steps_are_those_of_the_whole_run():
    assert plan_of("untied-grow", "depth=6", "budget.steps=1000").num_steps == 1000
    plan = plan_of("untied-grow", "depth=6", "budget.tokens=1e9")
    assert plan.num_steps == round(1e9 / 524288)
    assert plan.growth_step == int(0.6 * plan.num_steps)


@pytest.mark.parametrize("words", [["width_ratio=32", "head_dim=32"], ["width_ratio=64", "head_dim=64"]])
def test_small_models_scale_their_rates_within_their_own_width(words):
    settings = [f"model.{word}" for word in words] + ["model.sequence_length=256", "data.vocab_size=4096"]
    at_8 = plan_of("untied-2", "depth=8", *settings)
    assert at_8.lr_scale == 1.0
    assert (at_8.matrix_lr, at_8.embedding_lr) == (0.04, 0.0064)
    at_6 = plan_of("untied-2", "depth=6", *settings)
    sizes = {name: int(value) for name, value in (word.split("=") for word in words)}
    reference = stored_parameters(build_config("untied-2", 8, vocab_size=4096, **sizes)).total
    own = stored_parameters(build_config("untied-2", 6, vocab_size=4096, **sizes)).total
    assert at_6.lr_reference_parameters == reference
    assert at_6.matrix_lr == pytest.approx(0.04 * (reference / own) ** 0.6, rel=1e-12)
    other = plan_of("untied-2", "depth=6", *settings, "optimizer.lr_reference_depth=6")
    assert other.matrix_lr == 0.04
    assert plan_of("untied-2", "depth=6", *settings, "optimizer.lr_exponent=0").matrix_lr == 0.04


@pytest.mark.parametrize(
    ("depth", "fraction", "source"),
    [
        (3, 0.60, "ours"),
        (6, 0.60, "recipe"),
        (9, 0.73, "ours"),
        (22, 0.76, "ours"),
        (26, 0.77, "recipe"),
        (30, 0.77, "ours"),
    ],
)
def test_growth_fraction_between_and_beyond_the_published_depths(depth, fraction, source):
    plan = plan_of("untied-grow", f"depth={depth}")
    assert plan.growth_fraction == pytest.approx(fraction, abs=1e-12)
    assert plan.rules["growth_fraction"].source == source
    assert plan_of("untied-grow", f"depth={depth}", "growth.fraction=0.5").growth_fraction == 0.5


@pytest.mark.parametrize(
    "words", [["vanilla"], ["operator-1"], ["untied-2"], ["vanilla", "schedule.warmdown_ratio=0.01"]]
)
def test_decay_starts_where_the_schedule_says(words):
    plan = plan_of(*words, "depth=6", "budget.steps=200")
    run = (plan.num_steps, plan.warmup_steps, plan.recipe.schedule.warmdown_ratio)
    assert wsd_factor(plan.decay_start_step, *run) == 1.0
    assert wsd_factor(plan.decay_start_step + 1, *run) < 1.0


def test_overrides_reach_the_model_and_its_counts():
    words = ["loop-2", "depth=6", "model.num_loops=3", "model.overrides.boundary_operator=linear_adapter"]
    plan = plan_of(*words)
    assert (plan.config.num_loops, plan.config.boundary_operator) == (3, "linear_adapter")
    assert plan.stored_parameters == plan_of("loop-2", "depth=6").stored_parameters + 2 * 768**2
    assert plan_of("vanilla", "depth=6", "optimizer.options.nesterov=false").optimizer_settings.nesterov is False


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("budget.tokens=1,000 gives 0 steps", ["vanilla", "budget.tokens=1000"]),
        ("budget.tokens_per_parameter=0.001 gives 0 steps", ["vanilla", "budget.tokens_per_parameter=0.001"]),
        ("gives 0 steps", ["vanilla", "budget.flops=1e9"]),
        ("growth.num_loops=2 must be more than the 2 passes .* untied", ["untied-grow", "growth.num_loops=2"]),
        ("growth.num_loops=1 must be more than the 2 passes .* untied", ["untied-grow", "growth.num_loops=1"]),
        ("growth.num_loops=4 must be more than the 4 passes .* tied", ["loop-grow", "model.num_loops=4"]),
        ("needs growth.fraction", ["untied-2", "growth.num_loops=4"]),
        ("growth.fraction is an empty table", ["untied-grow", "growth.fraction={}"]),
        ("growth at step 0 is not inside the run", ["untied-grow", "growth.fraction=0"]),
        ("growth at step 1826 is not inside the run", ["untied-grow", "growth.fraction=1", "budget.steps=1826"]),
        ("schedule.ramp_steps=40 is longer than the 20 steps left", ["untied-grow", "budget.steps=50"]),
        ("schedule.warmup_steps=40 is longer than the run of 10", ["vanilla", "budget.steps=10"]),
        ("make it a multiple of 32,768", ["vanilla", "budget.tokens_per_step=5e5"]),
        ("max_position_embeddings=1024", ["vanilla", "model.overrides.max_position_embeddings=1024"]),
    ],
)
def test_runs_that_cannot_be_are_refused(message, words):
    refused(message, words[0], "depth=6", *words[1:])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Did you mean `untied-2`", ["vanilla", "variant=unted-2"]),
        ("`boundary_operator` is 'nrm'", ["vanilla", "model.overrides.boundary_operator=nrm"]),
        ("not a multiple of `head_dim`", ["vanilla", "model.width_ratio=100"]),
        ("`operator` is 'stak'", ["untied-grow", "growth.operator=stak"]),
        ("ns_steps is 9", ["vanilla", "optimizer.options.ns_steps=9"]),
    ],
)
def test_what_no_model_or_optimizer_takes_is_refused(message, words):
    with pytest.raises(ValueError, match=message):
        plan_of(words[0], "depth=6", *words[1:])


def test_every_number_has_its_rule_and_goes_into_files_and_tables():
    plan = plan_of("untied-grow", "depth=6")
    others = {"recipe", "config", "grown_config", "optimizer_settings", "rules"}
    assert set(plan.rules) == set(Plan.__dataclass_fields__) - others
    assert all(rule.text and rule.source in ("paper", "recipe", "ours") for rule in plan.rules.values())
    written = yaml.safe_load(yaml.safe_dump(plan.as_dict()))
    assert written["derived"]["growth_step"] == 1095
    assert written["recipe"]["growth"]["num_loops"] == 4
    assert written["rules"]["num_steps"] == "round(8 x 133,890,048 / 524,288 / mean_matrix_flops) (paper)"
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=200))
    for name in plan.rules:
        assert name in out.getvalue()
    assert "6.990536e+17" in out.getvalue()


def test_command_ladder():
    command = [sys.executable, "-m", "training.plan", "ladder"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "67 published runs, all agree" in done.stdout
    assert done.stdout.count("published  ") == 67


def test_command_ladder_finds_a_difference(tmp_path, capsys):
    rows = [dict(row) for row in LADDER[:2]]
    rows[1]["optimizer_steps"] += 1
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({"checkpoints": rows}))
    assert main(["ladder", "--ladder", str(path)]) == 1
    assert "2 published runs, 1 DO NOT AGREE" in capsys.readouterr().out


def test_command_show(capsys):
    assert main(["show", "variant=untied-grow", "depth=12", "optimizer.matrix_lr=2e-2"]) == 0
    shown = capsys.readouterr().out
    assert "8,311" in shown and "0.0115789" in shown
    with pytest.raises(RecipeError, match="Did you mean optimizer.matrix_lr?"):
        main(["show", "untied-grow", "depth=12", "optimizer.matrx_lr=2e-2"])
    with pytest.raises(RecipeError, match="unknown command 'shw'"):
        main(["shw"])


def test_settings_for_the_optimizer_take_the_rates_of_the_depth():
    plan = plan_of("operator-1", "depth=6")
    assert isinstance(plan.optimizer_settings, OptimizerSettings)
    for role in ("matrix_lr", "embedding_lr", "head_lr", "scalar_lr"):
        assert getattr(plan.optimizer_settings, role) == getattr(plan, role)
