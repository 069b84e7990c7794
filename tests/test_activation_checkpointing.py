"""Activation checkpointing changes memory, never a gradient: the prelude output enters every pass from outside."""

import pytest
import torch

from modeling_looped.boundary import BOUNDARY_OPERATORS


def gradients(model, ids):
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids).loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def checkpoint_blocks(model, use_reentrant):
    """Turns checkpointing on and returns the list that the blocks' executions are then counted in."""
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    executions = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: executions.append(index))
    return executions


def assert_equal_gradients(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        if gradient is None or expected[name] is None:
            assert gradient is expected[name], name
        else:
            assert torch.allclose(gradient, expected[name], rtol=1e-6, atol=1e-6), name


# B61
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_variant_keeps_its_gradients(variant_config, make_model, random_ids, use_reentrant):
    model = make_model(variant_config()).train()
    ids = random_ids(2, 12)
    expected = gradients(model, ids)
    executions = checkpoint_blocks(model, use_reentrant)
    assert_equal_gradients(gradients(model, ids), expected)
    # every block ran once forward and once more in the backward
    assert sorted(executions) == sorted(2 * model.config.schedule())


# B61: the gradient that flows through e into the prelude, and into a learned alpha
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("operator", BOUNDARY_OPERATORS)
def test_operator_keeps_its_gradients(tiny_config, make_model, random_ids, operator, use_reentrant):
    model = make_model(tiny_config(boundary_operator=operator)).train()
    ids = random_ids(2, 12)
    expected = gradients(model, ids)
    assert all(gradient is not None and gradient.any() for gradient in expected.values())
    checkpoint_blocks(model, use_reentrant)
    assert_equal_gradients(gradients(model, ids), expected)


# B63
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("tie_core", [True, False])
def test_frozen_prelude_leaves_later_gradients(tiny_config, make_model, random_ids, tie_core, use_reentrant):
    model = make_model(tiny_config(tie_core=tie_core)).train()
    ids = random_ids(2, 12)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    expected = gradients(model, ids)
    assert any(gradient is not None for gradient in expected.values())
    checkpoint_blocks(model, use_reentrant)
    if use_reentrant:  # a reentrant checkpoint needs an input with a gradient, as transformers documents
        model.enable_input_require_grads()
    assert_equal_gradients(gradients(model, ids), expected)


def test_old_name_still_turns_it_on(tiny_config, make_model, random_ids):
    model = make_model(tiny_config()).train()
    model.gradient_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_dropout_draws_the_same_numbers_again(tiny_config, make_model, random_ids):
    model = make_model(tiny_config(attention_dropout=0.5)).train()
    model.set_attn_implementation("eager")
    ids = random_ids(2, 12)
    torch.manual_seed(3)
    expected = gradients(model, ids)
    checkpoint_blocks(model, use_reentrant=False)
    torch.manual_seed(3)
    assert_equal_gradients(gradients(model, ids), expected)
    torch.manual_seed(4)
    assert not torch.equal(gradients(model, ids)["lm_head.weight"], expected["lm_head.weight"])
