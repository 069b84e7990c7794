"""The command `looped` as users type it: what it prints, what it writes, and that every error is one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from modeling_looped import LoopedForCausalLM, cli, convert
from modeling_looped.variants import VARIANTS

ASSETS = Path(__file__).parent / "assets" / "paper"


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of one call in this process."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stopped:  # argparse
        status = stopped.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def assert_error(outcome, *parts):
    status, out, err = outcome
    assert status == 2 and out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("looped"), err
    for part in parts:
        assert part in err


@pytest.fixture
def tokenizer_dir(tmp_path):
    """A tokenizer of 97 tokens, as many as the models of the assets have."""
    words = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, 97)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="w1"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def converted(capsys, tmp_path, tokenizer_dir):
    """Function (name="loop_2_d6") -> folder made by `looped convert`."""

    def make(name="loop_2_d6"):
        output = tmp_path / "exports" / name
        outcome = run(capsys, "convert", ASSETS / name, "--output", output, "--tokenizer", tokenizer_dir)
        assert outcome[0] == 0, outcome[2]
        return output

    return make


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        # Counts that the paper states, with padded rows
        (["operator-1", "--depth", "8"], ["205,783,040", "8 stored"]),
        (["vanilla", "--depth", "12"], ["494,272,512"]),
        (["vanilla", "--depth", "10"], ["331,939,840"]),
        (["deep-vanilla", "--depth", "10"], ["413,204,480", "14 stored"]),
        (["untied-grow", "--depth", "6", "--num-loops", "4"], ["162,201,600", "12 stored"]),
        (["untied-grow", "--depth", "26", "--num-loops", "4"], ["7,424,049,152", "53 stored", "from 2 to 4 passes"]),
        (["loop-2", "--depth", "12", "--num-loops", "8"], ["494,272,512", "40 executed (4 + 8 x 4 + 4)"]),
    ],
)
def test_info_of_variants(capsys, arguments, counts):
    status, out, err = run(capsys, "info", *arguments)
    assert status == 0 and err == ""
    for count in counts:
        assert count in out


def test_info_length_and_dtype(capsys):
    _, at_2048, _ = run(capsys, "info", "vanilla", "--depth", "6")
    _, at_512, _ = run(capsys, "info", "vanilla", "--depth", "6", "--length", "512", "--dtype", "float32")

    def row(text, name):
        return next(line for line in text.splitlines() if line.startswith(name)).split()

    # 6 blocks x 6 x 768 x (T + 1), and 2 tensors x 6 blocks x 768 values x bytes
    assert row(at_2048, "attention")[3] == f"{6 * 6 * 768 * 2049:,}"
    assert row(at_512, "attention")[3] == f"{6 * 6 * 768 * 513:,}"
    assert row(at_2048, "cache")[1] == f"{2 * 6 * 768 * 2:,}"
    assert row(at_512, "cache")[1] == f"{2 * 6 * 768 * 4:,}"


def test_info_of_a_folder(capsys, tmp_path, tiny_config, make_model):
    make_model(tiny_config(num_loops=4)).save_pretrained(tmp_path / "model")
    status, out, _ = run(capsys, "info", tmp_path / "model", "--num-loops", "2", "--length", "8")
    assert status == 0 and "6 executed (1 + 2 x 2 + 1)" in out
    untied = make_model(tiny_config(num_loops=2, tie_core=False))
    untied.save_pretrained(tmp_path / "untied")
    status, out, _ = run(capsys, "info", tmp_path / "untied")
    assert f"{untied.num_parameters():,}" in out
    assert_error(run(capsys, "info", tmp_path / "untied", "--num-loops", "3"), "stores 2 cores")


def test_info_errors(capsys, tmp_path):
    (tmp_path / "other").mkdir()
    assert_error(run(capsys, "info", tmp_path / "other"), "no config.json")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    assert_error(run(capsys, "info", tmp_path / "other"), "'llama'", "'looped'")
    (tmp_path / "other" / "config.json").write_text("{")
    assert_error(run(capsys, "info", tmp_path / "other"), "config.json")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "looped", "num_loops": 0}')
    assert_error(run(capsys, "info", tmp_path / "other"), "`num_loops` must be an integer of at least 1, got 0")
    assert_error(run(capsys, "info", tmp_path / "other", "--depth", "6"), "--depth")
    assert_error(run(capsys, "info", tmp_path / "missing"), "no folder")
    assert_error(run(capsys, "info", "untied-gro", "--depth", "6"), "untied-grow")
    assert_error(run(capsys, "info", "vanilla"), "--depth")
    assert_error(run(capsys, "info", "vanilla", "--depth", "2"), "depth")
    assert_error(run(capsys, "info", "vanilla", "--depth", "six"), "--depth")
    assert_error(run(capsys, "info", "loop-2", "--depth", "6", "--num-loops", "0"), "num_loops")
    assert_error(run(capsys, "info", "vanilla", "--depth", "6", "--length", "0"), "sequence_length")
    assert_error(run(capsys, "info", "vanilla", "--depth", "6", "--dtype", "int3"), "bfloat16")
    assert_error(run(capsys, "inform"), "info")
    assert_error(run(capsys), "COMMAND")


def test_every_variant_has_info(capsys):
    for name in VARIANTS:
        status, out, _ = run(capsys, "info", name, "--depth", "6")
        assert status == 0 and out.startswith(name)


FRESH_PROCESS = """
import sys
sys.modules["modeling_looped"] = None  # the folders must do without the installed package
from pathlib import Path
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

exports, assets = Path(sys.argv[1]), Path(sys.argv[2])
for folder in exports.iterdir():
    tensors = load_file(assets / folder.name / "io.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.num_hidden_layers == model.config.num_hidden_layers
    base = AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        output = model(tensors["input_ids"], labels=tensors["input_ids"], shift_labels=tensors["targets"])
        assert torch.equal(model.lm_head(base(tensors["input_ids"])[0]) * model.config.logit_scale, output.logits)
    torch.testing.assert_close(output.logits, tensors["logits"], rtol=0, atol=2e-5)
    torch.testing.assert_close(output.loss, tensors["loss"], rtol=0, atol=2e-5)
    inputs = tokenizer(tokenizer.bos_token + " w3 w4", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape[1] <= 7 and model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    print(folder.name)
"""


def test_converted_folders_load_in_a_fresh_process(converted, tmp_path):
    names = ["vanilla_d6", "loop_2_d6", "untied_2_d6"]
    exports = [converted(name) for name in names][0].parent
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    command = [sys.executable, "-c", FRESH_PROCESS, str(exports), str(ASSETS)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert sorted(result.stdout.split()) == sorted(names), result.stderr


def test_converted_folder_is_complete(converted, tmp_path):
    folder = converted()
    files = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"} <= files
    assert {"configuration_looped.py", "boundary.py", "modeling_looped.py"} <= files
    config = json.loads((folder / "config.json").read_text())
    assert set(config["auto_map"]) >= {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert all("--" not in target for target in config["auto_map"].values())
    assert config["vocab_size"] == 97 and config["eos_token_id"] == 0
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 2048
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == set(LoopedForCausalLM.from_pretrained(folder).state_dict())
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half-written is left

    result = json.loads((ASSETS / "loop_2_d6" / "result.json").read_text())
    card = (folder / "README.md").read_text()
    for value in (f"{result['best_val_loss']:.6g}", f"{result['best_val_bpb']:.6g}", f"{result['parameter_count']:,}"):
        assert value in card
    assert "base_model" not in card and "passes before growth" not in card


def test_convert_from_the_hub_takes_three_files_and_names_the_commit(capsys, monkeypatch, tmp_path, tokenizer_dir):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "snapshots" / commit
    snapshot.parent.mkdir()
    snapshot.symlink_to(ASSETS / "untied_2_d6", target_is_directory=True)
    asked = []

    def snapshot_download(repository, **keywords):
        asked.append((repository, keywords))
        return str(snapshot)

    monkeypatch.setattr(convert, "snapshot_download", snapshot_download)
    output = tmp_path / "out"
    arguments = ["convert", "someone/loop-untied", "--revision", "v1", "--output", output]
    assert run(capsys, *arguments, "--tokenizer", tokenizer_dir)[0] == 0
    patterns = ["final.pt", "result.json", "README.md"]
    assert asked == [("someone/loop-untied", {"revision": "v1", "allow_patterns": patterns})]
    card = (output / "README.md").read_text()
    assert "base_model: someone/loop-untied" in card and f"commit `{commit}`" in card


def test_convert_refuses_and_writes_nothing(capsys, tmp_path, tokenizer_dir, monkeypatch):
    output = tmp_path / "exports" / "out"
    tokenizer = ["--tokenizer", tokenizer_dir]
    source = ASSETS / "loop_2_d6"
    assert_error(run(capsys, "convert", source), "--output")
    assert_error(run(capsys, "convert", "someone/absent", "--output", output, *tokenizer), "someone/absent")
    assert_error(run(capsys, "convert", source / "final.pt", "--output", output, *tokenizer), "folder that holds")
    assert_error(run(capsys, "convert", source, "--revision", "x", "--output", output, *tokenizer), "--revision")
    assert_error(run(capsys, "convert", tokenizer_dir, "--output", output, *tokenizer), "final.pt")
    monkeypatch.setattr(convert, "DEFAULT_TOKENIZER", "someone/absent-tokenizer")
    assert_error(
        run(capsys, "convert", source, "--output", output, "--tokenizer", "someone/absent-tokenizer"),
        "someone/absent-tokenizer",
        "pass --tokenizer",
    )
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "final.pt").write_bytes((source / "final.pt").read_bytes()[:5000])
    assert_error(run(capsys, "convert", damaged, "--output", output, *tokenizer), "damaged/final.pt cannot be read")
    assert not output.parent.exists()


def test_convert_and_an_existing_output(capsys, tmp_path, tokenizer_dir, converted):
    folder = converted()
    source = ["convert", ASSETS / "untied_2_d6", "--tokenizer", tokenizer_dir, "--output"]
    before = (folder / "config.json").read_text()
    assert_error(run(capsys, *source, folder), "exists already", "--overwrite")
    assert (folder / "config.json").read_text() == before

    (folder / "stale.txt").write_text("of the model before")
    assert run(capsys, *source, folder, "--overwrite")[0] == 0
    assert json.loads((folder / "config.json").read_text())["tie_core"] is False
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    assert_error(run(capsys, *source, precious, "--overwrite"), "no model folder")
    assert (precious / "thesis.txt").read_text() == "years"
    (precious / "thesis.txt").unlink()
    assert run(capsys, *source, precious, "--overwrite")[0] == 0  # an empty folder may be filled


def test_convert_does_not_replace_its_source(capsys, tmp_path, tokenizer_dir):
    source = tmp_path / "run"
    source.mkdir()
    for name in ("final.pt", "result.json"):
        (source / name).write_bytes((ASSETS / "loop_2_d6" / name).read_bytes())
    (source / "config.json").write_text("{}")
    for output in (source, source / ".." / "run"):
        arguments = ["convert", source, "--output", output, "--overwrite", "--tokenizer", tokenizer_dir]
        assert_error(run(capsys, *arguments), "would replace the source")
    assert (source / "final.pt").is_file()


def test_failed_save_leaves_the_old_folder(capsys, monkeypatch, tokenizer_dir, converted):
    folder = converted()
    before = sorted(path.name for path in folder.iterdir())

    def save_pretrained(self, path, **keywords):
        (Path(path) / "half").write_text("")
        raise OSError("No space left on device")

    monkeypatch.setattr(LoopedForCausalLM, "save_pretrained", save_pretrained)
    arguments = ["convert", ASSETS / "loop_2_d6", "--output", folder, "--overwrite", "--tokenizer", tokenizer_dir]
    assert_error(run(capsys, *arguments), "No space left")
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_laws_gets_the_rest_of_the_line(capsys, monkeypatch):
    seen = []

    class Laws:
        main = staticmethod(lambda argv: seen.append(argv))

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Laws)
    assert run(capsys, "laws", "fit", "--help", "-x")[0] == 0
    assert seen == [["fit", "--help", "-x"]]


def test_laws_without_its_packages(capsys, monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(cli.importlib, "import_module", import_module)
    assert_error(run(capsys, "laws", "fit"), "scipy", "modeling-looped[laws]")


def test_exit_status_of_the_process():
    """In a process of its own: one line on stderr, no traceback."""
    command = [sys.executable, "-m", "modeling_looped.cli", "info", "vanila", "--depth", "6"]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 2 and outcome.stdout == ""
    assert "vanilla" in outcome.stderr and len(outcome.stderr.splitlines()) == 1


def test_stored_counts_are_those_of_the_weights(converted):
    folder = converted("untied_2_d6")
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    model = LoopedForCausalLM.from_pretrained(folder)
    assert stored == model.num_parameters()
    assert model.dtype == torch.float32
