"""Converted checkpoints against the tensors that the paper's own code computed from them.

The three assets run everywhere: one model for each mode of the paper's code. The rest needs LOOPED_REFERENCE_DIR.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_looped import LoopedConfig
from modeling_looped.flops import stored_parameters, training_flops_per_token
from modeling_looped.modeling_looped import LoopedRotaryEmbedding
from modeling_looped.upcycle import from_paper_checkpoint, paper_config, read_paper_settings

ASSETS = Path(__file__).parent / "assets" / "paper"
CASES = ["vanilla_d6", "deep_vanilla_d6", "operator_1_d6", "loop_2_d6", "loop_grow_d6", "untied_2_d6"]
ABLATIONS = [
    ("loop_2_d6", "no_norm"),
    ("loop_2_d6", "no_inject"),
    ("loop_2_d6", "no_coda_inject"),
    ("loop_2_d6", "no_operator"),
    ("loop_2_d6", "k4"),
    ("loop_2_d6", "om05"),
    ("loop_2_d6", "rm05"),
    ("untied_2_d6", "no_norm"),
    ("untied_2_d6", "no_inject"),
    ("untied_2_d6", "no_coda_inject"),
]
TOLERANCE = 2e-5


def load_model(folder):
    return from_paper_checkpoint(
        folder / "final.pt", folder / "result.json", vocab_size=97, max_position_embeddings=32
    )


@pytest.fixture
def models_dir(reference_dir):
    return reference_dir / "reference" / "model"


@pytest.fixture(params=CASES)
def case(request, models_dir):
    """(model, what the paper's code said of it, its tensors)"""
    folder = models_dir / request.param
    said = json.loads((folder / "case.json").read_text())
    return load_model(folder), said, load_file(folder / "io.safetensors")


def assert_near(ours, theirs, tolerance=TOLERANCE):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["vanilla_d6", "loop_2_d6", "untied_2_d6"])
def test_assets(name):
    model, tensors = load_model(ASSETS / name), load_file(ASSETS / name / "io.safetensors")
    with torch.no_grad():
        output = model(tensors["input_ids"], labels=tensors["input_ids"], shift_labels=tensors["targets"])
    assert_near(output.logits, tensors["logits"])
    assert_near(output.loss, tensors["loss"])


def test_sizes_and_schedule(case):
    model, said, _ = case
    assert model.config.schedule() == said["executed_block_indices"]
    assert model.config.num_stored_blocks == said["physical_blocks"]
    padded = said["padded_vocab"]
    assert stored_parameters(model.config, padded_vocab_size=padded).total == said["parameter_summary"]["total"]
    for num_loops, at in {model.config.num_loops: said, **said["eval"]}.items():
        flops = training_flops_per_token(
            model.config, num_loops=int(num_loops), sequence_length=32, padded_vocab_size=padded
        )
        assert flops.total == at["flops_per_token"]


def test_logits_and_losses(case):
    model, said, tensors = case
    ids, targets = tensors["input_ids"], tensors["targets"]
    masked = tensors["targets_masked"].masked_fill(tensors["targets_masked"] == -1, -100)
    with torch.no_grad():
        output = model(ids, labels=ids, shift_labels=targets)
        per_token = torch.nn.functional.cross_entropy(output.logits.transpose(1, 2), targets, reduction="none")
        for keywords in ({}, {"skip_logits": True}):
            assert_near(model(ids, labels=ids, shift_labels=targets, **keywords).loss, tensors["loss"])
            assert_near(model(ids, labels=ids, shift_labels=masked, **keywords).loss, tensors["loss_masked"])
    assert_near(output.logits, tensors["logits"])
    assert_near(per_token, tensors["loss_per_token"])
    assert output.loss.item() == pytest.approx(said["loss"], abs=TOLERANCE)


def test_residual_stream(case):
    model, said, tensors = case
    blocks, boundaries, embedded = [], [], []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: blocks.append(output))
    model.model.boundary.register_forward_hook(lambda module, args, output: boundaries.append((*args, output)))
    model.model.embed_norm.register_forward_hook(lambda module, args, output: embedded.append(output))
    with torch.no_grad():
        output = model(tensors["input_ids"], output_hidden_states=True)

    assert_near(embedded[0], tensors["embed_norm"])
    assert_near(torch.stack(blocks), tensors["block_out"])
    # hidden_states[i] is the stream after i executed blocks; the last one is normed
    assert_near(torch.stack(output.hidden_states[:-1]), torch.stack([embedded[0], *tensors["block_out"][:-1]]))
    if "boundary_in" in tensors:
        # boundary_in is what enters the executed block at boundary_positions: the operator has acted
        assert_near(torch.stack([after for _, _, after in boundaries]), tensors["boundary_in"])
        assert_near(boundaries[-1][2], tensors["coda_in"])
        for (before, prelude_output, _), position in zip(boundaries, tensors["boundary_positions"], strict=True):
            assert_near(prelude_output, tensors["anchor"])
            assert_near(before, tensors["block_out"][position - 1])
    else:
        assert said["settings"]["depth_scale_mode"] == "none"


@pytest.mark.parametrize("name", ["loop_2_d6", "loop_grow_d6", "untied_2_d6"])
def test_other_numbers_of_passes(models_dir, name):
    model, tensors = load_model(models_dir / name), load_file(models_dir / name / "io.safetensors")
    said = json.loads((models_dir / name / "case.json").read_text())
    assert len(said["eval"]) >= 2
    for num_loops, at in said["eval"].items():
        blocks = []
        hook = model.model.layers[-1].register_forward_hook(lambda m, args, output, into=blocks: into.append(output))
        with torch.no_grad():
            output = model(
                tensors["input_ids"],
                labels=tensors["input_ids"],
                shift_labels=tensors["targets"],
                num_loops=int(num_loops),
            )
        hook.remove()
        assert_near(output.logits, tensors[f"logits_k{num_loops}"])
        assert_near(blocks[-1], tensors[f"last_block_out_k{num_loops}"])
        assert output.loss.item() == pytest.approx(at["loss"], abs=TOLERANCE)
        assert model.config.schedule(int(num_loops)) == at["executed_block_indices"]
    for num_loops in said.get("dep_out_of_range_K", {}):
        with pytest.raises(ValueError, match="num_loops"):
            model(tensors["input_ids"], num_loops=float(num_loops) if "." in num_loops else int(num_loops))


def test_gradients(case):
    model, said, tensors = case
    ids = tensors["input_ids"]
    for keywords in ({}, {"skip_logits": True}):
        model.zero_grad()
        model(ids, labels=ids, shift_labels=tensors["targets"], **keywords).loss.backward()
        assert_near(model.lm_head.weight.grad, tensors["grad.lm_head.weight"][:97])
        assert_near(model.model.embed_tokens.weight.grad, tensors["grad.transformer.wte.weight"][:97])
        norms = said["grad_norms"]
        for block, layer in enumerate(model.model.layers):
            theirs = f"transformer.h.{block}."
            for name, module in {
                "attn.c_q": layer.self_attn.q_proj,
                "attn.c_k": layer.self_attn.k_proj,
                "attn.c_v": layer.self_attn.v_proj,
                "attn.c_proj": layer.self_attn.o_proj,
                "mlp.c_gate": layer.mlp.gate_proj,
                "mlp.c_fc": layer.mlp.up_proj,
                "mlp.c_proj": layer.mlp.down_proj,
            }.items():
                norm = module.weight.grad.norm().item()
                assert norm == pytest.approx(norms[f"{theirs}{name}.weight"], rel=1e-4), (block, name)


def overridden(models_dir, name, ablation, tmp_path):
    """The case's checkpoint as newer exports write it, and a result.json with the settings of the ablation."""
    folder = models_dir / name
    overrides = json.loads((folder / "ablations.json").read_text())[ablation]["overrides"]
    checkpoint = torch.load(folder / "final.pt", weights_only=True)
    torch.save({"model": checkpoint["model"]}, tmp_path / "final.pt")
    result = json.loads((folder / "result.json").read_text()) | overrides
    if "core_repetitions" in overrides:
        result["final_eval_active_core_repetitions"] = overrides["core_repetitions"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    return tmp_path


@pytest.mark.parametrize(("name", "ablation"), ABLATIONS)
def test_ablations(models_dir, tmp_path, name, ablation):
    model = load_model(overridden(models_dir, name, ablation, tmp_path))
    tensors = load_file(models_dir / name / "ablations.safetensors")
    said = json.loads((models_dir / name / "ablations.json").read_text())[ablation]
    states = []
    model.model.boundary.register_forward_hook(lambda module, args, output: states.append(output))
    with torch.no_grad():
        output = model(tensors["input_ids"], labels=tensors["input_ids"], shift_labels=tensors["targets"])
    assert_near(output.logits, tensors[f"{ablation}.logits"])
    assert output.loss.item() == pytest.approx(said["loss"], abs=TOLERANCE)
    if f"{ablation}.boundary_in" in tensors:
        assert_near(torch.stack(states), tensors[f"{ablation}.boundary_in"])


@pytest.mark.parametrize(
    ("ablation", "named"),
    [("k1p5", "core_repetitions"), ("prelude_and_recurrence", "recurrence_rmsnorm='prelude_and_recurrence'")],
)
def test_ablations_that_no_config_expresses_are_refused(models_dir, tmp_path, ablation, named):
    with pytest.raises(ValueError, match=named):
        load_model(overridden(models_dir, "loop_2_d6", ablation, tmp_path))


def test_every_ablation_is_covered(models_dir):
    for name in ("loop_2_d6", "untied_2_d6"):
        stored = set(json.loads((models_dir / name / "ablations.json").read_text()))
        covered = {ablation for case, ablation in ABLATIONS if case == name}
        assert stored - covered <= {"k1p5", "prelude_and_recurrence"}


def test_bf16_autocast(case):
    model, _, tensors = case
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = model(tensors["input_ids"], use_cache=True)
    logits, theirs = output.logits.float(), tensors["logits_bf16_autocast"]
    # A logit is a bf16 number: one unit in its last place may differ where a sum came out on the other side
    assert_near(logits, theirs, tolerance=0.03125)
    assert (logits - theirs).pow(2).mean().sqrt() < 0.0025  # a rotation in fp32 is off by up to .006
    assert not torch.equal(logits, tensors["logits"])
    for layer in output.cache.layers:
        assert layer.keys.dtype == layer.values.dtype == torch.bfloat16


def test_fp32_rope_tables_move_the_logits_as_far_as_they_did_there(case):
    model, said, tensors = case
    model.config.round_rope_to_bf16 = False
    with torch.no_grad():
        moved = (model(tensors["input_ids"]).logits - tensors["logits"]).abs().max().item()
    assert moved == pytest.approx(said["tolerance"]["fp32_rope_tables"], abs=TOLERANCE)


@pytest.mark.parametrize("head_dim", [8, 16, 64, 128])
def test_rope_tables(models_dir, head_dim):
    tables = load_file(models_dir / "_rope" / "rope.safetensors")
    config = LoopedConfig(hidden_size=2 * head_dim, num_attention_heads=2)
    positions = tables["positions"][None]
    cos, sin = LoopedRotaryEmbedding(config)(torch.zeros(1, dtype=torch.bfloat16), positions)
    for ours, theirs in ((cos, tables[f"cos_{head_dim}"]), (sin, tables[f"sin_{head_dim}"])):
        assert torch.equal(ours[0], torch.cat((theirs, theirs), dim=-1))


def test_published_models(reference_dir):
    """Settings of all 67 published models -> sizes that the paper states."""
    published = json.loads((reference_dir / "data" / "ladder.json").read_text())["checkpoints"]
    assert len(published) == 67
    for row in published:
        settings = {
            "depth_scale_mode": row["depth_mode"],
            "n_layer": row["n_layer_arg"],
            "n_head": row["heads"],
            "n_embd": row["width"],
            "head_dim": row["head_dim"],
            "core_repetitions": row["core_repetitions"],
            "final_eval_active_core_repetitions": None,
            "output_multiplier": row["output_multiplier"],
            "residual_branch_multiplier": row["residual_branch_multiplier"],
            "recurrence_rmsnorm": row["boundary_norm"],
            "recurrence_emb_alpha": row["boundary_alpha"],
            "decoder_inject": row["coda_injection"],
            "wte_init_std": row["wte_init_std"],
            "uniform_init_scale": row["uniform_init_scale"],
            "prelude_layer_count": None,
            "core_layer_count": None,
            "coda_layer_count": None,
        }
        shapes = {"transformer.wte.weight": (50304, row["width"]), "lm_head.weight": (50304, row["width"])}
        inner = {"mlp.c_gate": (row["mlp_hidden"], row["width"]), "mlp.c_proj": (row["width"], row["mlp_hidden"])}
        inner["mlp.c_fc"] = inner["mlp.c_gate"]
        square = {f"attn.{name}": (row["width"], row["width"]) for name in ("c_q", "c_k", "c_v", "c_proj")}
        for block in range(row["stored_blocks"]):
            shapes |= {f"transformer.h.{block}.{name}.weight": shape for name, shape in (inner | square).items()}
        config = paper_config(settings, shapes, 50257, 2048, source=row["hub_id"])
        assert config.num_hidden_layers == row["executed_blocks_final"], row["hub_id"]
        assert stored_parameters(config, padded_vocab_size=50304).total == row["stored_parameters"], row["hub_id"]
        if row["prelude_core_coda"] is not None:
            sections = [config.num_prelude_blocks, config.num_core_blocks, config.num_coda_blocks]
            assert sections == row["prelude_core_coda"]
        if row["variant"] == "Deep Vanilla":
            assert (config.num_loops, config.tie_core, config.boundary_operator) == (2, False, "none")


def test_settings_of_both_files_agree(models_dir):
    for name in CASES:
        both = read_paper_settings(models_dir / name / "final.pt", models_dir / name / "result.json")
        alone = read_paper_settings(models_dir / name / "final.pt")
        assert {key: both[key] for key in alone if alone[key] is not None} == {
            key: value for key, value in alone.items() if value is not None
        }
