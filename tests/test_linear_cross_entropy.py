"""The chunked loss against transformers' loss of the logits: values and gradients."""

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from modeling_looped import linear_cross_entropy
from modeling_looped.linear_cross_entropy import LinearCrossEntropy, linear_causal_lm_loss

VOCAB, WIDTH = 37, 16
CHUNK_SIZE = 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "MAX_LOGITS", CHUNK_SIZE * VOCAB)


def draw(num_tokens, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, num_tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (1, num_tokens), generator=generator)
    return hidden, weight, labels


def both(hidden, weight, labels, scale=1.0, **kwargs):
    """(loss, d hidden, d weight) of the chunked loss and of transformers' loss of the logits."""
    ours = linear_causal_lm_loss(hidden, weight, labels, scale=scale, **kwargs)
    theirs = ForCausalLMLoss(scale * torch.nn.functional.linear(hidden, weight), labels, VOCAB, **kwargs)
    return [(loss, *torch.autograd.grad(loss, (hidden, weight))) for loss in (ours, theirs)]


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE + 1])
def test_equal_at_the_borders_of_chunks(num_tokens):
    hidden, weight, labels = draw(num_tokens)
    ours, theirs = both(hidden, weight, labels, num_items_in_batch=num_tokens)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize("num_items_in_batch", [None, 13, torch.tensor(13)])
def test_equal_with_a_logit_scale_and_a_given_count(scale, num_items_in_batch):
    ours, theirs = both(*draw(50), scale=scale, num_items_in_batch=num_items_in_batch)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
def test_equal_with_ignored_labels(ignore_index):
    hidden, weight, labels = draw(50)
    labels[0, 5:20] = ignore_index
    kwargs = {} if ignore_index == -100 else {"ignore_index": ignore_index}
    ours, theirs = both(hidden, weight, labels, **kwargs)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert not ours[1][0, 6:18].any()


# B59
def test_equal_with_labels_that_are_already_shifted():
    hidden, weight, labels = draw(50)
    shifted = labels.roll(7)
    ours, theirs = both(hidden, weight, labels, shift_labels=shifted)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert not torch.isclose(ours[0], linear_causal_lm_loss(hidden, weight, labels))


@pytest.mark.parametrize("num_items_in_batch", [None, 4])
def test_equal_when_every_label_is_ignored(num_items_in_batch):
    hidden, weight, labels = draw(50)
    ours, theirs = both(hidden, weight, torch.full_like(labels, -100), num_items_in_batch=num_items_in_batch)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_label_outside_the_vocabulary_is_an_error(label):
    hidden, weight, labels = draw(50)
    labels[0, 3] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_causal_lm_loss(hidden, weight, labels)


def test_gradients_by_finite_differences():
    hidden, weight, labels = draw(7, dtype=torch.float64)
    # The loss is summed in float32, hence the wide step and tolerance
    assert torch.autograd.gradcheck(
        lambda h, w: LinearCrossEntropy.apply(h[0], w, labels[0], 0.7, -100, 3), (hidden, weight), eps=1e-2, atol=1e-2
    )


def test_bf16_autocast_is_as_near_to_float32_as_transformers():
    hidden, weight, labels = draw(300)
    exact = both(hidden, weight, labels)[1]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = both(hidden, weight, labels)
    for got, expected, truth in zip(ours, theirs, exact, strict=True):
        assert got.dtype == expected.dtype == torch.float32
        assert (got - truth).norm() <= 1.5 * (expected - truth).norm() + 1e-3 * truth.norm()


def test_bf16_weights_are_as_near_to_float32_as_transformers():
    hidden, weight, labels = draw(300, dtype=torch.bfloat16)
    exact = both(hidden.float(), weight.float(), labels)[1]
    ours, theirs = both(hidden, weight, labels)
    for got, expected, truth in zip(ours, theirs, exact, strict=True):
        assert got.dtype == expected.dtype
        assert (got.float() - truth).norm() <= 1.5 * (expected.float() - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_side_gets_no_gradient(frozen):
    hidden, weight, labels = draw(50)
    expected = torch.autograd.grad(linear_causal_lm_loss(hidden, weight, labels), (hidden, weight))
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    linear_causal_lm_loss(hidden, weight, labels).backward()
    for tensor, gradient in zip((hidden, weight), expected, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, gradient)
        else:
            assert tensor.grad is None


def test_no_gradient_is_formed_without_a_graph(monkeypatch):
    """An evaluation with the chunked loss costs one product a chunk, not three."""
    hidden, weight, labels = draw(50)
    needed = []
    forward = LinearCrossEntropy.forward

    def spy(ctx, *args):
        needed.append(ctx.needs_input_grad[:2])
        return forward(ctx, *args)

    monkeypatch.setattr(LinearCrossEntropy, "forward", staticmethod(spy))
    with torch.no_grad():
        linear_causal_lm_loss(hidden, weight, labels)
    linear_causal_lm_loss(hidden, weight, labels)
    assert needed == [(False, False), (True, True)]
