"""Initialisation: the paper's rule, plain normal, and from the meta device; and that loaded weights are left alone."""

import json

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.boundary import BOUNDARY_OPERATORS

INTO_A_BLOCK = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
OUT_OF_A_BLOCK = ("o_proj", "down_proj")


def groups(model):
    """Values of all weights of one role, flat: {"q_proj": (n,), ..., "embed_tokens": (n,), "lm_head": (n,)}."""
    roles = {}
    for name, weight in model.named_parameters():
        roles.setdefault(name.split(".")[-2], []).append(weight.detach().flatten())
    return {role: torch.cat(weights) for role, weights in roles.items()}


def test_paper_initialisation(tiny_config):
    torch.manual_seed(0)
    config = tiny_config(hidden_size=64, vocab_size=512, uniform_init_scale=0.5, initializer_range=0.01)
    weights = groups(LoopedForCausalLM(config))
    bound = 0.5 / 64**0.5
    for role in INTO_A_BLOCK:
        assert weights[role].abs().max() <= bound
        assert weights[role].std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    for role in (*OUT_OF_A_BLOCK, "lm_head"):
        assert not weights[role].any()
    assert weights["embed_tokens"].std().item() == pytest.approx(0.01, rel=0.03)


def test_plain_initialisation(tiny_config):
    torch.manual_seed(0)
    config = tiny_config(hidden_size=64, vocab_size=512, uniform_init_scale=None, initializer_range=0.03)
    for role, values in groups(LoopedForCausalLM(config)).items():
        assert values.std().item() == pytest.approx(0.03, rel=0.05), role


def test_tied_embeddings_are_not_zeroed_as_a_head(tiny_config):
    model = LoopedForCausalLM(tiny_config(uniform_init_scale=0.5, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.std() > 0.01


@pytest.mark.parametrize("variant", ["vanilla", "deep_vanilla", "operator_1", "loop_2", "untied_2"])
def test_statistics_equal_the_papers_code(reference_dir, variant):
    references = json.loads((reference_dir / "reference" / "init" / "init_stats_d128.json").read_text())
    reference = references[variant]
    settings = reference["settings"]
    model = LoopedForCausalLM(
        LoopedConfig(
            hidden_size=settings["n_embd"],
            num_attention_heads=settings["n_head"],
            tie_core=settings["depth_scale_mode"] != "dep",
            num_loops=settings["core_repetitions"],
            initializer_range=settings["wte_init_std"],
            uniform_init_scale=settings["uniform_init_scale"],
        )
    )
    weights = groups(model)
    theirs_to_ours = {
        "wte": "embed_tokens",
        "attn.c_q": "q_proj",
        "attn.c_k": "k_proj",
        "attn.c_v": "v_proj",
        "attn.c_proj": "o_proj",
        "mlp.c_gate": "gate_proj",
        "mlp.c_fc": "up_proj",
        "mlp.c_proj": "down_proj",
        "lm_head": "lm_head",
    }
    assert set(theirs_to_ours) == set(reference["groups"])
    for theirs, ours in theirs_to_ours.items():
        expected = reference["groups"][theirs]
        assert weights[ours].std().item() == pytest.approx(expected["std"], rel=0.01), ours
        if theirs != "wte":  # the extremes of a uniform distribution are sharp
            assert weights[ours].max().item() == pytest.approx(expected["max"], rel=0.001), ours


# B31: nothing keeps the memory that it was given
@pytest.mark.parametrize("uniform_init_scale", [None, 0.5])
@pytest.mark.parametrize("operator", BOUNDARY_OPERATORS)
def test_building_on_meta_fills_every_parameter_and_buffer(tiny_config, operator, uniform_init_scale):
    config = tiny_config(boundary_operator=operator, norm_affine=True, uniform_init_scale=uniform_init_scale)
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert not tensor.isnan().any(), name
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq, LoopedForCausalLM(config).model.rotary_emb.inv_freq, rtol=0, atol=0
    )
    for name, weight in model.named_parameters():
        if "norm" in name.split(".")[-2]:
            assert torch.equal(weight, torch.ones_like(weight)), name


# B29: the draw of missing weights does not touch the loaded ones
@pytest.mark.parametrize("uniform_init_scale", [None, 0.5])
@pytest.mark.parametrize("operator", BOUNDARY_OPERATORS)
def test_loaded_weights_are_not_drawn_again(tiny_config, tmp_path, operator, uniform_init_scale):
    config = tiny_config(boundary_operator=operator, norm_affine=True, uniform_init_scale=uniform_init_scale)
    model = LoopedForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    model.save_pretrained(tmp_path)
    loaded = LoopedForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert (parameter == 0.5).all(), name
    loaded.post_init()
    for name, parameter in loaded.named_parameters():
        assert (parameter == 0.5).all(), name


def test_weights_that_a_checkpoint_lacks_follow_the_rule(tiny_config, tmp_path):
    """A base model is loaded as a causal LM: its head is new, and zero by the paper's rule."""
    LoopedForCausalLM(tiny_config(uniform_init_scale=0.5)).model.save_pretrained(tmp_path)
    loaded = LoopedForCausalLM.from_pretrained(tmp_path)
    assert not loaded.lm_head.weight.any()
    assert loaded.model.layers[0].self_attn.q_proj.weight.any()
