"""Optimizers by parameter role: which rule updates which parameter, and how its state moves to a grown model.

Every trainable parameter has one role. "matrix" (2-D block weights, 3-D stacks of them) goes to Muon, "embedding" and
"head" to AdamW, "scalar" (gains, biases, learned alphas: any vector or number) to AdamW without weight decay. The
rules of `MuonAdamW` are those of arXiv 2609.19107; muon.py has the first. State is kept per parameter, never per
stack of parameters, so that checkpoints and growth carry it by parameter name.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from training.muon import (
    POLAR_EXPRESS,
    MuonRule,
    compiled_muon_step,
    muon_step,
    second_moment_shape,
    sharded_muon_step,
)

ROLES = ("matrix", "embedding", "head", "scalar")
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")

StateByName = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Everything an optimizer of this file can be told. Learning rates are base values, before the schedule's factor.

    Attributes:
        matrix_lr, embedding_lr, head_lr, scalar_lr: base learning rate of each role.
        weight_decay: decoupled, multiplied by the learning rate; not applied to scalars.
        adam_betas, adam_eps: AdamW of all roles it serves.
        momentum: of Muon until `set_step` gives another.
        nesterov, row_normalize, variance_reduction, cautious_weight_decay: parts of the Muon rule one can leave out.
        muon_beta2: decay of the second moment of the orthogonalised update.
        ns_steps: orthogonalisation steps, 1 to 5.
        orthogonalize_dtype: "bfloat16", or "float32" where several processes must agree to rounding.
        max_stack_elements: matrices of a shape are updated together up to this many elements, which bounds the extra
            memory (about 12 bytes an element); None is 2**21 on a CPU, for its caches, and 2**28 elsewhere.
        compile: torch.compile the Muon step, one graph a shape; None compiles on CUDA only.
    """

    matrix_lr: float
    embedding_lr: float
    head_lr: float
    scalar_lr: float = 1e-3
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.8, 0.95)
    adam_eps: float = 1e-10
    momentum: float = 0.95
    nesterov: bool = True
    row_normalize: bool = True
    variance_reduction: bool = True
    cautious_weight_decay: bool = True
    muon_beta2: float = 0.95
    ns_steps: int = 5
    orthogonalize_dtype: str = "bfloat16"
    max_stack_elements: int | None = None
    compile: bool | None = None

    def __post_init__(self):
        for field in ("matrix_lr", "embedding_lr", "head_lr", "scalar_lr", "weight_decay", "adam_eps"):
            if not 0.0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be finite and not negative")
        object.__setattr__(self, "adam_betas", tuple(self.adam_betas))
        shares = {"momentum": self.momentum, "muon_beta2": self.muon_beta2}
        if len(self.adam_betas) != 2:
            raise ValueError(f"adam_betas is {self.adam_betas}; it takes two numbers")
        shares["adam_betas[0]"], shares["adam_betas[1]"] = self.adam_betas
        for field, value in shares.items():
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{field} is {value}; it must be at least 0 and below 1")
        if not 1 <= self.ns_steps <= len(POLAR_EXPRESS):
            raise ValueError(f"ns_steps is {self.ns_steps}; allowed are 1 to {len(POLAR_EXPRESS)}")
        if self.orthogonalize_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"orthogonalize_dtype is {self.orthogonalize_dtype!r}; allowed are 'bfloat16', 'float32'")
        if self.max_stack_elements is not None and self.max_stack_elements < 1:
            raise ValueError(f"max_stack_elements is {self.max_stack_elements}; it must be at least 1")


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Role of every parameter of `model`, by name (each tensor once, in the order of `model.named_parameters()`).

    Routed by the position in the model first, shape second: an embedding is 2-D as well. A tensor shared by embedding
    and head is an embedding. A matrix with a side of 1 is a vector.

    Raises:
        ValueError: a parameter with more than three dimensions.
    """
    roles_of_tensor: dict[int, set[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            role = _role(module, f"{module_name}.{name}", parameter)
            roles_of_tensor.setdefault(id(parameter), set()).add(role)
    roles = {}
    for name, parameter in model.named_parameters():
        found = roles_of_tensor[id(parameter)]
        roles[name] = "embedding" if "embedding" in found else next(role for role in ROLES if role in found)
    return roles


def _role(module: nn.Module, path: str, parameter: torch.Tensor) -> str:
    # Any part of the path, so that a wrapper inside or around the module changes nothing
    parts = path.split(".")
    if parameter.ndim < 2 or min(parameter.shape[-2:]) == 1:
        return "scalar"
    if "embed_tokens" in parts or isinstance(module, nn.Embedding):
        return "embedding"
    if "lm_head" in parts:
        return "head"
    if parameter.ndim > 3:
        raise ValueError(f"parameter {path} has shape {tuple(parameter.shape)}; roles go up to 3 dimensions")
    return "matrix"


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups of role "matrix", AdamW for the rest. A parameter without gradient is skipped.

    Muon: m <- m + (1 - mu)(g - m); u = g + mu (m - g); X = orthogonalised u, evened out by its second moment;
    p <- p - lr' X - lr' wd p where X p >= 0, with lr' = lr sqrt(max(1, rows / cols)). AdamW is torch's fused kernel.
    Sharded (DTensor) matrices are gathered one by one and orthogonalised whole on every process.

    Args:
        groups: parameter groups with "role", "lr", "base_lr" and "weight_decay", as `build_optimizer` makes them.
        settings: the options of both rules.
    """

    def __init__(self, groups: list[dict], settings: OptimizerSettings):
        muon = {
            "momentum": settings.momentum,
            "nesterov": settings.nesterov,
            "row_normalize": settings.row_normalize,
            "cautious_weight_decay": settings.cautious_weight_decay,
            "variance_reduction": settings.variance_reduction,
            "beta2": settings.muon_beta2,
            "ns_steps": settings.ns_steps,
            "orthogonalize_dtype": settings.orthogonalize_dtype,
            "max_stack_elements": settings.max_stack_elements,
            "compile": settings.compile,
            "state_keys": ("momentum_buffer", "second_moment")
            if settings.variance_reduction
            else ("momentum_buffer",),
        }
        # With "fused" in the group, torch's load_state_dict keeps "step" on the parameter's device in fp32
        adam = {"betas": settings.adam_betas, "eps": settings.adam_eps, "fused": True, "state_keys": ADAMW_STATE}
        super().__init__([group | (muon if group["role"] == "matrix" else adam) for group in groups], {})

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Updates every parameter that has a gradient; returns the closure's loss, if there is a closure.

        Raises:
            ValueError: a matrix without its shape, as from an engine that flattens parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and group["role"] == "matrix":
                self._muon(group, parameters)
            elif parameters:
                self._adamw(group, parameters)
        return loss

    def _adamw(self, group: dict, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon(self, group: dict, parameters: list[torch.Tensor]) -> None:
        alike: dict[tuple, list[tuple[torch.Tensor, ...]]] = {}
        for parameter in parameters:
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"a parameter of role 'matrix' has shape {tuple(parameter.shape)} at the optimizer step; "
                    "Muon needs whole ones. With an engine that flattens parameters (DeepSpeed ZeRO) use 'adamw'."
                )
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                if group["variance_reduction"]:
                    # Small, so that each process keeps all of it for a sharded parameter too
                    shape = second_moment_shape(parameter.shape)
                    state["second_moment"] = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            tensors = (parameter, parameter.grad, *(state[key] for key in group["state_keys"]))
            sharded_shape = tuple(parameter.shape) if isinstance(parameter, DTensor) else None
            kind = (parameter.shape[-2:], parameter.dtype, parameter.device, sharded_shape)
            if sharded_shape is None and parameter.ndim == 3:
                alike.setdefault(kind, []).extend(zip(*(tensor.unbind() for tensor in tensors), strict=True))
            else:
                alike.setdefault(kind, []).append(tensors)
        rule = MuonRule(
            group["nesterov"],
            group["row_normalize"],
            group["cautious_weight_decay"],
            group["ns_steps"],
            getattr(torch, group["orthogonalize_dtype"]),
        )
        for ((rows, cols), _, device, sharded_shape), entries in alike.items():
            lr = group["lr"] * math.sqrt(max(1.0, rows / cols))
            arguments = {
                "momentum": _number(group["momentum"], device),
                "lr": _number(lr, device),
                "decay": _number(lr * group["weight_decay"], device),
                "beta2": _number(group["beta2"], device),
                "rule": rule,
            }
            compiled = device.type == "cuda" if group["compile"] is None else group["compile"]
            if sharded_shape is not None:
                step = sharded_muon_step
            else:
                step = compiled_muon_step() if compiled else muon_step
            limit = group["max_stack_elements"] or (2**21 if device.type == "cpu" else 2**28)
            for stack in _even_parts(entries, max(1, limit // (rows * cols))):
                matrices, grads, buffers, *rest = (list(column) for column in zip(*stack, strict=True))
                step(matrices, grads, buffers, rest[0] if rest else None, **arguments)


def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _even_parts(entries: list, limit: int) -> Iterator[list]:
    """Splits `entries` into the fewest parts of at most `limit`, equal to within one: few sizes mean few graphs."""
    num_parts = math.ceil(len(entries) / limit)
    for index in range(num_parts):
        yield entries[len(entries) * index // num_parts : len(entries) * (index + 1) // num_parts]


class TorchMuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for groups of role "matrix" and torch.optim.AdamW for the rest, as one optimizer.

    A baseline to compare with: Newton-Schulz steps in bf16, plain weight decay, 2-D matrices only.
    """

    def __init__(self, groups: list[dict], settings: OptimizerSettings):
        matrices = [group | {"state_keys": ("momentum_buffer",)} for group in groups if group["role"] == "matrix"]
        others = [group | {"state_keys": ADAMW_STATE} for group in groups if group["role"] != "matrix"]
        self._parts = []
        if matrices:
            muon = {"momentum": settings.momentum, "nesterov": settings.nesterov, "ns_steps": settings.ns_steps}
            self._parts.append(torch.optim.Muon(matrices, **muon))
        if others:
            self._parts.append(torch.optim.AdamW(others, betas=settings.adam_betas, eps=settings.adam_eps, fused=True))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Steps both optimizers; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            # Loading a state dict replaces state and groups, so they are handed on at each step
            muon = isinstance(part, torch.optim.Muon)
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if (group["role"] == "matrix") == muon]
            part.step()
        return loss


def _torch_adamw(groups: list[dict], settings: OptimizerSettings) -> torch.optim.Optimizer:
    groups = [group | {"state_keys": ADAMW_STATE} for group in groups]
    return torch.optim.AdamW(groups, betas=settings.adam_betas, eps=settings.adam_eps, fused=True)


def build_optimizer(model: nn.Module, settings: OptimizerSettings, name: str = "muon_adamw") -> torch.optim.Optimizer:
    """Optimizer `name` of `OPTIMIZERS` with one group a role, for the parameters of `model` that require a gradient.

    Each group carries "role", "base_lr" (what `set_step` multiplies) and "state_keys" (what its states hold).

    Raises:
        ValueError: an unknown name, nothing to train, or a parameter without a role.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {name!r}; allowed are {', '.join(map(repr, OPTIMIZERS))}")
    roles = parameter_roles(model)
    groups = []
    for role in ROLES:
        parameters = [p for key, p in model.named_parameters() if p.requires_grad and roles[key] == role]
        base_lr = getattr(settings, f"{role}_lr")
        weight_decay = 0.0 if role == "scalar" else settings.weight_decay
        if parameters:
            groups.append(
                {"params": parameters, "role": role, "lr": base_lr, "base_lr": base_lr, "weight_decay": weight_decay}
            )
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient; there is nothing to optimize")
    optimizer = OPTIMIZERS[name](groups, settings)
    check_groups(model, optimizer)
    return optimizer


def check_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Checks that the groups hold every parameter of `model` that requires a gradient once, and nothing else.

    Raises:
        ValueError: names the parameters in no group or in several, and counts tensors that are not the model's.
    """
    counts: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    trained = {name: counts.pop(id(p), 0) for name, p in model.named_parameters() if p.requires_grad}
    problems = {
        "in no group": [name for name, count in trained.items() if count == 0],
        "in several groups": [name for name, count in trained.items() if count > 1],
        "foreign to the model": [f"{len(counts)} tensors"] if counts else [],
    }
    found = [f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names]
    if found:
        raise ValueError(f"each parameter belongs to exactly one optimizer group, but {'; '.join(found)}")


def describe_groups(optimizer: torch.optim.Optimizer) -> list[str]:
    """One line a group to print at the start of a run: role, rule, tensors, parameters, base learning rate, decay."""
    return [
        f"{group['role']:<9} {'Muon' if 'momentum' in group else 'AdamW':<5} {len(group['params']):>5} tensors "
        f"{sum(p.numel() for p in group['params']):>14,} parameters, "
        f"lr {group['base_lr']:g}, weight decay {group['weight_decay']:g}"
        for group in optimizer.param_groups
    ]


def set_step(optimizer: torch.optim.Optimizer, lr_factor: float, momentum: float | None = None) -> None:
    """Before each step: lr = base_lr * `lr_factor` in all groups, and `momentum` (None keeps it) in those of Muon."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * lr_factor
        if momentum is not None and "momentum" in group:
            group["momentum"] = momentum


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateByName:
    """Optimizer state of every parameter in a group, by parameter name: tensors such as "exp_avg" and "step".

    A parameter that never had a gradient has an empty dict. The tensors are the optimizer's own, not copies; those of
    sharded parameters are gathered, so that all processes must call this together.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    states = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in held:
            state = optimizer.state.get(parameter, {})
            states[name] = {
                key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()
            }
    return states


def load_state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, states: StateByName) -> None:
    """Replaces the optimizer's state by copies of `states`; parameters that are missing or empty there start afresh.

    Raises:
        ValueError: a name without a parameter in a group, tensors of another optimizer, or of another shape.
    """
    parameters = dict(model.named_parameters())
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    loaded = {}
    for name, state in states.items():
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in groups:
            raise ValueError(f"optimizer state is given for {name!r}, which is no parameter of this model's optimizer")
        expected = groups[id(parameter)]["state_keys"]
        if state and set(state) != set(expected):
            raise ValueError(
                f"optimizer state of {name} holds {sorted(state)}; this optimizer needs {sorted(expected)}"
            )
        loaded[parameter] = {key: _load_tensor(name, parameter, key, value) for key, value in state.items()}
    optimizer.state.clear()
    optimizer.state.update({parameter: state for parameter, state in loaded.items() if state})


def _load_tensor(name: str, parameter: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
    if key == "step":
        return value.to(parameter.device, torch.float32, copy=True)
    value = value.to(parameter.device, parameter.dtype, copy=True)
    if key == "second_moment":
        fits = value.ndim == parameter.ndim and all(
            v in (1, p) for v, p in zip(value.shape, parameter.shape, strict=True)
        )
    else:
        fits = value.shape == parameter.shape
    if not fits:
        raise ValueError(f"{key} of {name} has shape {tuple(value.shape)}; the parameter has {tuple(parameter.shape)}")
    if isinstance(parameter, DTensor) and key != "second_moment":
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def carry_state(
    old_states: StateByName, origins: Mapping[str, str], new_names: Collection[str], policy: str = "zero"
) -> StateByName:
    """Optimizer state of a grown model, by its parameter names, for `load_state_by_name`.

    Trained parameters keep their tensors unchanged, under their new names. The parameters created by the growth start
    afresh with `policy` "zero" (the paper's: no moments, AdamW step 0), or with their origin's state, its AdamW step
    included, with "copy".

    Args:
        old_states: `state_by_name` before the growth.
        origins: parameter name in the grown model -> name in the old model.
        new_names: the names in the grown model that are copies. One without an origin starts afresh.

    Raises:
        ValueError: an unknown policy or origin, or an old parameter with state that no trained parameter takes over.
    """
    if policy not in ("zero", "copy"):
        raise ValueError(f"policy is {policy!r}; allowed are 'zero', 'copy'")
    unknown = sorted(set(origins.values()) - set(old_states))
    if unknown:
        raise ValueError(f"origins names parameters without optimizer state by name: {', '.join(unknown)}")
    kept = {old for new, old in origins.items() if new not in new_names}
    lost = sorted(name for name, state in old_states.items() if state and name not in kept)
    if lost:
        raise ValueError(f"no parameter of the grown model continues the state of {', '.join(lost)}")
    return {
        new: {} if new in new_names and policy == "zero" else dict(old_states[old]) for new, old in origins.items()
    }


OPTIMIZERS: dict[str, Callable[[list[dict], OptimizerSettings], torch.optim.Optimizer]] = {
    "muon_adamw": MuonAdamW,
    "adamw": _torch_adamw,
    "torch_muon": TorchMuonAdamW,
}
