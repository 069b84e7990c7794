"""Fresh runs start from the paper's own numbers, which its code drew at seed 42 for every variant.

`init_stats.json` has the statistics of each group and the first four values of every tensor that is not zero.
"""

import json
from pathlib import Path

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.boundary import BOUNDARY_OPERATORS
from modeling_looped.upcycle import PAPER_BLOCK_NAMES
from training.engine.initialization import initialize_as_paper

REFERENCE = json.loads((Path(__file__).parent / "assets" / "init" / "init_stats.json").read_text())
SEED = 42


def first_stage(variant) -> tuple[LoopedForCausalLM, int]:
    """The untrained model with which a run of the variant starts, and how many cores the paper's code holds for it."""
    settings = REFERENCE[variant]["settings"]
    untied = settings["depth_scale_mode"] == "dep"
    num_cores = settings["core_repetitions"] if untied else 1
    torch.manual_seed(0)  # the draws do not depend on it
    config = LoopedConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["n_embd"],
        num_attention_heads=settings["n_head"],
        num_core_blocks=settings["n_layer"] - 4,
        num_loops=2 if variant.endswith("grow") else settings["core_repetitions"],
        tie_core=not untied,
        initializer_range=settings["wte_init_std"],
        uniform_init_scale=settings["uniform_init_scale"],
    )
    return LoopedForCausalLM(config), num_cores


@pytest.fixture(scope="module", params=REFERENCE)
def drawn(request):
    """(variant, model drawn at SEED, cores that the paper's code holds)"""
    model, num_cores = first_stage(request.param)
    initialize_as_paper(model, SEED, num_cores)
    return request.param, model, num_cores


def test_first_values_of_every_tensor(drawn):
    variant, model, num_cores = drawn
    config = model.config
    num_dormant = (num_cores - config.num_stored_cores) * config.num_core_blocks
    first_coda = config.num_stored_blocks - config.num_coda_blocks
    weights = dict(model.named_parameters())
    expected = dict(REFERENCE[variant]["seed42_first4"])
    seen = {"transformer.wte.weight": weights.pop("model.embed_tokens.weight")}
    for block in range(config.num_stored_blocks):
        theirs = block + num_dormant * (block >= first_coda)
        for paper_name, name in PAPER_BLOCK_NAMES.items():
            seen[f"transformer.h.{theirs}.{paper_name}.weight"] = weights.pop(f"model.layers.{block}.{name}.weight")
    seen["lm_head.weight"] = weights.pop("lm_head.weight")
    assert not weights
    for name, weight in seen.items():
        if "c_proj" in name or "lm_head" in name:
            assert not weight.any()
        else:
            # exact on the machine of the reference; another one may round the logarithm in a normal otherwise
            assert weight.flatten()[:4].tolist() == pytest.approx(expected.pop(name), rel=1e-5), name
    dormant = {name for name in expected if first_coda <= int(name.split(".")[2]) < first_coda + num_dormant}
    assert set(expected) == dormant and len(dormant) == 5 * num_dormant


def test_statistics_and_bounds(drawn):
    variant, model, num_cores = drawn
    all_drawn = num_cores == model.config.num_stored_cores  # else the statistics include the dormant cores
    for group, expected in REFERENCE[variant]["groups"].items():
        ours = {"wte": "embed_tokens", "lm_head": "lm_head"}.get(group) or PAPER_BLOCK_NAMES[group].split(".")[1]
        values = torch.cat(
            [weight.flatten() for name, weight in model.named_parameters() if name.split(".")[-2] == ours]
        )
        # the padding of the embedding is part of the statistics, and of no model of ours
        tolerance = 1e-5 if all_drawn and group != "wte" else 0.01
        assert values.std().item() == pytest.approx(expected["std"], rel=tolerance), group
        if group not in ("wte", "lm_head"):
            assert values.abs().max() <= REFERENCE[variant]["uniform_bound_s"], group
        if all_drawn and group in ("attn.c_q", "attn.c_k"):  # half of their rows change sign
            assert values.abs().max().item() == pytest.approx(max(-expected["min"], expected["max"])), group
        elif all_drawn and group != "wte":
            assert [values.min().item(), values.max().item()] == pytest.approx([expected["min"], expected["max"]])
            assert values.mean().item() == pytest.approx(expected["mean"], abs=1e-9), group


def test_scores_of_attention_are_the_papers():
    """Turned as the paper's code turns them, its numbers of q and k give the scores that ours give in Llama's form."""
    model, _ = first_stage("loop_2")
    initialize_as_paper(model, SEED)
    config, attention = model.config, model.model.layers[0].self_attn
    torch.manual_seed(SEED)
    torch.empty(50304, config.hidden_size).normal_()
    bound = REFERENCE["loop_2"]["uniform_bound_s"]
    theirs = [torch.empty(config.hidden_size, config.hidden_size).uniform_(-bound, bound) for _ in range(2)]
    states = torch.randn(1, 20, config.hidden_size)
    cos, sin = model.model.rotary_emb(states, torch.arange(20)[None])
    half = config.head_dim // 2
    cos, sin = cos[..., :half], sin[..., :half]

    def turned(projected, sign):
        x1, x2 = projected.chunk(2, dim=-1)
        return torch.cat((x1 * cos + sign * x2 * sin, x2 * cos - sign * x1 * sin), dim=-1)

    q, k = (turned(states @ weight.T, 1) for weight in theirs)
    expected = q @ k.mT
    q, k = (turned(states @ weight.T, -1) for weight in (attention.q_proj.weight, attention.k_proj.weight))
    torch.testing.assert_close(q @ k.mT, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert not torch.equal(attention.q_proj.weight, theirs[0])


@pytest.mark.parametrize("operator", BOUNDARY_OPERATORS)
def test_what_the_paper_does_not_have_is_kept(tiny_config, operator):
    config = tiny_config(boundary_operator=operator, norm_affine=True, uniform_init_scale=0.5)
    model = LoopedForCausalLM(config)
    names = [name for name, _ in model.named_parameters() if "norm" in name or "boundary" in name]
    for parameter in model.parameters():
        parameter.data.fill_(0.25)
    initialize_as_paper(model, SEED)
    for name, parameter in model.named_parameters():
        untouched = bool((parameter == 0.25).all())
        assert untouched == (name in names), name


def test_a_model_with_a_plain_initialisation_is_left_alone(tiny_config):
    model = LoopedForCausalLM(tiny_config(uniform_init_scale=None))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    initialize_as_paper(model, SEED)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_shared_embedding_is_not_zeroed_as_a_head(tiny_config):
    model = LoopedForCausalLM(tiny_config(uniform_init_scale=0.5, tie_word_embeddings=True))
    initialize_as_paper(model, SEED)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)


def test_fewer_drawn_than_stored_cores_are_refused(tiny_config):
    model = LoopedForCausalLM(tiny_config(uniform_init_scale=0.5, tie_core=False))
    with pytest.raises(ValueError, match="num_drawn_cores is 2; the model stores 3 cores"):
        initialize_as_paper(model, SEED, 2)
