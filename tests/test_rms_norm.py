"""The norm with its own backward against torch's: values, gradients, dtypes, and where each of the two runs."""

import pytest
import torch

from modeling_looped.rms_norm import rms_norm


@pytest.mark.parametrize("shape", [(2, 5, 16), (2, 3, 7, 8), (4, 1)])
@pytest.mark.parametrize("affine", [False, True])
def test_equal_to_torch(shape, affine):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).requires_grad_()
    weight = torch.randn(shape[-1], generator=generator).requires_grad_() if affine else None
    inputs = [x] if weight is None else [x, weight]
    grad = torch.randn(shape, generator=generator)
    ours = rms_norm(x, weight, 1e-6)
    expected = torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-6)
    assert torch.equal(ours, expected)
    for got, wanted in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences():
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-6), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(8, 64, generator=generator).to(dtype)
    ours = rms_norm(x, None, 1e-6)
    assert ours.dtype == dtype
    exact = x.detach().double().requires_grad_()
    expected = torch.nn.functional.rms_norm(exact, (64,), None, 1e-6)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), expected, rtol=step, atol=step)
    got = torch.autograd.grad(ours, x, grad)[0].double()
    wanted = torch.autograd.grad(expected, exact, grad.double())[0]
    torch.testing.assert_close(got, wanted, rtol=2 * step, atol=2 * step)


def test_a_row_of_zeros_has_finite_gradients():
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x, None, 1e-6).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_compiled_it_is_torchs_own():
    x = torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(lambda x: rms_norm(x, None, 1e-6), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), rms_norm(x, None, 1e-6))
