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
"""Boundary operators: what happens to the state h after every pass of the core.

An operator sits between passes and between the last pass and the coda; there is none before the first pass, whose
input is the prelude output e itself. One small class each, chosen by `config.boundary_operator`. Shapes: h and e are
(B, T, C): batch, tokens, hidden_size.
"""

import torch
from torch import nn
from transformers import initialization as init

from .configuration_looped import LoopedConfig
from .rms_norm import rms_norm


class BoundaryOperator(nn.Module):
    """Base class. `forward(state, prelude_output, before_coda)` returns the state of the next section, (B, T, C)."""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.alpha = config.boundary_alpha
        self.eps = config.rms_norm_eps

    def forward(self, state: torch.Tensor, prelude_output: torch.Tensor, before_coda: bool) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def norm(self, state: torch.Tensor) -> torch.Tensor:
        # Never a gain: the operator adds no parameter, whatever config.norm_affine says of the blocks
        return rms_norm(state, None, self.eps)

    def init_parameters(self) -> None:
        """Fills the operator's own parameters; called by the model's `_init_weights`."""


class NoBoundary(BoundaryOperator):
    """h"""

    def forward(self, state, prelude_output, before_coda):
        return state


class NormInject(BoundaryOperator):
    """Norm(h) + alpha * e: the paper's operator, phi between passes and rho before the coda."""

    def forward(self, state, prelude_output, before_coda):
        return self.norm(state) + self.alpha * prelude_output


class NormOnly(BoundaryOperator):
    """Norm(h)"""

    def forward(self, state, prelude_output, before_coda):
        return self.norm(state)


class InjectOnly(BoundaryOperator):
    """h + alpha * e"""

    def forward(self, state, prelude_output, before_coda):
        return state + self.alpha * prelude_output


class NormInjectBetween(BoundaryOperator):
    """Norm(h) + alpha * e between passes, Norm(h) before the coda."""

    def forward(self, state, prelude_output, before_coda):
        state = self.norm(state)
        return state if before_coda else state + self.alpha * prelude_output


class NormInjectLearned(BoundaryOperator):
    """Norm(h) + a * e with a learned scalar a, which starts at `boundary_alpha`."""

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.learned_alpha = nn.Parameter(torch.full((1,), float(config.boundary_alpha)))

    def forward(self, state, prelude_output, before_coda):
        return self.norm(state) + self.learned_alpha * prelude_output

    def init_parameters(self):
        init.constant_(self.learned_alpha, self.alpha)


class LinearAdapter(BoundaryOperator):
    """W [h, e], the adapter of Geiping et al. 2025 (arXiv 2502.05171, section 3.1).

    Starts at W = [I, alpha I], so that it first acts as `inject`.
    """

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, state, prelude_output, before_coda):
        return self.proj(torch.cat((state, prelude_output.to(state.dtype)), dim=-1))

    def init_parameters(self):
        identity = torch.eye(self.proj.out_features, dtype=self.proj.weight.dtype, device=self.proj.weight.device)
        init.copy_(self.proj.weight, torch.cat((identity, self.alpha * identity), dim=-1))


BOUNDARY_OPERATORS: dict[str, type[BoundaryOperator]] = {
    "none": NoBoundary,
    "norm_inject": NormInject,
    "norm": NormOnly,
    "inject": InjectOnly,
    "norm_inject_between": NormInjectBetween,
    "norm_inject_learned": NormInjectLearned,
    "linear_adapter": LinearAdapter,
}


def make_boundary_operator(config: LoopedConfig) -> BoundaryOperator:
    """The operator named by `config.boundary_operator`; raises ValueError for a name that does not exist."""
    if config.boundary_operator not in BOUNDARY_OPERATORS:
        raise ValueError(
            f"`boundary_operator` is {config.boundary_operator!r}, allowed are: {', '.join(BOUNDARY_OPERATORS)}."
        )
    return BOUNDARY_OPERATORS[config.boundary_operator](config)


__all__ = ["BOUNDARY_OPERATORS", "BoundaryOperator", "make_boundary_operator"]
