"""CORE from accuracies, against figures that others published."""

import json
from pathlib import Path

import pytest

from eval.aggregate import IncompleteError, aggregate, center, filtered_aggregate, mean_and_std
from eval.metrics.centered_accuracy.formula import centered_accuracy
from eval.tasks import load_task_set

ASSETS = Path(__file__).parent / "assets" / "core"
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def core():
    return load_task_set("core")


@pytest.fixture(scope="module")
def dclm():
    return json.loads((ASSETS / "dclm_core_reference.json").read_text())


def test_task_order_and_baselines_are_dclms(core, dclm):
    assert list(core.tasks) == dclm["tasks"]
    for version, percents in dclm["random_baselines_percent"].items():
        assert {name: task.chance_percent[version] for name, task in core.tasks.items()} == percents


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_aggregate_of_every_published_dclm_model(core, dclm, version):
    assert len(dclm["models"]) == 78
    for model in dclm["models"]:
        found = aggregate(core, model["accuracies"], version)
        assert found == pytest.approx(model[f"core_{version}"], abs=1e-12), model["model"]


def test_tables_of_nanochat(core):
    tables = json.loads((ASSETS / "nanochat_core_reference.json").read_text())
    assert len(tables) == 5
    for table in tables:
        assert aggregate(core, table["accuracies"]) == pytest.approx(table["core"], abs=1e-6), table["model"]
        for name, centered in table["centered"].items():
            # the accuracies are rounded to 6 digits, and centering divides by as little as 0.38
            assert center(core.tasks[name], table["accuracies"][name]) == pytest.approx(centered, abs=2e-6)


# what each version of the baselines gives for the same accuracy
@pytest.mark.parametrize(
    "task, accuracy, v1, v2",
    [
        ("commonsense_qa", 0.403, 0.25375, 0.0),
        ("bigbench_language_identification", 0.25, (0.25 - 0.091) / 0.909, 0.0),
        ("agi_eval_lsat_ar", 0.0, -0.25, -1 / 3),
        ("boolq", 0.5, (0.5 - 0.62) / 0.38, (0.5 - 0.62) / 0.38),
    ],
)
def test_versions_of_the_baselines(core, task, accuracy, v1, v2):
    assert center(core.tasks[task], accuracy, "v1") == pytest.approx(v1, abs=1e-12)
    assert center(core.tasks[task], accuracy, "v2") == pytest.approx(v2, abs=1e-12)


def test_unknown_version_is_refused(core):
    with pytest.raises(ValueError, match="v1, v2"):
        center(core.tasks["copa"], 0.5, "v3")


def test_missing_or_broken_accuracy_refuses_the_aggregate_by_name(core, dclm):
    accuracies = dict(dclm["models"][0]["accuracies"])
    del accuracies["squad"]
    accuracies["copa"] = float("nan")
    with pytest.raises(IncompleteError, match="copa, squad"):
        aggregate(core, accuracies)


def test_filtered_aggregate_is_the_mean_over_the_other_17(core, dclm):
    accuracies = dclm["models"][0]["accuracies"]
    kept = [name for name in core.tasks if name not in core.filtered_out]
    assert len(kept) == 17
    expected = sum(center(core.tasks[name], accuracies[name]) for name in kept) / 17
    assert filtered_aggregate(core, accuracies) == pytest.approx(expected, abs=1e-15)


def test_centered_accuracy_refuses_percentages():
    with pytest.raises(ValueError, match="fraction"):
        centered_accuracy(0.5, 25.0)


def test_std_over_seeds_is_of_the_population():
    assert mean_and_std([1.0, 3.0]) == (2.0, 1.0)
    assert mean_and_std([0.25]) == (0.25, 0.0)


def test_metric_module_loads_by_path_without_network():
    evaluate = pytest.importorskip("evaluate")
    metric = evaluate.load(str(REPOSITORY / "eval" / "metrics" / "centered_accuracy"))
    found = metric.compute(predictions=[0, 1, 2, 3], references=[0, 1, 2, 0], chance=0.25)
    assert found == {"accuracy": 0.75, "centered_accuracy": pytest.approx(2 / 3)}
