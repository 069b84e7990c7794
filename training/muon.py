"""The Muon update of matrices of one shape: momentum, orthogonalisation, variance reduction, cautious weight decay.

Functions of tensors only; `MuonAdamW` in optim.py keeps state and groups. The rule is that of arXiv 2609.19107: Muon
(Jordan 2024) with Polar Express (Amsel et al. 2025, arXiv 2505.16932), row normalisation, NorMuon's variance reduction
(arXiv 2510.05491) and cautious weight decay (arXiv 2510.12402).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

# Minimax odd quintics a x + b x^3 + c x^5 for singular values in [1e-3, 1], one row a step, by the method of the Polar
# Express paper with a cushion of .02 and a safety factor of 1.02 in all but the last
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class MuonRule(NamedTuple):
    """Which parts of the rule are on; constants of a compiled graph."""

    nesterov: bool = True
    row_normalize: bool = True
    cautious_weight_decay: bool = True
    steps: int = 5
    dtype: torch.dtype = torch.bfloat16


def second_moment_shape(shape: torch.Size) -> tuple[int, ...]:
    """Shape of the second moment of a (..., rows, cols) matrix: one number a row, or a column if it is wide."""
    *leading, rows, cols = shape
    return (*leading, rows, 1) if rows >= cols else (*leading, 1, cols)


def orthogonalize(stack: torch.Tensor, rule: MuonRule) -> torch.Tensor:
    """Brings all singular values of each fp32 matrix of `stack` (n, rows, cols) near 1; returns `rule.dtype`.

    X_0 = U / (1.02 ||U|| + 1e-6), then X <- a X + (b A + c A^2) X with A = X X^T on the smaller side: Polar Express
    (Amsel et al. 2025, arXiv 2505.16932). With `rule.row_normalize` each row of U is first divided by its norm.
    """
    divisor = torch.linalg.vector_norm(stack, dim=-1, keepdim=True)
    if rule.row_normalize:
        norms, divisor = divisor, divisor.clamp_min(1e-7)
        total = torch.linalg.vector_norm(norms / divisor, dim=-2, keepdim=True)
        divisor = divisor * (1.02 * total + 1e-6)
    else:
        divisor = 1.02 * torch.linalg.vector_norm(divisor, dim=-2, keepdim=True) + 1e-6
    count, rows, cols = stack.shape
    side = min(rows, cols)
    # Four buffers serve all steps: on a CPU fresh ones cost as much as the products
    x = torch.div(stack, divisor, out=stack.new_empty(stack.shape, dtype=rule.dtype))
    spare = torch.empty_like(x)
    gram = x.new_empty((count, side, side))
    polynomial = torch.empty_like(gram)
    for a, b, c in POLAR_EXPRESS[: rule.steps]:
        if rows > cols:
            torch.bmm(x.mT, x, out=gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            torch.baddbmm(x, x, polynomial, beta=a, out=spare)
        else:
            torch.bmm(x, x.mT, out=gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            torch.baddbmm(x, polynomial, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def _accumulate(
    grad: torch.Tensor, buffer: torch.Tensor, update: torch.Tensor, momentum: torch.Tensor, nesterov: bool
) -> None:
    """m += (1 - mu)(g - m) in `buffer`; u = g + mu (m - g), or m without `nesterov`, in `update`."""
    buffer.lerp_(grad.to(buffer.dtype), (1 - momentum).to(buffer.dtype))
    if nesterov:
        torch.lerp(grad.float(), buffer.float(), momentum, out=update)
    else:
        update.copy_(buffer)


def _variance_scale(stack: torch.Tensor, second_moments: list[torch.Tensor], beta2: torch.Tensor) -> torch.Tensor:
    """Factors (n, rows, 1), or (n, 1, cols) if wide, that even out `stack` and keep each Frobenius norm.

    NorMuon's rule (arXiv 2510.05491): v <- beta2 v + (1 - beta2) mean(X^2) along the longer side; X / sqrt(v).
    """
    axis = -1 if stack.shape[-2] >= stack.shape[-1] else -2
    mean_square = torch.linalg.vector_norm(stack, dim=axis, keepdim=True, dtype=torch.float32).square()
    mean_square = mean_square / stack.shape[axis]
    for running, new in zip(second_moments, mean_square.unbind(), strict=True):
        running.lerp_(new.to(running.dtype), (1 - beta2).to(running.dtype))
    scale = torch.stack([running.float() for running in second_moments]).clamp_min(1e-10).rsqrt()
    norm = mean_square.sum(dim=(-2, -1), keepdim=True).sqrt()
    new_norm = (mean_square * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return scale * (norm / new_norm.clamp_min(1e-10))


def _apply(parameter: torch.Tensor, update: torch.Tensor, decay: torch.Tensor, cautious: bool) -> None:
    """p -= u + decay p, the decay only where u p >= 0 if `cautious`; `update` (fp32, lr included) is overwritten."""
    weight = parameter.float()
    if cautious:
        agrees = (update * weight).ge_(0)
        update.addcmul_(agrees.mul_(decay), weight)
    else:
        update.add_(weight * decay)
    parameter.sub_(update)


def muon_step(
    parameters: list[torch.Tensor],
    grads: list[torch.Tensor],
    buffers: list[torch.Tensor],
    second_moments: list[torch.Tensor] | None,
    momentum: torch.Tensor,
    lr: torch.Tensor,
    decay: torch.Tensor,
    beta2: torch.Tensor,
    rule: MuonRule,
) -> None:
    """One Muon step of matrices of one shape (rows, cols), in place.

    The four numbers are fp32 tensors without dimensions, so that a compiled graph serves every step. `lr` includes the
    factor of the shape; `decay` is lr * weight_decay.
    """
    stack = grads[0].new_empty((len(grads), *grads[0].shape), dtype=torch.float32)
    for grad, buffer, update in zip(grads, buffers, stack.unbind(), strict=True):
        _accumulate(grad, buffer, update, momentum, rule.nesterov)
    stack = orthogonalize(stack, rule)
    if second_moments is None:
        factors = lr.expand(len(grads), 1, 1)
    else:
        factors = _variance_scale(stack, second_moments, beta2) * lr
    for parameter, update, factor in zip(parameters, stack.unbind(), factors.unbind(), strict=True):
        _apply(parameter, update * factor, decay, rule.cautious_weight_decay)


def sharded_muon_step(
    parameters: list[DTensor],
    grads: list[DTensor],
    buffers: list[DTensor],
    second_moments: list[torch.Tensor] | None,
    momentum: torch.Tensor,
    lr: torch.Tensor,
    decay: torch.Tensor,
    beta2: torch.Tensor,
    rule: MuonRule,
) -> None:
    """As `muon_step` for sharded parameters of one shape, 2-D or 3-D: gathers the updates, not the weights."""
    gathered = []
    for parameter, grad, buffer in zip(parameters, grads, buffers, strict=True):
        update = torch.empty_like(grad.to_local(), dtype=torch.float32)
        _accumulate(grad.to_local(), buffer.to_local(), update, momentum, rule.nesterov)
        layout = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        update = DTensor.from_local(update, parameter.device_mesh, parameter.placements, **layout)
        gathered.append(update.full_tensor().view(-1, *parameter.shape[-2:]))
    stack = orthogonalize(torch.cat(gathered), rule)
    factors = lr
    if second_moments is not None:
        slices = [row for moment in second_moments for row in moment.view(-1, *moment.shape[-2:]).unbind()]
        factors = _variance_scale(stack, slices, beta2) * lr
    updates = (stack * factors).view(len(parameters), *parameters[0].shape)
    for parameter, update in zip(parameters, updates.unbind(), strict=True):
        update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
        _apply(parameter.to_local(), update.to_local(), decay, rule.cautious_weight_decay)


@functools.cache
def compiled_muon_step() -> Callable:
    """`muon_step` under torch.compile: one graph for each shape, number of matrices and rule."""
    compiled = torch.compile(muon_step, dynamic=False)

    def step(*arguments, **numbers) -> None:
        # Shapes, sizes of stacks and growth stages exceed the 8 graphs that dynamo allows a function
        with torch._dynamo.config.patch(recompile_limit=64):
            compiled(*arguments, **numbers)

    return step
