"""Growth: a model of K passes becomes one of more passes, and every new parameter knows the old one that it copies.

Untied cores are copied by a growth operator and then trained apart; a tied core is stored once, so growing it only
raises `num_loops`. `grow` works on a model in memory and leaves it as it was; `grow_state_dict` does the same to the
tensors of a checkpoint, one at a time, so that a run can be grown offline whatever engine trained it.
A growth operator is a function (stored cores, cores wanted) -> for each new core the old core it copies; a new one is
one function and one line in GROWTH_OPERATORS.
"""

import copy
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_looped import LoopedConfig

BLOCK_NAME = re.compile(r"(?P<head>(?:^|.*?\.)layers\.)(?P<block>\d+)(?P<tail>\..*)")


@dataclass(frozen=True)
class Grown:
    """What `grow` returns.

    model: the larger model; it shares no tensor with the old one.
    origins: for every parameter of the larger model, the name of the old parameter whose values it holds.
    created: names of the parameters that are copies. The others are the old parameters, perhaps under a new name, and
        keep their optimizer state; the created ones have none.
    """

    model: PreTrainedModel
    origins: dict[str, str]
    created: set[str]


class GrowthPlan:
    """The block map of one growth: for each new stored block the old block that it copies.

    Raises ValueError where the growth cannot be done, before a tensor is touched.
    """

    def __init__(self, config: LoopedConfig, num_loops: int, operator: str = "stack"):
        if operator not in GROWTH_OPERATORS:
            near = difflib.get_close_matches(str(operator), GROWTH_OPERATORS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"`operator` is {operator!r}, allowed are: {', '.join(GROWTH_OPERATORS)}.{hint}")
        if isinstance(num_loops, bool) or not isinstance(num_loops, int):
            raise ValueError(f"`num_loops` must be an integer, got {num_loops!r}.")
        if num_loops <= config.num_loops:
            raise ValueError(
                f"`num_loops` must be more than the {config.num_loops} of the model that is grown, got {num_loops}."
            )
        self.old_num_blocks = config.num_stored_blocks
        self.config = copy.deepcopy(config)
        if config.tie_core:
            cores = [0]
        else:
            if config.num_loops < config.num_stored_cores:
                raise ValueError(
                    f"The model stores {config.num_stored_cores} cores and executes {config.num_loops}: the last "
                    f"{config.num_stored_cores - config.num_loops} are dormant. Wake them with "
                    f"`model.config.num_loops = {config.num_stored_cores}`, then grow beyond that."
                )
            cores = GROWTH_OPERATORS[operator](config.num_stored_cores, num_loops)
            self.config.num_stored_cores = num_loops
        self.config.num_loops = num_loops

        first_core = config.num_prelude_blocks
        first_coda = config.num_stored_blocks - config.num_coda_blocks
        self.sources = [
            *range(first_core),
            *(first_core + core * config.num_core_blocks + i for core in cores for i in range(config.num_core_blocks)),
            *range(first_coda, config.num_stored_blocks),
        ]
        # The first new block with a given source is that block, moved; the later ones are copies
        self.copies = {block for block, source in enumerate(self.sources) if source in self.sources[:block]}

    def origin(self, name: str) -> tuple[str, bool]:
        """The old name of the new parameter `name`, and whether the new one is a copy."""
        match = BLOCK_NAME.fullmatch(name)
        if match is None:
            return name, False
        block = int(match["block"])
        return f"{match['head']}{self.sources[block]}{match['tail']}", block in self.copies

    def destinations(self, name: str) -> list[tuple[str, bool]]:
        """The new names of the old parameter `name`, each with whether it is a copy."""
        match = BLOCK_NAME.fullmatch(name)
        if match is None:
            return [(name, False)]
        old_block = int(match["block"])
        if old_block >= self.old_num_blocks:
            raise ValueError(
                f"The state dict holds {name}, but its config stores only {self.old_num_blocks} blocks: they do not "
                f"belong together."
            )
        return [
            (f"{match['head']}{block}{match['tail']}", block in self.copies)
            for block, source in enumerate(self.sources)
            if source == old_block
        ]


def grow(model: PreTrainedModel, num_loops: int, operator: str = "stack") -> Grown:
    """A copy of `model` that executes `num_loops` passes, with new cores copied from the old ones where it is untied.

    Nothing else changes: dtype, device, training mode, frozen parameters, config and generation config are the old
    model's. The old model is not touched and shares no tensor with the new one; memory holds both, and no more. With
    `stack` a forward with the old number of passes gives the same logits, bit for bit. A tied model needs no new
    parameter: to grow it in place, without a copy, set `model.config.num_loops`.

    Args:
        model: any of the Looped classes, not wrapped (DistributedDataParallel, FSDP, torch.compile, PEFT).
        num_loops: passes after the growth (K), more than `model.config.num_loops`.
        operator: name in GROWTH_OPERATORS, used where the core is untied.

    Raises TypeError for a model that is not looped; ValueError for `num_loops` that is no integer or not larger, for
    an unknown operator, for one that cannot make this number of cores, and for a model with dormant cores.
    """
    if not isinstance(model, PreTrainedModel) or model.config.model_type != LoopedConfig.model_type:
        raise TypeError(f"grow takes a looped model, unwrapped, got {type(model).__name__}.")
    plan = GrowthPlan(model.config, num_loops, operator)
    grown = copy.deepcopy(model)
    config = grown.config
    config.num_stored_cores = plan.config.num_stored_cores
    config.num_loops = plan.config.num_loops

    body = grown.base_model
    old_layers = list(body.layers)
    shared = {id(config): config}  # a copied block keeps reading the one config of its model
    body.layers = nn.ModuleList(
        [
            copy.deepcopy(old_layers[source], dict(shared)) if block in plan.copies else old_layers[source]
            for block, source in enumerate(plan.sources)
        ]
    )
    for block, layer in enumerate(body.layers):
        layer.self_attn.layer_idx = block

    origins, created = {}, set()
    for name, _ in grown.named_parameters():
        origins[name], is_copy = plan.origin(name)
        if is_copy:
            created.add(name)
    return Grown(grown, origins, created)


def grow_state_dict(
    state_dict: Mapping[str, torch.Tensor], config: LoopedConfig, num_loops: int, operator: str = "stack"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of the grown model from the tensors of the old one, one old tensor in memory at a time.

    Args:
        state_dict: name -> tensor of the old model, or of a part of it such as one shard; any mapping, so that one
            that reads its tensors from a file when asked keeps the whole checkpoint out of memory.
        config: the config of the old model. `GrowthPlan(config, num_loops, operator).config` is the new one.
        num_loops, operator: as for `grow`.

    A tensor that is only moved is passed through; copies are clones, so that the result can be saved as it is. Raises
    ValueError as `grow` does, at once, and for a name outside the config's blocks.
    """
    plan = GrowthPlan(config, num_loops, operator)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in state_dict:
            tensor = state_dict[name]
            for new_name, is_copy in plan.destinations(name):
                yield new_name, tensor.clone() if is_copy else tensor

    return stream()


def stack(num_stored_cores: int, num_loops: int) -> list[int]:
    """C1 C2 -> C1 C2 C1 C2: new core j copies core j mod num_stored_cores. The paper's growth (arXiv 2609.19107)."""
    return [core % num_stored_cores for core in range(num_loops)]


def interleave(num_stored_cores: int, num_loops: int) -> list[int]:
    """C1 C2 -> C1 C1 C2 C2: each core is repeated in place. `num_loops` must be a multiple of the stored cores."""
    if num_loops % num_stored_cores != 0:
        raise ValueError(
            f"`interleave` repeats each of the {num_stored_cores} cores equally often: `num_loops` must be a multiple "
            f"of {num_stored_cores}, got {num_loops}."
        )
    repeats = num_loops // num_stored_cores
    return [core // repeats for core in range(num_loops)]


GROWTH_OPERATORS: dict[str, Callable[[int, int], list[int]]] = {
    "stack": stack,
    "interleave": interleave,
}
