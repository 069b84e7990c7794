"""Pretraining gives the same numbers however it is run: accumulated, resumed, killed, on two processes, grown."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from modeling_looped import LoopedForCausalLM
from training import pretrain
from training.data.loader import ValidationLoader
from training.engine.checkpoint import list_checkpoints, load_checkpoint
from training.engine.records import read_metrics

ROOT = Path(__file__).resolve().parents[1]
GROWTH_STEP = 6  # int(0.5 * 12), see the fixture `words`
NUM_STEPS = 12


def losses(run_dir: Path) -> list[float]:
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    return [record["loss"] for record in records]


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(list_checkpoints(run_dir)[-1])[1]


def assert_same_run(run_dir: Path, straight: Path) -> None:
    assert losses(run_dir) == losses(straight)
    expected = final_weights(straight)
    assert all(torch.equal(weight, expected[name]) for name, weight in final_weights(run_dir).items())


def test_the_model_learns_and_grows(straight):
    results = json.loads((straight / "results.json").read_text())
    assert results["growths"] == [{"step": GROWTH_STEP, "from_num_loops": 2, "to_num_loops": 4}]
    assert results["stored_blocks"] == 1 + 4 * 1 + 1
    records = read_metrics(straight / "metrics.jsonl")
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert [record["num_loops"] for record in records] == [2] * GROWTH_STEP + [4] * (NUM_STEPS - GROWTH_STEP)
    # the growth step has learning rate 0, the one after it half, then the schedule alone
    factors = [record["lr_factor"] for record in records]
    assert factors[GROWTH_STEP] == 0.0 and factors[-1] == 0.0
    assert factors[GROWTH_STEP + 1] == pytest.approx(0.5 * (NUM_STEPS - 1 - GROWTH_STEP - 1) / (NUM_STEPS - 1 - 2))


def test_growth_changes_no_trained_weight_at_its_step(words, tmp_path, run_to_the_end):
    # stopped right behind the growth step: its learning rate is 0, so the checkpoint before it has the same weights
    words = words(tmp_path / "run", **{"training.save_every_steps": 1})
    run_to_the_end(words)
    before = load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{GROWTH_STEP:08d}")
    after = load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{GROWTH_STEP + 1:08d}")
    assert (before[0].num_loops, after[0].num_loops) == (2, 4)
    moved = {1: [1, 3], 2: [2, 4], 0: [0], 3: [5]}  # prelude, core 1, core 2, coda -> their places in the grown model
    for name, weight in before[1].items():
        block = int(name.split(".")[2]) if ".layers." in name else None
        for place in moved.get(block, [None]):
            grown_name = name if block is None else name.replace(f".layers.{block}.", f".layers.{place}.")
            assert torch.equal(after[1][grown_name], weight), grown_name
    # B99: the new cores start without moments, so theirs hold one step of this gradient alone; the old ones go on
    momentum = after[2]["model.layers.3.mlp.up_proj.weight"]["momentum_buffer"]
    trained = after[2]["model.layers.1.mlp.up_proj.weight"]["momentum_buffer"]
    assert momentum.norm() < trained.norm()


# Muon orthogonalises in bf16, where another rounding of a summed gradient flips bits; in fp32 sums in any order agree
EXACT = {"optimizer.options.orthogonalize_dtype": "float32"}


def test_accumulation_gives_the_same_losses(words, tmp_path, run_to_the_end):
    at_once = run_to_the_end(words(tmp_path / "at-once", **EXACT))
    accumulated = run_to_the_end(words(tmp_path / "accumulated", **EXACT, **{"budget.micro_batch_size": 2}))
    assert losses(accumulated) == pytest.approx(losses(at_once), abs=1e-5)


@pytest.mark.parametrize("stop_at", [3, GROWTH_STEP, GROWTH_STEP + 1, NUM_STEPS - 1])
def test_a_resumed_run_is_bit_identical(words, straight, tmp_path, stop_at, monkeypatch, run_to_the_end):
    # B73, B91, B101: schedule, moments, AdamW's step count and the passes come back as they were
    command = words(tmp_path / "run")
    original = pretrain.Trainer.train_step

    def stop_early(self, stop_requested, logged):
        return original(self, stop_requested or self.step + 1 == stop_at, logged)

    monkeypatch.setattr(pretrain.Trainer, "train_step", stop_early)
    assert pretrain.main(command) == 2
    assert list_checkpoints(tmp_path / "run")[-1].name == f"step-{stop_at:08d}"
    monkeypatch.undo()
    assert_same_run(run_to_the_end(command), straight)


def test_the_logged_validation_loss_is_the_checkpoints_own(straight):
    # B87: an evaluation apart from the training loop, with plain logits and cross-entropy
    results = json.loads((straight / "results.json").read_text())
    for point in results["validation_curve"]:
        config, weights, _, _ = load_checkpoint(straight / "checkpoints" / f"step-{point['step']:08d}")
        model = LoopedForCausalLM(config).eval()
        model.load_state_dict(weights)
        pool = pretrain.prepare(out=results["data"]["folder"], progress=False, **_prepared(straight)).validation
        total, count = 0.0, 0
        for batch in ValidationLoader(pool, 32).batches(batch_windows=1):
            with torch.no_grad():
                logits = model(batch.input_ids).logits[0]
            total += torch.nn.functional.cross_entropy(logits, batch.targets[0], reduction="sum").item()
            count += batch.targets.numel()
        assert total / count == pytest.approx(point["loss"], abs=1e-6)


def _prepared(run_dir: Path) -> dict:
    import yaml

    resolved = yaml.safe_load((run_dir / "resolved.yaml").read_text())
    section = resolved["recipe"]["data"]
    kept = ("source", "tokenizer", "vocab_size", "tokenizer_chars", "validation_tokens", "shard_tokens")
    options = {key: section[key] for key in kept} | section["options"]
    return options | {"train_tokens": resolved["derived"]["train_tokens"]}


def launch(words, num_processes=1) -> subprocess.Popen:
    start = [sys.executable, "-m", "training.pretrain"]
    if num_processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
        start = [sys.executable, *torchrun, "-m", "training.pretrain"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*start, *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_two_processes_give_the_losses_of_one(words, tmp_path, run_to_the_end):
    one = run_to_the_end(words(tmp_path / "one", **EXACT))
    process = launch(words(tmp_path / "two", **EXACT, **{"budget.micro_batch_size": 4}), num_processes=2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "DDP over 2 processes" in output
    assert losses(tmp_path / "two") == pytest.approx(losses(one), abs=1e-5)
    records = [read_metrics(path / "metrics.jsonl") for path in (one, tmp_path / "two")]
    validated = [[record["validation_loss"] for record in run if "validation_loss" in record] for run in records]
    assert len(validated[0]) == 3 and validated[1] == pytest.approx(validated[0], abs=1e-5)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.is_file() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[0]}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_run_that_dies_goes_on_to_the_same_numbers(words, straight, tmp_path, number, run_to_the_end):
    command = words(tmp_path / "run", **{"training.save_every_steps": 2})
    process = launch(command)
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    if number == signal.SIGTERM:
        assert process.returncode == 2 and "stopped at step" in output
    assert not (tmp_path / "run" / "results.json").exists()
    assert_same_run(run_to_the_end(command), straight)


def test_a_finished_run_is_not_run_again(words, straight, capsys):
    before = (straight / "results.json").stat().st_mtime_ns
    assert pretrain.main(words(straight)) == 0
    assert "is complete" in capsys.readouterr().out
    assert (straight / "results.json").stat().st_mtime_ns == before


def test_a_loss_that_is_not_finite_stops_the_run(words, tmp_path, capsys):
    assert pretrain.main(words(tmp_path / "run", **{"optimizer.embedding_lr": 1e38, "optimizer.head_lr": 1e38})) == 2
    message = capsys.readouterr().err
    assert "The loss is nan at step" in message or "The loss is inf at step" in message
    assert "windows [" in message and "Last checkpoint" in message
    assert not (tmp_path / "run" / "results.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget.stepz": 3}, "steps"),
        ({"variant": "untied-grwo"}, "untied-grow"),
        ({"model.overrides.boundary_operator": "norm_injekt"}, "norm_inject"),
        ({"model.head_dim": 7}, "head_dim"),
        ({"model.num_loops": 0}, "num_loops"),
        ({"model.num_loops": 1.5}, "num_loops"),
        ({"growth.num_loops": 2}, "growth.num_loops"),
        ({"budget.micro_batch_size": 3}, "micro_batch_size"),
        ({"data.options.paths": "/nonexistent/corpus"}, "/nonexistent/corpus"),
        ({"training.run_dir": "/proc/nowhere"}, "/proc/nowhere"),
    ],
)
def test_bad_input_is_one_line_before_work_is_lost(words, tmp_path, capsys, changes, message):
    command = words(tmp_path / "run", **{"data.out": str(tmp_path / "data"), **changes})
    assert pretrain.main(command) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error.split("pretrain: ", 1)[1]


def test_an_empty_text_file_is_refused(words, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    command = words(
        tmp_path / "run", **{"data.options.paths": str(tmp_path / "empty.txt"), "data.out": str(tmp_path / "data")}
    )
    assert pretrain.main(command) == 2
    assert "empty" in capsys.readouterr().err


def test_trackers_get_the_metrics(words, run_to_the_end, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = run_to_the_end(words(tmp_path / "run", **{"training.trackers": ["tensorboard"]}))
    files = [EventAccumulator(str(path)).Reload() for path in run_dir.rglob("events.out.tfevents.*")]
    (tracked,) = (file for file in files if "loss" in file.Tags()["scalars"])  # another file holds the recipe
    values = [scalar.value for scalar in tracked.Scalars("loss")]
    assert values == pytest.approx(losses(run_dir), rel=1e-6)


def test_compiled_blocks_give_the_same_run(words, straight, run_to_the_end, tmp_path):
    # B53: and the checkpoint has the names of the model, not of its compiled form
    run_dir = run_to_the_end(words(tmp_path / "run", **{"training.compile": True}))
    assert losses(run_dir) == pytest.approx(losses(straight), abs=2e-3)  # Muon's bf16 steps, from other roundings
    assert final_weights(run_dir).keys() == final_weights(straight).keys()


def test_a_runs_resolved_recipe_runs_again(straight):
    from training.config import load_recipe

    again = load_recipe(straight / "resolved.yaml")
    assert again.training.run_dir is None
    assert (again.variant, again.depth, again.budget.steps) == ("untied-grow", 3, NUM_STEPS)


def test_a_run_that_never_began_does_not_hold_its_folder(words, run_to_the_end, tmp_path):
    assert pretrain.main(words(tmp_path / "run", **{"budget.micro_batch_size": 5})) == 2
    run_to_the_end(words(tmp_path / "run"))


def test_two_trainings_do_not_share_a_folder(words, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        assert pretrain.main(words(tmp_path / "run")) == 2
    assert "Another process trains in" in capsys.readouterr().err


def test_dropout_is_the_same_after_a_resume(words, run_to_the_end, tmp_path, monkeypatch):
    # B75: the draws of steps n + 1 .. are those of the unbroken run
    dropout = {"model.overrides.attention_dropout": 0.2}
    unbroken = run_to_the_end(words(tmp_path / "unbroken", **dropout))
    command = words(tmp_path / "run", **dropout)
    original = pretrain.Trainer.train_step
    monkeypatch.setattr(
        pretrain.Trainer, "train_step", lambda self, stop, logged: original(self, stop or self.step == 4, logged)
    )
    assert pretrain.main(command) == 2
    monkeypatch.undo()
    assert_same_run(run_to_the_end(command), unbroken)


def test_a_results_file_of_something_else_is_refused(words, run_to_the_end, tmp_path, capsys):
    command = words(tmp_path / "run", **{"budget.steps": 4, "training.eval_every_steps": None})
    run_dir = run_to_the_end(command)
    for content in ("{", "[]", "{}"):
        (run_dir / "results.json").write_text(content)
        assert pretrain.main(command) == 2
        assert "remove it, and the run's command writes it again" in capsys.readouterr().err


def test_a_run_folder_loads_for_evaluation(straight):
    from eval.models import load_model

    model, tokenizer, _ = load_model(straight)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in final_weights(straight).items())
    assert model.config.num_loops == 4
    assert len(tokenizer) <= model.config.vocab_size and tokenizer("loop core").input_ids


def test_another_recipe_does_not_continue_a_run(words, straight, capsys):
    assert pretrain.main(words(straight, **{"optimizer.matrix_lr": 0.01})) == 2
    assert "optimizer.matrix_lr was 0.04, now 0.01" in capsys.readouterr().err


def test_a_cut_checkpoint_is_refused_by_name(words, tmp_path, capsys, run_to_the_end):
    command = words(tmp_path / "run")
    run_to_the_end(command)
    (tmp_path / "run" / "results.json").unlink()
    newest = list_checkpoints(tmp_path / "run")[-1] / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert pretrain.main(command) == 2
    assert f"{newest} does not match" in capsys.readouterr().err
