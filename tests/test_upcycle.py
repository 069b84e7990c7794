"""Reading the paper's files: both forms of them, what a LoopedConfig expresses, and every way a file can be wrong."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_looped.upcycle import PAPER_BOUNDARIES, from_paper_checkpoint, paper_config, read_paper_settings

ASSETS = Path(__file__).parent / "assets" / "paper"
SIZES = {"vocab_size": 97, "max_position_embeddings": 32}


@pytest.fixture
def files(tmp_path):
    """Function (change=None, result=None, keep=None) -> (final.pt, result.json) of the tied case, changed.

    `change` edits the checkpoint in place, `result` updates result.json, `keep` names what the checkpoint keeps.
    """

    def make(change=None, result=None, keep=None, name="loop_2_d6"):
        final_pt, result_json = tmp_path / "final.pt", tmp_path / "result.json"
        checkpoint = torch.load(ASSETS / name / "final.pt", weights_only=True)
        if change is not None:
            change(checkpoint)
        if keep is not None:
            checkpoint = {key: checkpoint[key] for key in keep}
        torch.save(checkpoint, final_pt)
        content = json.loads((ASSETS / name / "result.json").read_text()) | (result or {})
        result_json.write_text(json.dumps(content))
        return final_pt, result_json

    return make


def load(final_pt, result_json=None, **keywords):
    return from_paper_checkpoint(final_pt, result_json, **{**SIZES, **keywords})


def logits_of(model, name="loop_2_d6"):
    tensors = load_file(ASSETS / name / "io.safetensors")
    with torch.no_grad():
        return model(tensors["input_ids"]).logits, tensors["logits"]


@pytest.mark.parametrize("name", ["vanilla_d6", "loop_2_d6", "untied_2_d6"])
@pytest.mark.parametrize("keep", [None, ["model", "final_eval_active_core_repetitions"], ["model"]])
def test_settings_come_from_either_file(files, name, keep):
    final_pt, result_json = files(name=name, keep=keep)
    models = [load(final_pt, result_json)]
    if keep is None:
        models.append(load(final_pt))
    for model in models:
        ours, theirs = logits_of(model, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
        assert not model.training and model.dtype == torch.float32
        assert model.config.vocab_size == 97 and model.config.max_position_embeddings == 32


def test_tensors_at_the_top_level(files):
    final_pt, result_json = files()
    torch.save(torch.load(final_pt, weights_only=True)["model"], final_pt)
    ours, theirs = logits_of(load(final_pt, result_json))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_final_repetitions_set_the_passes(files):
    final_pt, result_json = files(
        lambda c: c.update(final_eval_active_core_repetitions=1),
        keep=None,
        result={"final_eval_active_core_repetitions": 1},
    )
    assert load(final_pt, result_json).config.num_loops == 1
    untied = files(
        lambda c: c.update(final_eval_active_core_repetitions=1),
        result={"final_eval_active_core_repetitions": 1},
        name="untied_2_d6",
    )
    config = load(*untied).config
    assert (config.num_loops, config.num_stored_cores) == (1, 2)


def test_settings_by_name(files):
    settings = read_paper_settings(*files())
    assert settings["depth_scale_mode"] == "loop"
    assert settings["recurrence_emb_alpha"] == 0.707106781187
    assert settings["head_dim"] == 16
    assert [settings[f"{part}_layer_count"] for part in ("prelude", "core", "coda")] == [2, 2, 2]


def test_sections_default_to_thirds(files):
    none = {f"{part}_layer_count": None for part in ("prelude", "core", "coda")}
    resolved = {f"resolved_{key}": None for key in none}
    final_pt, result_json = files(lambda c: c["args"].update(none), result=none | resolved)
    config = load(final_pt, result_json).config
    assert (config.num_prelude_blocks, config.num_core_blocks, config.num_coda_blocks) == (2, 2, 2)


def test_config_holds_the_constants(files):
    config = load(*files()).config
    assert config.boundary_operator == "norm_inject" and config.boundary_alpha == 0.707106781187
    assert config.residual_multiplier == 0.25 and config.logit_scale == 1.0
    assert config.initializer_range == 0.02 and config.uniform_init_scale == 0.35
    assert config.round_rope_to_bf16 and config.embedding_norm and config.qk_norm == "after_rope"
    assert config.bos_token_id is None  # 50256 is no token of a vocabulary of 97


@pytest.mark.parametrize(
    ("norm", "alpha", "coda_inject", "operator"),
    [
        ("recurrence_only", 1.0, True, "norm_inject"),
        ("recurrence_only", 1.0, False, "norm_inject_between"),
        ("recurrence_only", 0.0, False, "norm"),
        ("recurrence_only", 0.0, True, "norm"),
        ("none", 1.0, True, "inject"),
        ("none", 0.0, False, "none"),
        ("none", 0, True, "none"),
        ("none", 1.0, False, None),
        ("prelude_and_recurrence", 1.0, True, None),
    ],
)
def test_boundary_operators_by_name(files, norm, alpha, coda_inject, operator):
    settings = {"recurrence_rmsnorm": norm, "recurrence_emb_alpha": alpha, "decoder_inject": coda_inject}
    final_pt, result_json = files(keep=["model"], result=settings)
    if operator is None:
        with pytest.raises(ValueError, match=f"recurrence_rmsnorm='{norm}'.*decoder_inject={coda_inject}"):
            load(final_pt, result_json)
    else:
        config = load(final_pt, result_json).config
        assert config.boundary_operator == operator
        assert alpha == 0 or config.boundary_alpha == alpha
    assert (operator is None) == ((norm, alpha != 0, coda_inject) not in PAPER_BOUNDARIES)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        ({"core_repetitions": 1.5}, "core_repetitions"),
        ({"core_repetitions": 0}, "core_repetitions"),
        ({"final_eval_active_core_repetitions": 2.5}, "final_eval_active_core_repetitions"),
        ({"depth_scale_mode": "spiral"}, "depth_scale_mode.*spiral"),
        ({"core_residual_branch_scale": 0.5}, "core_residual_branch_scale"),
        ({"window_pattern": "SSSL"}, "window_pattern"),
        ({"prelude_layer_count": 3}, "prelude_layer_count 3.*n_layer 6"),
        ({"n_layer": "six"}, "n_layer.*'six'"),
        ({"n_head": 0}, "n_head"),
        ({"recurrence_emb_alpha": "large"}, "recurrence_emb_alpha"),
        ({"n_embd": 64}, "expected .*64"),
        ({"n_layer": 9, "core_layer_count": 5}, "lacks transformer.h.6.*and 19 more"),
        ({"n_layer": 5, "coda_layer_count": 1}, "unknown transformer.h.5"),
    ],
)
def test_settings_that_cannot_be_expressed_are_named(files, result, named):
    final_pt, result_json = files(keep=["model"], result=result)
    with pytest.raises(ValueError, match=named):
        load(final_pt, result_json)


def test_missing_settings_are_named(files):
    final_pt, result_json = files(keep=["model"])
    with pytest.raises(ValueError, match="depth_scale_mode.*residual_branch_multiplier.*result.json"):
        load(final_pt)
    content = json.loads(result_json.read_text())
    del content["output_multiplier"], content["decoder_inject"]
    result_json.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="settings missing: output_multiplier, decoder_inject"):
        load(final_pt, result_json)


def test_files_of_two_runs_are_refused(files):
    final_pt, result_json = files(result={"residual_branch_multiplier": 0.5})
    with pytest.raises(ValueError, match="residual_branch_multiplier.* 0.25 .* 0.5"):
        load(final_pt, result_json)


@pytest.mark.parametrize("vocab_size", [50257, 64, 96 - 33, 129, 12])
def test_vocabulary_that_does_not_fit(files, vocab_size):
    with pytest.raises(ValueError, match=f"transformer.wte.weight.*vocab_size={vocab_size}"):
        load(*files(), vocab_size=vocab_size)


def test_pad_rows_may_be_kept(files):
    model = load(*files(), vocab_size=128)
    assert model.lm_head.weight.shape == (128, 32)
    ours, theirs = logits_of(model)
    torch.testing.assert_close(ours[..., :97], theirs, rtol=0, atol=2e-5)


def test_damaged_and_foreign_files(files, tmp_path):
    final_pt, result_json = files()
    whole = final_pt.read_bytes()
    for keep in (len(whole) - 100, len(whole) // 2, 5000, 1000, 10, 0):
        final_pt.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match="final.pt cannot be read"):
            load(final_pt, result_json)
    final_pt.write_text("<html>404 Not Found</html>")
    with pytest.raises(ValueError, match="final.pt cannot be read"):
        load(final_pt, result_json)
    for content in ([1, 2], {"model": {"weight": torch.ones(2)}}, {"model": torch.ones(2)}, {"model": {}, "args": 3}):
        torch.save(content, final_pt)
        with pytest.raises(ValueError, match="final.pt is not a checkpoint of the paper's training"):
            load(final_pt, result_json)
    with pytest.raises(FileNotFoundError, match="absent.pt"):
        load(tmp_path / "absent.pt")
    final_pt.write_bytes(whole)
    with pytest.raises(FileNotFoundError, match="absent.json"):
        load(final_pt, tmp_path / "absent.json")
    for text in ('{"n_layer": 6', "[1]"):
        result_json.write_text(text)
        with pytest.raises(ValueError, match="result.json"):
            load(final_pt, result_json)


@pytest.mark.parametrize("protocol", ["zip", "legacy"])
def test_code_in_a_file_is_not_run(files, tmp_path, protocol):
    witness = tmp_path / "witness"

    class Bomb:
        def __reduce__(self):
            return Path.touch, (witness,)

    final_pt, result_json = files()
    torch.save({"model": Bomb()}, final_pt, _use_new_zipfile_serialization=protocol == "zip")
    with pytest.raises(ValueError, match="final.pt cannot be read"):
        load(final_pt, result_json)
    assert not witness.exists()
    assert pickle.loads(pickle.dumps(Bomb())) is None and witness.exists()  # it would have


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model.pop("transformer.h.3.mlp.c_fc.weight"), "lacks transformer.h.3.mlp.c_fc.weight"),
        (
            lambda model: model.update({"transformer.h.0.attn.bias": torch.ones(2)}),
            "unknown transformer.h.0.attn.bias",
        ),
        (
            lambda model: model.update({"transformer.h.1.attn.c_v.weight": torch.ones(32, 16)}),
            r"c_v.weight has shape \(32, 16\), expected \(32, 32\)",
        ),
        (lambda model: model.update({"lm_head.weight": torch.tensor(1.0)}), "lm_head.weight has shape"),
        (lambda model: model.update({"transformer.h.0.mlp.c_gate.weight": torch.tensor(1.0)}), "c_gate.weight"),
    ],
)
def test_tensors_that_do_not_fit(files, change, named):
    with pytest.raises(ValueError, match=named):
        load(*files(lambda checkpoint: change(checkpoint["model"])))


def test_mixed_dtypes_become_fp32(files):
    def change(checkpoint):
        checkpoint["model"]["transformer.wte.weight"] = checkpoint["model"]["transformer.wte.weight"].bfloat16()

    model = load(*files(change))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ours, theirs = logits_of(model)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)


def test_model_stands_alone_after_loading(files):
    final_pt, result_json = files()
    generator = torch.get_rng_state()
    model = load(final_pt, result_json)
    assert torch.equal(torch.get_rng_state(), generator)
    before = logits_of(model)[0]
    with final_pt.open("r+b") as file:
        file.write(b"\xff" * final_pt.stat().st_size)
    assert torch.equal(logits_of(model)[0], before)
    parameters = list(model.parameters())
    assert all(parameter.requires_grad and parameter.is_contiguous() for parameter in parameters)
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == len(parameters)
    assert sum(p.untyped_storage().nbytes() for p in parameters) == 4 * model.num_parameters()


MEASURE = """
import re, sys
from pathlib import Path
from modeling_looped.upcycle import from_paper_checkpoint

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

small, large = (Path(folder) for folder in sys.argv[1:])
# The first call brings imports and allocations of its own
from_paper_checkpoint(small / "final.pt", small / "result.json", vocab_size=97)
before = peak()
model = from_paper_checkpoint(large / "final.pt", large / "result.json")
print((peak() - before) / (4 * model.num_parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of resident memory from /proc")
def test_memory_of_one_copy(tmp_path):
    """Peak resident memory of a conversion, in copies of the weights (250 MB)."""
    tensors = torch.load(ASSETS / "loop_2_d6" / "final.pt", weights_only=True)["model"]
    content = json.loads((ASSETS / "loop_2_d6" / "result.json").read_text())
    width, inner = 256, 8192
    shapes = {"wte": (50304, width), "lm_head": (50304, width), "c_gate": (inner, width), "c_fc": (inner, width)}
    for name in tensors:
        shape = shapes.get(name.split(".")[-2], (width, inner if ".mlp." in name else width))
        tensors[name] = torch.zeros(shape)
    torch.save({"model": tensors}, tmp_path / "final.pt")
    content |= {"n_embd": width, "head_dim": width // content["n_head"]}
    (tmp_path / "result.json").write_text(json.dumps(content))
    command = [sys.executable, "-c", MEASURE, str(ASSETS / "loop_2_d6"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    (tmp_path / "final.pt").unlink()
    assert 0.8 < float(run.stdout) < 1.5


def test_paper_config_needs_no_tensors():
    settings = read_paper_settings(ASSETS / "untied_2_d6" / "final.pt")
    checkpoint = torch.load(ASSETS / "untied_2_d6" / "final.pt", weights_only=True, mmap=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint["model"].items()}
    config = paper_config(settings, shapes, 97, 32, source="final.pt")
    assert config.schedule() == [0, 1, 2, 3, 4, 5, 6, 7] and config.num_stored_cores == 2
