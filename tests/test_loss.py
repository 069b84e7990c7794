"""The causal LM's loss: what is shifted, counted and scaled, with and without logits."""

import pytest
import torch
from torch import nn

from modeling_looped import linear_cross_entropy

CHUNK_SIZE = 32


def loss_and_gradients(model, *args, **kwargs):
    model.zero_grad(set_to_none=True)
    output = model(*args, **kwargs)
    output.loss.backward()
    return output.loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# B57
def test_labels_are_shifted_inside(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    ids = random_ids(2, 12)
    output = model(ids, labels=ids)
    by_hand = nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1))
    torch.testing.assert_close(output.loss, by_hand)


# B57
@pytest.mark.parametrize("skip_logits", [False, True])
def test_a_model_that_copies_its_input_has_a_high_loss(tiny_config, make_model, skip_logits):
    model = make_model(tiny_config(residual_multiplier=0.0, boundary_operator="none", hidden_size=64))
    embedding = torch.eye(64)
    model.model.embed_tokens.weight.data.copy_(embedding)
    model.lm_head.weight.data.copy_(20 * embedding)
    ids = torch.arange(1, 64)[None]  # no token follows itself
    assert torch.equal(model(ids).logits.argmax(-1), ids)
    assert model(ids, labels=ids, skip_logits=skip_logits).loss > 20
    repeated = torch.full((1, 20), 5)
    assert model(repeated, labels=repeated, skip_logits=skip_logits).loss < 1e-3


# B59
@pytest.mark.parametrize("skip_logits", [False, True])
def test_labels_shifted_by_the_caller_are_not_shifted_again(tiny_config, make_model, random_ids, skip_logits):
    model = make_model(tiny_config())
    ids = random_ids(2, 12)
    shifted = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    expected = model(ids, labels=ids).loss
    loss = model(ids, labels=ids, shift_labels=shifted, skip_logits=skip_logits).loss
    torch.testing.assert_close(loss, expected)
    other = model(ids, labels=ids, shift_labels=ids, skip_logits=skip_logits).loss
    assert not torch.isclose(other, expected)


@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("num_items", [5, torch.tensor(5)])
def test_sum_is_divided_by_num_items_in_batch(tiny_config, make_model, random_ids, skip_logits, num_items):
    model = make_model(tiny_config())
    ids = random_ids(2, 12)
    mean = model(ids, labels=ids).loss
    loss = model(ids, labels=ids, num_items_in_batch=num_items, skip_logits=skip_logits).loss
    torch.testing.assert_close(loss, mean * 22 / 5)


@pytest.mark.parametrize("skip_logits", [False, True])
def test_accumulated_gradients_equal_one_batch(variant_config, make_model, random_ids, skip_logits):
    model = make_model(variant_config())
    ids = random_ids(4, 12)
    labels = ids.clone()
    labels[0, :7] = -100  # rows of unequal weight
    counted = int((labels[:, 1:] != -100).sum())
    kwargs = {"num_items_in_batch": counted, "skip_logits": skip_logits}
    _, expected = loss_and_gradients(model, ids, labels=labels)
    model.zero_grad(set_to_none=True)
    for row, row_labels in zip(ids.split(1), labels.split(1), strict=True):
        model(row, labels=row_labels, **kwargs).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_loss_without_logits_equals_loss_with(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    ids = random_ids(2, 12)
    labels = ids.masked_fill(torch.arange(12) < 4, -100)
    loss, gradients = loss_and_gradients(model, ids, labels=labels, skip_logits=True)
    expected_loss, expected = loss_and_gradients(model, ids, labels=labels)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert model(ids, labels=ids, skip_logits=True).logits is None


@pytest.mark.parametrize("num_tokens", [CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_without_logits_at_the_borders_of_chunks(
    tiny_config, make_model, random_ids, monkeypatch, tied, num_tokens
):
    monkeypatch.setattr(linear_cross_entropy, "MAX_LOGITS", CHUNK_SIZE * 64)  # 64: the vocabulary
    config = tiny_config(tie_word_embeddings=tied, num_loops=1, num_prelude_blocks=0, num_coda_blocks=0)
    model = make_model(config)
    ids = random_ids(1, num_tokens)
    loss, gradients = loss_and_gradients(model, ids, labels=ids, skip_logits=True)
    expected_loss, expected = loss_and_gradients(model, ids, labels=ids)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_loss_without_logits_under_bf16_autocast(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    ids = random_ids(2, 40)
    _, exact = loss_and_gradients(model, ids, labels=ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = loss_and_gradients(model, ids, labels=ids, skip_logits=True)
        expected_loss, expected = loss_and_gradients(model, ids, labels=ids)
    assert loss.dtype == expected_loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=2e-3, atol=2e-3)
    for name, gradient in gradients.items():
        error, usual = (gradient - exact[name]).norm(), (expected[name] - exact[name]).norm()
        assert error <= 1.3 * usual + 1e-3 * exact[name].norm(), name


@pytest.mark.parametrize("skip_logits", [False, True])
def test_no_counted_label_is_nan_as_in_transformers(tiny_config, make_model, random_ids, skip_logits):
    model = make_model(tiny_config())
    ids = random_ids(1, 12)
    loss, gradients = loss_and_gradients(model, ids, labels=torch.full_like(ids, -100), skip_logits=skip_logits)
    assert loss.isnan()
    assert not any(gradient.any() for gradient in gradients.values())


def test_loss_without_logits_needs_labels(tiny_config, make_model, random_ids):
    with pytest.raises(ValueError, match="`skip_logits=True` computes a loss without logits: pass `labels` too"):
        make_model(tiny_config())(random_ids(1, 12), skip_logits=True)
