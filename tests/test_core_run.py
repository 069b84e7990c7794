"""Whole evaluations: resume, partial and failed runs, processes, the commands, results files, table and chart."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eval import core as core_module
from eval.bundle import open_data
from eval.chart import draw_chart, load_comparison
from eval.core import evaluate_model
from eval.loops import evaluate_loops
from eval.loops import main as loops_main
from eval.models import resolve_model
from eval.report import RunProgress, results_table
from eval.results import PartialResults, check_results, read_results, write_results
from eval.tasks import load_task_set
from modeling_looped import LoopedConfig, LoopedForCausalLM
from tests.core_helpers import VOCAB_SIZE, make_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
VOLATILE = ("timing", "environment")


def stable(results):
    return {key: value for key, value in results.items() if key not in VOLATILE}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LoopedConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_prelude_blocks=1,
        num_core_blocks=1,
        num_coda_blocks=1,
        num_loops=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
    )
    return LoopedForCausalLM(config).eval()


@pytest.fixture(scope="module")
def saved_model(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def evaluate(model, **arguments):
    return evaluate_model(
        model, make_tokenizer(), **{"task_set": "tiny", "max_per_task": 6, "progress": False, **arguments}
    )


def test_results_follow_the_schema_and_survive_the_file(model, tmp_path):
    results = evaluate(model, compat="paper", keep_examples=True)
    check_results(results)
    write_results(results, tmp_path / "deep" / "results.json")
    assert read_results(tmp_path / "deep" / "results.json") == json.loads(json.dumps(results))
    assert results["settings"]["seeds"] == [0, 1, 2] and results["aggregate"]["status"] == "complete"
    # few-shot tasks once a seed, zero-shot tasks once
    assert len(results["examples"]["kinds"]) == 18 and len(results["examples"]["opposites"]) == 6
    for name, task in results["tasks"].items():
        per_seed = {str(seed): [] for seed in (0, 1, 2)}
        for example in results["examples"][name]:
            seeds = per_seed if task["num_fewshot"] == 0 else [str(example["seed"])]
            for seed in seeds:
                per_seed[seed].append(example["correct"])
        accuracies = {seed: sum(found) / len(found) for seed, found in per_seed.items()}
        assert task["accuracy_per_seed"] == accuracies
        assert task["accuracy"] == pytest.approx(sum(accuracies.values()) / 3)
    centered = [task["centered"] for task in results["tasks"].values()]
    assert results["aggregate"]["value"] == pytest.approx(sum(centered) / len(centered))
    assert results["aggregate"]["answer_nll"] is not None


def test_schema_refuses_what_it_does_not_know(model, tmp_path):
    results = evaluate(model, tasks=["who"])
    with pytest.raises(ValueError, match="unknown keys .'extra'"):
        check_results({**results, "extra": 1})
    with pytest.raises(ValueError, match=r"results.settings.compat: expected str, got 3"):
        check_results({**results, "settings": {**results["settings"], "compat": 3}})
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="x.json is not a results file"):
        read_results(tmp_path / "x.json")


def test_plain_path_gives_the_same_results(model):
    fast, plain = (evaluate(model, path=path, keep_examples=True) for path in ("fast", "plain"))
    for name, task in fast["tasks"].items():
        assert task["accuracy"] == plain["tasks"][name]["accuracy"]
        predictions = [[e["prediction"] for e in r["examples"][name]] for r in (fast, plain)]
        assert predictions[0] == predictions[1]
    assert fast["timing"]["num_executed_tokens"] < plain["timing"]["num_executed_tokens"]


def test_num_loops_reaches_the_model(model):
    own, other = evaluate(model, keep_examples=True), evaluate(model, num_loops=4, keep_examples=True)
    assert (own["model"]["num_loops"], other["model"]["num_loops"]) == (2, 4)
    assert own["examples"]["who"][0]["span_loss"] != other["examples"]["who"][0]["span_loss"]
    assert stable(evaluate(model, num_loops=2)) == stable(evaluate(model))


def test_training_mode_is_given_back(model):
    model.train()
    try:
        evaluate(model, tasks=["who"])
        assert model.training
    finally:
        model.eval()


def test_partial_run_has_no_aggregate(model):
    results = evaluate(model, tasks=["who", "kinds"])
    assert results["aggregate"]["status"] == "partial" and results["aggregate"]["value"] is None
    assert list(results["tasks"]) == ["kinds", "who"]
    table = results_table(results)
    assert "no mean centered accuracy" in table and "(partial)" in table and "opposites" in table.splitlines()[-1]


def test_failed_task_refuses_the_aggregate_by_name(model, tmp_path, monkeypatch):
    tiny = load_task_set("tiny")
    read = open_data(tiny)

    def broken(file):
        if file == "kinds.jsonl":
            return read(file).replace(b'"gold"', b'"golden"', 1)
        if file == "copying.jsonl":
            raise FileNotFoundError(f"no {file}")
        return read(file)

    monkeypatch.setattr(core_module, "open_data", lambda task_set, bundle: broken)
    results = evaluate(model)
    check_results(results)
    aggregate = results["aggregate"]
    assert aggregate["status"] == "failed" and aggregate["value"] is None
    assert "kinds.jsonl line 1" in aggregate["reason"] and "copying" in aggregate["reason"]
    assert results["tasks"]["kinds"]["accuracy"] is None and results["tasks"]["who"]["accuracy"] is not None
    assert "failed: task kinds" in results_table(results)


def test_broken_model_fails_its_tasks(model):
    weight = model.lm_head.weight
    kept = weight.data.clone()
    weight.data[:] = float("nan")
    try:
        results = evaluate(model)
    finally:
        weight.data.copy_(kept)
    assert results["aggregate"]["status"] == "failed" and "losses are not finite" in results["aggregate"]["reason"]


def test_continuation_longer_than_the_context_fails_the_task(model):
    results = evaluate(model, context_length=4)
    assert "does not fit a context length of 4" in results["aggregate"]["reason"]


@pytest.mark.parametrize(
    "argument, words",
    [
        ({"compat": "nanochats"}, "compat must be one of nanochat, paper"),
        ({"empty_span": "second"}, "empty_span must be one of first, finite"),
        ({"version": "v3"}, "version must be one of v1, v2"),
        ({"seeds": [1, 1]}, "seeds must be distinct"),
        ({"max_per_task": 0}, "max_per_task must be at least 1"),
        ({"tasks": ["whom"]}, "Did you mean 'who'"),
        ({"bos_token": "<nope>"}, "no token '<nope>'"),
        ({"bundle": "x.zip"}, "leave the bundle out"),
        ({"num_loops": 0}, "`num_loops` must be an integer of at least 1"),
    ],
)
def test_arguments_are_checked(model, argument, words):
    with pytest.raises(ValueError, match=words):
        evaluate(model, **argument)


def test_interrupted_run_ends_with_the_same_results(model, tmp_path, monkeypatch):
    arguments = {"partial_folder": tmp_path / "partial", "tokens_per_batch": 300, "keep_examples": True}
    expected = evaluate(model, **{**arguments, "partial_folder": None})
    score, calls = core_module.score_batch, []

    def breaks_at_the_fourth(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(*args, **kwargs)

    monkeypatch.setattr(core_module, "score_batch", breaks_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, **arguments)
    monkeypatch.setattr(core_module, "score_batch", score)
    # a kill may leave half a line
    with open(tmp_path / "partial" / "outcomes-0.jsonl", "a") as f:
        f.write("[[3, true, 0, [1.")
    resumed = evaluate(model, **arguments)
    assert stable(resumed) == stable(expected)
    assert 0 < resumed["timing"]["num_resumed_examples"] < 36
    again = evaluate(model, **arguments)
    assert stable(again) == stable(expected) and again["timing"]["num_resumed_examples"] == 36


def test_partial_results_of_another_evaluation_are_refused(model, tmp_path):
    evaluate(model, partial_folder=tmp_path / "partial")
    with pytest.raises(ValueError, match="another evaluation .settings.*max_per_task.*Delete the folder"):
        evaluate(model, partial_folder=tmp_path / "partial", max_per_task=5)
    PartialResults.delete_folder(tmp_path / "partial")
    assert not (tmp_path / "partial").exists()


def command(*arguments, **environment):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=REPOSITORY, env=variables, capture_output=True, text=True
    )


def test_command_line_resumes_after_a_kill(saved_model, tmp_path):
    output = tmp_path / "core.json"
    words = ["-m", "eval.core", saved_model, "--task-set", "tiny", "--output", output]
    words += ["--max-per-task", 12, "--tokens-per-batch", 60]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=REPOSITORY, env=variables, stderr=subprocess.PIPE
    )
    partial = tmp_path / "core.json.partial" / "outcomes-0.jsonl"
    while process.poll() is None and not (partial.exists() and partial.stat().st_size > 1000):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert partial.exists() and not output.exists()
    done = command(*words, "--chart", tmp_path / "chart.png", "--against", "gpt2", "gpt3-13b")
    assert done.returncode == 0, done.stderr
    assert "mean centered accuracy of the tiny tasks (v1, nanochat rules, 12 examples per task)" in done.stdout
    results = read_results(output)
    assert results["timing"]["num_resumed_examples"] > 0 and not partial.parent.exists()
    assert (tmp_path / "chart.png").stat().st_size > 1000

    output.unlink()
    straight = command(*words)
    assert straight.returncode == 0, straight.stderr
    assert stable(read_results(output)) == stable(results)


def test_two_processes_give_exactly_the_same(saved_model, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    words = ["-m", "eval.core", saved_model, "--task-set", "tiny", "--max-per-task", 20, "--examples"]
    words += ["--tokens-per-batch", 500, "--output"]
    two = command(*launch, *words, tmp_path / "two.json")
    assert two.returncode == 0, two.stderr
    one = command(*words, tmp_path / "one.json")
    assert one.returncode == 0, one.stderr
    found = [read_results(tmp_path / name) for name in ("one.json", "two.json")]
    assert [results["environment"]["num_processes"] for results in found] == [1, 2]
    assert stable(found[0]) == stable(found[1])


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--task-set", "tine"], "error: No task set 'tine'"),
        (["--bundle", "none.zip"], "error: No CORE bundle at"),
        (["--task-set", "tiny", "--tokenizer", "nowhere"], "error: No tokenizer in"),
        (["--task-set", "tiny", "--num-loops", "0"], "error: `num_loops` must be"),
    ],
)
def test_command_line_errors_are_one_line(saved_model, tmp_path, capsys, words, expected):
    assert core_module.main([str(saved_model), *words, "--output", str(tmp_path / "x.json")]) == 1
    assert any(line.startswith(expected) for line in capsys.readouterr().err.splitlines())
    assert not (tmp_path / "x.json").exists()


def test_run_folder_means_its_newest_model(tmp_path):
    for step in ("step-9", "step-100", "step-20"):
        (tmp_path / "checkpoints" / step / "model").mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "model" / "config.json").write_text("{}")
    assert Path(resolve_model(tmp_path)).parts[-2:] == ("step-100", "model")
    assert resolve_model("org/name") == "org/name"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no model"):
        resolve_model(tmp_path / "empty")


def test_loops_are_separate_evaluations(model):
    found = evaluate_loops(model, make_tokenizer(), [1, 2], task_set="tiny", max_per_task=4, progress=False)
    assert stable(found[2]) == stable(evaluate(model, max_per_task=4, num_loops=2))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        evaluate_loops(model, make_tokenizer(), [1, 0])


def test_loops_command_on_tasks_and_text(saved_model, tmp_path, capsys):
    words = [str(saved_model), "--num-loops", "1", "3"]
    files = ["--output", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert loops_main([*words, "--task-set", "tiny", "--max-per-task", "3", *files]) == 0
    assert list(json.loads((tmp_path / "a.json").read_text())["by_num_loops"]) == ["1", "3"]
    assert (tmp_path / "a.png").exists()
    (tmp_path / "text.txt").write_text("Say it again. " * 40)
    assert loops_main([*words, "--text", str(tmp_path / "text.txt"), "--window", "100"]) == 0
    assert len(re.findall(r"num_loops \d: \d+\.\d+ nats", capsys.readouterr().out)) == 2


def test_chart_and_comparisons(model, tmp_path):
    results = evaluate(model)
    write_results(results, tmp_path / "other.json")
    draw_chart(results, [str(tmp_path / "other.json")], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    label, centered, value = load_comparison("gpt2", "v1")
    assert label == "gpt2" and len(centered) == 22
    assert value == pytest.approx(0.113891) and value == pytest.approx(sum(centered.values()) / 22, abs=1e-6)
    assert load_comparison("gpt2", "v2")[2] < value
    assert load_comparison("gpt3-13b", "v1")[2] == 0.385
    with pytest.raises(ValueError, match="known in version v1 only"):
        load_comparison("gpt3-13b", "v2")
    with pytest.raises(ValueError, match="gpt2-xl"):
        load_comparison("gpt5", "v1")


def test_time_left_is_up_to_the_tasks_last_batch(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = RunProgress([100, 300, 100], [{"a": 2}, {"a": 1, "b": 1}, {"b": 1}], enabled=False)
    clock[0] = 10.0
    progress.advance()
    assert progress.seconds_left("a") == pytest.approx(30.0) and progress.seconds_left("b") == pytest.approx(40.0)
    clock[0] = 40.0
    progress.advance()
    assert progress.seconds_left("a") == 0.0 and progress.seconds_left("b") == pytest.approx(10.0)
