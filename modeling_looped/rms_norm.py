# Copyright 2026 The modeling-looped authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""RMS norm, x / sqrt(mean(x^2) + eps), with a backward of its own on the CPU.

On a CPU torch's rms_norm is made of elementary operations, and autograd walks through the tensor once for each of
them. Here the backward takes fewer passes. Elsewhere, and while compiling or exporting, torch's own function
runs.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """y = x / r with r = sqrt(mean(x^2) + eps); dL/dx = (g - y mean(g y)) / r for g = dL/dy. In float32 or wider."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        y = (wide * inverse).to(x.dtype)  # torch's own arithmetic, so that compiled and eager agree bit for bit
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        y, inverse = ctx.saved_tensors
        dtype = grad.dtype
        grad, y = grad.to(inverse.dtype), y.to(inverse.dtype)
        along = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul_(inverse).to(dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension of x (..., C) with an optional gain (C,); the shape and dtype of x."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    y = _RMSNorm.apply(x, eps)
    return y if weight is None else y * weight.to(y.dtype)


__all__ = ["rms_norm"]
