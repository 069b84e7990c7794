"""Boundary operators: their formulas, where in a forward they act, their parameters."""

import pytest
import torch

from modeling_looped import LoopedForCausalLM
from modeling_looped.boundary import BOUNDARY_OPERATORS, make_boundary_operator


def rms(h):
    return h / (h.square().mean(-1, keepdim=True) + 2**-23).sqrt()


# The formulas of the docstrings, written out: (h, e, alpha, before_coda) -> new state
FORMULAS = {
    "none": lambda h, e, alpha, before_coda: h,
    "norm_inject": lambda h, e, alpha, before_coda: rms(h) + alpha * e,
    "norm": lambda h, e, alpha, before_coda: rms(h),
    "inject": lambda h, e, alpha, before_coda: h + alpha * e,
    "norm_inject_between": lambda h, e, alpha, before_coda: rms(h) if before_coda else rms(h) + alpha * e,
    "norm_inject_learned": lambda h, e, alpha, before_coda: rms(h) + alpha * e,
    "linear_adapter": lambda h, e, alpha, before_coda: h + alpha * e,
}
LEARNED = {"norm_inject_learned", "linear_adapter"}


@pytest.fixture
def state_and_anchor():
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(2, 5, 32, generator=generator), torch.randn(2, 5, 32, generator=generator)


@pytest.mark.parametrize("before_coda", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_operator_follows_its_formula(tiny_config, state_and_anchor, name, before_coda):
    config = tiny_config(boundary_operator=name, boundary_alpha=0.7)
    operator = make_boundary_operator(config)
    operator.init_parameters()
    h, e = state_and_anchor
    torch.testing.assert_close(
        operator(h, e, before_coda=before_coda), FORMULAS[name](h, e, 0.7, before_coda), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("norm_affine", [False, True])
@pytest.mark.parametrize("name", BOUNDARY_OPERATORS)
def test_only_the_learned_operators_have_parameters(tiny_config, name, norm_affine):
    operator = make_boundary_operator(tiny_config(boundary_operator=name, norm_affine=norm_affine))
    assert bool(list(operator.parameters())) == (name in LEARNED)


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_learned_operator_uses_what_it_learned(tiny_config, state_and_anchor, name):
    operator = make_boundary_operator(tiny_config(boundary_operator=name, boundary_alpha=0.7))
    operator.init_parameters()
    h, e = state_and_anchor
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.mul_(2)
    expected = rms(h) + 1.4 * e if name == "norm_inject_learned" else 2 * h + 1.4 * e
    torch.testing.assert_close(operator(h, e, before_coda=True), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_model_starts_a_learned_operator_at_boundary_alpha(tiny_config, state_and_anchor, name):
    model = LoopedForCausalLM(tiny_config(boundary_operator=name, boundary_alpha=0.7))
    h, e = state_and_anchor
    torch.testing.assert_close(
        model.model.boundary(h, e, before_coda=False), FORMULAS[name](h, e, 0.7, False), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("tie_core", [True, False])
@pytest.mark.parametrize("num_loops", [1, 2, 3])
def test_operator_acts_after_every_pass_on_the_prelude_output(
    tiny_config, make_model, random_ids, num_loops, tie_core
):
    model = make_model(tiny_config(num_loops=num_loops, tie_core=tie_core)).model
    blocks, calls = [], []
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _, args, out, index=index: blocks.append((index, args[0], out)))
    model.boundary.register_forward_hook(
        lambda _, args, kwargs, out: calls.append((*args, kwargs["before_coda"], out)), with_kwargs=True
    )
    model(random_ids(2, 7))

    assert [index for index, _, _ in blocks] == model.config.schedule()
    assert [before_coda for _, _, before_coda, _ in calls] == [False] * (num_loops - 1) + [True]
    prelude_output = blocks[0][2]
    assert torch.equal(blocks[1][1], prelude_output)  # no operator before the first pass
    for loop_idx, (state, anchor, _, new_state) in enumerate(calls):
        last_of_pass = 1 + 2 * (loop_idx + 1) - 1
        assert torch.equal(anchor, prelude_output)
        assert torch.equal(state, blocks[last_of_pass][2])
        assert torch.equal(new_state, blocks[last_of_pass + 1][1])


def test_universal_transformer_anchors_on_the_normed_embedding(tiny_config, make_model, random_ids):
    model = make_model(tiny_config(num_prelude_blocks=0, num_coda_blocks=0)).model
    anchors = []
    model.boundary.register_forward_hook(lambda _, args, out: anchors.append(args[1]))
    ids = random_ids(2, 7)
    model(ids)
    assert len(anchors) == 3
    for anchor in anchors:
        torch.testing.assert_close(anchor, rms(model.embed_tokens(ids)), rtol=1e-6, atol=1e-6)


# B147: the state neither grows nor vanishes over many passes
@pytest.mark.parametrize("name", ["norm_inject", "norm_inject_between", "norm_inject_learned", "norm"])
def test_norming_operators_keep_the_state_bounded(tiny_config, random_ids, name):
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(boundary_operator=name, num_loops=64)).model
    states = []
    model.boundary.register_forward_hook(lambda _, args, out: states.append(out))
    model(random_ids(2, 16))
    sizes = torch.stack([state.square().mean().sqrt() for state in states])
    assert len(sizes) == 64
    assert sizes.min() > 0.1
    assert sizes.max() < 10


# B147
def test_learned_alpha_has_a_gradient_at_the_first_step(tiny_config, random_ids):
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(boundary_operator="norm_inject_learned"))
    ids = random_ids(2, 16)
    model(ids, labels=ids).loss.backward()
    assert model.model.boundary.learned_alpha.grad.abs() > 1e-8
