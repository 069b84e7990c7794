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
"""The causal LM loss from hidden states, a chunk of tokens at a time: the logits of a whole batch never exist."""

import torch
from torch import nn

# Logits that exist at once: 256 MiB in float32, 1335 tokens at V = 50257. Large products are faster than small ones.
MAX_LOGITS = 2**26


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of `softmax(scale * hidden @ weight.T)`, a chunk of tokens at a time.

    The gradients are formed in the forward, while a chunk's logits exist, so that neither the logits nor their
    gradient are ever held for the whole batch and no product is computed twice. Shapes: hidden (N, C), weight (V, C),
    labels (N,) with `ignore_index` for tokens that do not count; returns a float32 scalar.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, scale: float, ignore_index: int, chunk_size: int):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        device_type = hidden.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
        weight_cast = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(device_type, enabled=False):
            for start in range(0, hidden.shape[0], chunk_size):
                chunk = (hidden[start : start + chunk_size] * scale).to(dtype)
                chunk_labels = labels[start : start + chunk_size]
                counted = chunk_labels != ignore_index
                target = chunk_labels.masked_fill(~counted, 0).unsqueeze(-1)
                log_probs = torch.log_softmax((chunk @ weight_cast.T).float(), dim=-1)
                loss -= (log_probs.gather(-1, target).squeeze(-1) * counted).sum()
                if needs_hidden or needs_weight:
                    # d loss / d logits = softmax - one_hot. An ignored label makes it zero, by way of the rows of the
                    # chunk and of the result, which are narrower than the logits.
                    grad_logits = log_probs.exp_()
                    grad_logits.scatter_add_(-1, target, grad_logits.new_full((), -1.0).expand_as(target))
                    grad_logits = grad_logits.to(dtype)
                    if needs_hidden:
                        rows = grad_logits @ weight_cast
                        grad_hidden[start : start + chunk_size] = rows * (counted * scale).unsqueeze(-1)
                    if needs_weight:
                        grad_weight += grad_logits.T @ (chunk * counted.unsqueeze(-1))
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def linear_causal_lm_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.LongTensor,
    scale: float = 1.0,
    shift_labels: torch.LongTensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    **kwargs,
) -> torch.Tensor:
    """transformers' `ForCausalLMLoss` of `scale * hidden_states @ weight.T`, without the logits.

    hidden_states (B, T, C), weight (V, C), labels (B, T) with `ignore_index` for tokens that do not count. Labels are
    shifted here unless `shift_labels` is given. Returns the mean over the counted tokens, or their sum /
    num_items_in_batch, in float32.
    """
    if not torch.is_grad_enabled():  # under no_grad too a Function is told that its inputs need gradients
        hidden_states, weight = hidden_states.detach(), weight.detach()
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.reshape(-1).to(hidden_states.device)
    chunk_size = max(1, MAX_LOGITS // weight.shape[0])
    loss = LinearCrossEntropy.apply(
        hidden_states.reshape(-1, hidden_states.shape[-1]), weight, shift_labels, scale, ignore_index, chunk_size
    )
    if num_items_in_batch is None:
        num_counted = (shift_labels != ignore_index).sum()
        # as in transformers: no counted token gives NaN, but gradients of zero
        return torch.where(num_counted > 0, loss / num_counted.clamp_min(1), torch.nan)
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


__all__ = ["LinearCrossEntropy", "linear_causal_lm_loss"]
