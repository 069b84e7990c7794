"""An export loads anywhere, says only what the run measured, and never replaces something by mistake."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from training import compare, export
from training.engine.checkpoint import list_checkpoints, load_checkpoint


@pytest.fixture(scope="module")
def exported(straight, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "model"
    # main also loads it in a process without this package and compares the logits
    assert export.main([str(straight), f"out={out}", 'prompt="loop core"', "new_tokens=5"]) == 0
    return out


def test_the_export_is_the_checkpoint(straight, exported):
    _, weights, _, _ = load_checkpoint(list_checkpoints(straight)[-1])
    written = load_file(exported / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weight) for name, weight in weights.items())
    names = {path.name for path in exported.iterdir()}
    modules = ("configuration_looped", "boundary", "linear_cross_entropy", "rms_norm", "modeling_looped")
    code = {f"{name}.py" for name in modules}
    assert code | {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= names
    assert {"results.json", "resolved.yaml"} <= names
    config = json.loads((exported / "config.json").read_text())
    assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} <= config["auto_map"].keys()
    assert config["num_loops"] == 4 and config["num_stored_cores"] == 4


def test_every_number_of_the_card_stands_in_the_results(exported):
    card = (exported / "README.md").read_text()
    results = json.loads((exported / "results.json").read_text())
    table = [line for line in card.splitlines() if line.startswith("| ") and " | " in line]
    assert len(table) >= 9
    known = set()
    for value in [*results.values(), *(value for growth in results["growths"] for value in growth.values())]:
        if isinstance(value, int | float):
            known |= {f"{value:,}", f"{value:.4f}", f"{value:.4g}", f"{value:.0f}", str(value)}
    for line in table:
        for number in re.findall(r"(?<![\w-])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?", line):
            assert number in known, f"{number} in {line!r} is not in results.json"
    assert "{{" not in card


def test_a_checkpoint_before_the_end_gets_no_results(straight, tmp_path):
    checkpoint = list_checkpoints(straight)[0]
    assert export.main([str(checkpoint), f"out={tmp_path / 'early'}", "dtype=bf16", "new_tokens=2"]) == 0
    assert not (tmp_path / "early" / "results.json").exists()
    assert "validation loss" not in (tmp_path / "early" / "README.md").read_text()
    assert load_file(tmp_path / "early" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_wrong_calls_are_refused_and_lose_nothing(straight, exported, tmp_path, capsys):
    before = sorted(path.name for path in exported.iterdir())
    for arguments, message in [
        ([str(straight), f"out={exported}"], "exists already"),
        ([str(straight), f"out={tmp_path / 'x'}", "dtyp=bf16"], "dtyp is no option"),
        ([str(straight), f"out={tmp_path / 'x'}", "dtype=int4"], "dtype='int4' must be one of"),
        ([str(tmp_path / "nothing"), f"out={tmp_path / 'x'}"], "holds no checkpoint"),
    ]:
        assert export.main(arguments) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in exported.iterdir()) == before
    assert not (tmp_path / "x").exists()


def test_an_export_that_does_not_load_is_not_left_behind(straight, tmp_path, capsys):
    broken = tmp_path / "run"
    shutil.copytree(straight, broken)
    (broken / "tokenizer" / "tokenizer.json").unlink()
    assert export.main([str(broken), f"out={tmp_path / 'out'}"]) == 2
    assert "export: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out-*"))


def test_runs_are_compared_by_their_own_numbers(words, straight, run_to_the_end, tmp_path, capsys):
    vanilla = run_to_the_end(words(tmp_path / "vanilla", recipe="demo-vanilla"))
    assert compare.main([str(vanilla), str(straight), f"out={tmp_path / 'plot.png'}"]) == 0
    table = capsys.readouterr().out
    for run_dir in (vanilla, straight):
        results = json.loads((run_dir / "results.json").read_text())
        assert f"{results['validation_loss']:.4f}" in table
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert compare.main([str(tmp_path / "nowhere")]) == 2
    assert "results.json is missing" in capsys.readouterr().err
