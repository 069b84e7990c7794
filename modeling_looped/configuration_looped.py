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
"""Looped model configuration: architecture only. Derived counts follow from the sizes and are never set by hand."""

import difflib
from dataclasses import fields
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.utils import auto_docstring
from transformers.utils.type_validators import interval

# Setting one of these after construction changes how many blocks a forward executes.
SECTION_FIELDS = ("num_prelude_blocks", "num_core_blocks", "num_coda_blocks", "num_loops", "num_stored_cores")

# Words for passes elsewhere: an unknown keyword that holds one can only mean num_loops.
PASS_WORDS = ("loop", "recurren", "num_steps", "passes")


@auto_docstring(checkpoint="modeling-looped/untied-grow-d12")
@strict
class LoopedConfig(PreTrainedConfig):
    r"""
    num_prelude_blocks (`int`, *optional*, defaults to 2):
        Blocks executed once, before the core. 0 is allowed (a universal transformer).
    num_core_blocks (`int`, *optional*, defaults to 2):
        Blocks of one pass of the core.
    num_coda_blocks (`int`, *optional*, defaults to 2):
        Blocks executed once, after the core. 0 is allowed.
    num_loops (`int`, *optional*, defaults to 2):
        Passes of the core in one forward (K). A tied core takes any K >= 1; an untied core takes 1 to the number of
        cores it stores.
    tie_core (`bool`, *optional*, defaults to `True`):
        `True`: one stored core is applied `num_loops` times. `False`: every pass has a core of its own.
    num_stored_cores (`int`, *optional*):
        Cores that are stored: 1 when tied; when untied the number of cores in the checkpoint, by default `num_loops`.
        `num_loops` below it leaves the last cores dormant.
    qk_norm (`str`, *optional*, defaults to `"after_rope"`):
        RMS norm over each head of queries and keys, `"after_rope"` or `"before_rope"` the rotation, or `None`.
    norm_affine (`bool`, *optional*, defaults to `False`):
        Whether RMS norms carry a learned gain.
    embedding_norm (`bool`, *optional*, defaults to `True`):
        Whether the embedding output is RMS-normed before the first block.
    round_rope_to_bf16 (`bool`, *optional*, defaults to `True`):
        Whether cos and sin are rounded to bfloat16 whatever the compute dtype, as in the paper's runs.
    residual_multiplier (`float`, *optional*, defaults to 1.0):
        Constant on both branches of a block: `x + residual_multiplier * branch(norm(x))`.
    logit_scale (`float`, *optional*, defaults to 1.0):
        Constant on the logits.
    boundary_operator (`str`, *optional*, defaults to `"norm_inject"`):
        Name of the operator applied after every pass of the core, see `BOUNDARY_OPERATORS`.
    boundary_alpha (`float`, *optional*, defaults to 1.0):
        Weight of the prelude output in the boundary operator (the initial weight where it is learned).
    uniform_init_scale (`float`, *optional*):
        c of the paper's initialisation: projections into a block from U(-s, s), s = c / sqrt(hidden_size), projections
        out of a block and the head zero. `None` draws every matrix from N(0, initializer_range).

    ```python
    >>> from modeling_looped import LoopedConfig, LoopedForCausalLM

    >>> config = LoopedConfig(num_prelude_blocks=2, num_core_blocks=2, num_coda_blocks=2, num_loops=4)
    >>> config.num_hidden_layers  # executed blocks: 2 + 4 * 2 + 2
    12
    >>> model = LoopedForCausalLM(config)
    ```"""

    model_type = "looped"
    keys_to_ignore_at_inference = ["cache"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_prelude_blocks: int = 2
    num_core_blocks: int = 2
    num_coda_blocks: int = 2
    num_loops: int = 2
    tie_core: bool = True
    num_stored_cores: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int = 6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1.1920928955078125e-07  # machine epsilon of fp32, the default of torch's rms_norm
    norm_affine: bool = False
    embedding_norm: bool = True
    qk_norm: Literal["after_rope", "before_rope"] | None = "after_rope"
    residual_multiplier: float | int = 1.0
    logit_scale: float | int = 1.0
    boundary_operator: str = "norm_inject"
    boundary_alpha: float | int = 1.0
    initializer_range: float = interval(min=0.0, max=1.0)(default=0.02)
    uniform_init_scale: float | int | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    round_rope_to_bf16: bool = True
    attention_dropout: int | float | None = 0.0

    def __post_init__(self, **kwargs):
        self._refuse_misspelt(kwargs)
        if self.intermediate_size is None:
            # 8/3 of the width, up to the next multiple of 256 (the paper's SwiGLU rule)
            self.intermediate_size = 256 * -(-(8 * self.hidden_size // 3) // 256)
        if self.head_dim is None and self.num_attention_heads > 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_stored_cores is None:
            self.num_stored_cores = 1 if self.tie_core else self.num_loops
        executed = self._num_executed_blocks(self.num_loops)
        if self.num_hidden_layers is not None and self.num_hidden_layers != executed:
            raise ValueError(
                f"`num_hidden_layers` is derived: num_prelude_blocks + num_loops * num_core_blocks + num_coda_blocks "
                f"= {executed}, got {self.num_hidden_layers}. Set the section fields and leave it out."
            )
        self.num_hidden_layers = executed
        super().__post_init__(**kwargs)
        self._sections_resolved = True

    def __setattr__(self, name, value):
        # from_pretrained(path, num_loops=8) and config.num_loops = 8 arrive after __post_init__
        resolved = name in SECTION_FIELDS and self.__dict__.get("_sections_resolved", False)
        if resolved and name == "num_loops":
            self.check_num_loops(value)
        super().__setattr__(name, value)
        if resolved:
            super().__setattr__("num_hidden_layers", self._num_executed_blocks(self.num_loops))

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # the base class drops an override that names no field
        cls._refuse_misspelt(kwargs)
        # overrides are set after construction, one by one: the whole must hold together as well
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.validate_architecture()
        if config.num_hidden_layers != (executed := config._num_executed_blocks(config.num_loops)):
            raise ValueError(f"`num_hidden_layers` is derived: {executed} here, got {config.num_hidden_layers}.")
        return loaded

    def to_dict(self):
        output = super().to_dict()
        output.pop("_sections_resolved", None)
        return output

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Validates the architecture of the config."""
        for name, minimum in {
            "vocab_size": 1,
            "hidden_size": 1,
            "intermediate_size": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "num_prelude_blocks": 0,
            "num_core_blocks": 1,
            "num_coda_blocks": 0,
            "num_stored_cores": 1,
            "max_position_embeddings": 1,
        }.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"`{name}` must be at least {minimum}, got {getattr(self, name)}.")
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) is not a multiple of `num_attention_heads` "
                f"({self.num_attention_heads})."
            )
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) is not a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.head_dim < 2 or self.head_dim % 2 != 0:
            raise ValueError(f"`head_dim` must be even for rotary embeddings, got {self.head_dim}.")
        if self.tie_core and self.num_stored_cores != 1:
            raise ValueError(
                f"A tied core is stored once: `num_stored_cores` must be 1 with tie_core=True, "
                f"got {self.num_stored_cores}."
            )
        self.check_num_loops(self.num_loops)

    @property
    def num_stored_blocks(self) -> int:
        """Blocks in the checkpoint: prelude + stored cores + coda."""
        return self.num_prelude_blocks + self.num_stored_cores * self.num_core_blocks + self.num_coda_blocks

    def check_num_loops(self, num_loops: int) -> None:
        """Raises ValueError unless this model can execute `num_loops` passes of its core."""
        if isinstance(num_loops, bool) or not isinstance(num_loops, int) or num_loops < 1:
            raise ValueError(f"`num_loops` must be an integer of at least 1, got {num_loops!r}.")
        if not self.tie_core and num_loops > self.num_stored_cores:
            raise ValueError(
                f"`num_loops` is {num_loops}, but this untied model stores {self.num_stored_cores} cores: allowed are "
                f"1 to {self.num_stored_cores}. Use modeling_looped.growth.grow to add cores."
            )

    def schedule(self, num_loops: int | None = None) -> list[int]:
        """Indices into the stored blocks, in the order in which a forward with `num_loops` passes executes them.

        The position in this list is the cache slot of the execution.
        """
        num_loops = self.num_loops if num_loops is None else num_loops
        self.check_num_loops(num_loops)
        core = range(self.num_prelude_blocks, self.num_prelude_blocks + self.num_core_blocks)
        stride = 0 if self.tie_core else self.num_core_blocks
        passes = [block + loop_idx * stride for loop_idx in range(num_loops) for block in core]
        return [
            *range(self.num_prelude_blocks),
            *passes,
            *range(self.num_stored_blocks - self.num_coda_blocks, self.num_stored_blocks),
        ]

    def _num_executed_blocks(self, num_loops: int) -> int:
        return self.num_prelude_blocks + num_loops * self.num_core_blocks + self.num_coda_blocks

    @classmethod
    def _refuse_misspelt(cls, keywords: dict) -> None:
        # PreTrainedConfig keeps unknown keywords as attributes, so that a misspelt field would silently do nothing.
        own = [field.name for field in fields(cls)]
        for name in keywords:
            if name in own:
                continue
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.85)
            if not near and any(word in name for word in PASS_WORDS):
                near = ["num_loops"]
            if near:
                raise ValueError(f"LoopedConfig has no field `{name}`. Did you mean `{near[0]}`?")


__all__ = ["LoopedConfig"]
