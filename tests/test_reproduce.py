"""The paper's own training runs, repeated by this engine; and that a wrong rule or number would not pass for them.

Two runs of 16 steps are assets. They are whole, with more tensors to compare, where LOOPED_REFERENCE_DIR is.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_looped import LoopedForCausalLM
from training import reproduce
from training.data.loader import WindowLoader
from training.engine.initialization import initialize_as_paper
from training.engine.launch import start
from training.engine.records import read_metrics
from training.paper_run import PaperRun, PaperRunError, paper_names

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "tests" / "assets" / "train"
RUNS = ("loop_grow_d3", "vanilla_d4")
NUM_STEPS = 16


@pytest.fixture(scope="module")
def accelerator():
    return start("fp32")


@pytest.fixture
def copied(tmp_path) -> Path:
    """A copy of loop_grow_d3 that a test may change."""
    shutil.copytree(ASSETS / "pool", tmp_path / "pool")
    return Path(shutil.copytree(ASSETS / "loop_grow_d3", tmp_path / "loop_grow_d3"))


def change_json(path: Path, **changes) -> None:
    """Lays `changes` over a JSON file; a double underscore leads into a section."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = content
        for section in sections:
            place = place[section]
        assert name in place
        place[name] = value
    path.write_text(json.dumps(content))


def missed(entries) -> set[str]:
    return {entry.quantity for entry in entries if not entry.agrees}


@pytest.mark.parametrize("name", RUNS)
def test_the_run_is_reproduced(accelerator, tmp_path, name):
    paper = PaperRun(ASSETS / name)
    entries = reproduce.reproduce(paper, accelerator, tmp_path)
    assert missed(entries) == set()
    # nothing was skipped: each step, each group of the optimizer, each tensor whose norm is published
    compared = {quantity: sum(e.quantity == quantity for e in entries) for quantity in reproduce.TOLERANCES}
    assert compared["loss"] == NUM_STEPS
    assert compared["learning rate"] == compared["weight decay"] == 5 * NUM_STEPS
    assert compared["momentum"] == 3 * NUM_STEPS
    assert compared["passes"] == (NUM_STEPS if paper.grows else 0)
    assert compared["validation loss"] == 2
    assert compared["gradient norm"] == 6
    assert compared["gradient norm of a matrix, early"] == 2 * len(paper.initial_weights)
    assert compared["gradient norm of a matrix, median"] == 4
    assert compared["change of embedding or head"] == 2
    assert compared["change of a matrix, early"] == (7 if name == "loop_grow_d3" else 0)


@pytest.mark.parametrize("name", RUNS)
def test_the_seed_gives_the_runs_initial_weights(name):
    paper = PaperRun(ASSETS / name)
    model = LoopedForCausalLM(paper.config)
    initialize_as_paper(model, paper.args["seed"])
    for parameter, weight in paper.initial_weights.items():
        torch.testing.assert_close(model.get_parameter(parameter).data, weight, rtol=1e-6, atol=0, msg=parameter)


@pytest.mark.parametrize("name", RUNS)
def test_the_whole_run_is_reproduced(reference_dir, name):
    folder = reference_dir / "reference" / "train" / name
    command = [sys.executable, "-m", "training.reproduce", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert f"{name}: reproduced" in finished.stdout
    for quantity in ("change of a matrix, early", "gradient of a matrix, early"):
        assert quantity in finished.stdout


# A rule that is left out moves the loss of these small runs by 1e-5 only: that it is caught at all is the point
@pytest.mark.parametrize(
    ("settings", "caught_by"),
    [
        ({"nesterov": False}, "change of a matrix, early"),
        ({"row_normalize": False}, "change of a matrix, early"),
        ({"variance_reduction": False}, "change of a matrix, early"),
        ({"ns_steps": 4}, "change of a matrix, early"),
        ({"adam_eps": 1e-8}, "change of embedding or head, early"),
        ({"adam_betas": (0.9, 0.95)}, "loss"),
        ({"weight_decay": 0.06}, "weight decay"),
        ({"matrix_lr": 0.0401}, "learning rate"),
    ],
)
def test_another_optimizer_is_not_taken_for_the_papers(accelerator, tmp_path, monkeypatch, settings, caught_by):
    paper = PaperRun(ASSETS / "loop_grow_d3")
    plan = paper.plan()
    changed = dataclasses.replace(plan, optimizer_settings=dataclasses.replace(plan.optimizer_settings, **settings))
    monkeypatch.setattr(paper, "plan", lambda: changed)
    assert caught_by in missed(reproduce.reproduce(paper, accelerator, tmp_path))


@pytest.mark.parametrize(
    ("changes", "caught_by"),
    [
        ({"growth_step": 9}, {"passes", "learning rate", "loss"}),
        ({"growth_step": None}, {"passes", "learning rate", "loss"}),
    ],
)
def test_another_growth_is_not_taken_for_the_papers(accelerator, tmp_path, monkeypatch, changes, caught_by):
    paper = PaperRun(ASSETS / "loop_grow_d3")
    changed = dataclasses.replace(paper.plan(), **changes)
    monkeypatch.setattr(paper, "plan", lambda: changed)
    assert caught_by <= missed(reproduce.reproduce(paper, accelerator, tmp_path))


def test_other_windows_are_not_taken_for_the_papers(accelerator, tmp_path, monkeypatch):
    # one step's windows exchanged for another's: same weights, rates and epoch
    original = WindowLoader.step_windows
    monkeypatch.setattr(WindowLoader, "step_windows", lambda self, step: original(self, 4 if step == 3 else step))
    entries = reproduce.reproduce(PaperRun(ASSETS / "loop_grow_d3"), accelerator, tmp_path)
    assert {entry.step for entry in entries if entry.quantity == "loss" and not entry.agrees} >= {4}


def test_a_missed_tolerance_is_the_exit_status(copied, capsys):
    trajectory = json.loads((copied / "run.json").read_text())["trajectory"]
    trajectory["eager"][5]["global_batch_loss"] += 2e-4
    change_json(copied / "run.json", trajectory=trajectory)
    assert reproduce.main([str(copied)]) == 1
    printed = capsys.readouterr().out
    assert "loop_grow_d3: not reproduced: 1 of" in printed
    assert "MISSED │ step 6 " in printed


def untied(folder: Path, num_epochs: int = 1) -> None:
    """Turns a copy of loop_grow_d3 into an untied run: the paper's code holds all four cores from the start."""
    tensors = load_file(folder / "init.safetensors")
    generator = torch.Generator().manual_seed(0)
    grown = {name: tensor for name, tensor in tensors.items() if ".h." not in name}
    for block in range(6):
        for name, tensor in tensors.items():
            if ".h.1." in name:
                drawn = torch.rand(tensor.shape, generator=generator) - 0.5
                grown[name.replace(".h.1.", f".h.{block}.")] = drawn * (tensor.any() / 64)
    save_file(grown, folder / "init.safetensors")
    for path in folder.glob("*_partial.safetensors"):
        path.unlink()
    per_step = json.loads((folder / "run.json").read_text())["per_step"]
    for step in per_step:
        step["grad_norms"] = None
    change_json(folder / "run.json", args__depth_scale_mode="dep", args__num_epochs=num_epochs, per_step=per_step)
    block_parameters = (94208 - 2 * 128 * 32) // 3
    change_json(folder / "result.json", parameter_count=94208 + 3 * block_parameters, depth_scale_mode="dep")


def test_untied_growth_over_two_epochs(copied, accelerator, tmp_path):
    untied(copied, num_epochs=2)
    # epochs of 8 steps of 8 windows; a validation at the end of each, as that code prints it
    change_json(copied / "run.json", args__train_token_limit=64 * 33 + 5)
    lines = ["Step 00000 | Val BPB: 2.6 | Val Loss: 4.574711", "Step 00008 | Epoch 1 | Val BPB: 2.6 | Val Loss: 4.2"]
    change_json(copied / "run.json", val_lines=lines)
    change_json(copied / "result.json", packed_train_sequences_per_epoch=64, active_train_tokens=64 * 33 + 5)

    paper = PaperRun(copied)
    assert (paper.config.num_stored_blocks, paper.num_held_blocks) == (4, 6)
    held = load_file(copied / "init.safetensors")
    for ours, theirs in ((0, 0), (1, 1), (2, 2), (3, 5)):  # prelude, core 1, core 2, coda behind two dormant cores
        weight = paper.initial_weights[f"model.layers.{ours}.mlp.up_proj.weight"]
        assert torch.equal(weight, held[f"transformer.h.{theirs}.mlp.c_fc.weight"])
        assert paper_names(paper.config, 6)[f"model.layers.{ours}.mlp.up_proj.weight"].split(".")[2] == str(theirs)

    entries = reproduce.reproduce(paper, accelerator, tmp_path / "again")
    # what does not depend on the weights is that of the tied run: rates, passes, and the FLOPs of one compute graph
    exact = {"stored parameters", "training FLOPs", "passes", "learning rate", "weight decay", "momentum"}
    assert exact & missed(entries) == set()
    metrics = read_metrics(tmp_path / "again" / "loop_grow_d3" / "metrics.jsonl")
    assert [record["epoch"] for record in metrics] == [1] * 8 + [2] * 8
    validated = {entry.step: entry.ours for entry in entries if entry.quantity == "validation loss"}
    assert sorted(validated) == [0, 8, 16]
    assert validated[16] < validated[8] < validated[0] == pytest.approx(4.574711, abs=1e-6)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("run.json", {"args__matrix_weight_decay": 0.1}, r"no weight decays of \[0.05, 0.1\], one for each group"),
        ("run.json", {"args__core_repetition_schedule": "linear"}, "no core_repetition_schedule='linear'"),
        ("run.json", {"args__embedding_wd_skip_norm": 0.5}, "no embedding_wd_skip_norm=0.5"),
        ("result.json", {"completed_train_steps": 12}, "no 12 steps of a schedule of 16"),
    ],
)
def test_settings_that_this_engine_lacks_are_refused(copied, file, changes, message):
    change_json(copied / file, **changes)
    with pytest.raises(PaperRunError, match=message):
        PaperRun(copied)


def test_files_that_are_missing_are_named(copied, capsys):
    (copied.parent / "pool" / "val.pt").unlink()
    assert reproduce.main([str(copied)]) == 2
    assert f"{copied.parent / 'pool' / 'val.pt'} is missing" in capsys.readouterr().err
    for name in ("init.safetensors", "final.pt", "run.json"):
        (copied / name).rename(copied / "elsewhere")
        assert reproduce.main([str(copied)]) == 2
        assert f"{copied / name} is missing" in capsys.readouterr().err
        (copied / "elsewhere").rename(copied / name)


def test_an_epoch_of_other_windows_is_refused(copied, capsys):
    change_json(copied / "result.json", packed_train_sequences_per_epoch=172)
    assert reproduce.main([str(copied)]) == 2
    assert "packed_train_sequences_per_epoch is 172, our loader has 168" in capsys.readouterr().err
