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
"""Looped causal language models: prelude, core x num_loops with a boundary operator after every pass, coda.

Read in transformers' order: norm, rotary embedding, MLP, attention, block, base model, causal LM. A comment marks each
place that differs from a plain decoder. Over 500 lines because a checkpoint carries its model as one readable file.
Shapes: B batch, T tokens, C hidden_size, H heads, D head_dim, V vocabulary.
"""

import copy
import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_kernel_forward_from_hub, use_kernelized_func
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .boundary import BoundaryOperator, make_boundary_operator
from .configuration_looped import PASS_WORDS, LoopedConfig
from .linear_cross_entropy import linear_causal_lm_loss
from .rms_norm import rms_norm

logger = logging.get_logger(__name__)


class LoopedRMSNorm(nn.Module):
    """RMS norm, by default without a gain, unlike Llama's."""

    def __init__(self, size: int, config: LoopedConfig):
        super().__init__()
        self.size = size
        # CODEPATH: a gain in converted dense checkpoints, none in the paper's
        self.weight = nn.Parameter(torch.ones(size)) if config.norm_affine else None
        self.eps = config.rms_norm_eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, affine={self.weight is not None}"


class LoopedRotaryEmbedding(nn.Module):
    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings

        self.config = config

        self.rope_type = self.config.rope_parameters["rope_type"]
        rope_init_fn: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = rope_init_fn(self.config)

        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.original_inv_freq = nn.Buffer(inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: LoopedConfig, **kwargs) -> tuple[torch.Tensor, float]:
        """Inverse frequencies `(D / 2,)` of the default RoPE and its factor on cos and sin, always 1.0."""
        base = config.rope_parameters["rope_theta"]
        dim = config.head_dim
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        return inv_freq, 1.0

    @dynamic_rope_update  # power user: used with advanced RoPE types (e.g. dynamic rope)
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        # CODEPATH: rounded in the paper's checkpoints and runs, in fp32 too; exact in converted dense ones
        if self.config.round_rope_to_bf16:
            cos, sin = cos.to(torch.bfloat16), sin.to(torch.bfloat16)

        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x1, x2) of the two halves of the last dimension; cos and sin hold one value a pair."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


@use_kernel_forward_from_hub("rotary_pos_emb")
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Rotates queries and keys `(B, H, T, D)` by cos and sin `(B, T, D)`; returns both, in the shapes they came in.

    The halves of cos and sin are equal, so one is enough: the numbers of x * cos + rotate_half(x) * sin, bit for bit,
    with half the work.
    """
    cos = cos.unsqueeze(unsqueeze_dim).chunk(2, dim=-1)[0]
    sin = sin.unsqueeze(unsqueeze_dim).chunk(2, dim=-1)[0]
    return rotate(q, cos, sin), rotate(k, cos, sin)


class LoopedMLP(nn.Module):
    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """Repeats each key/value head n_rep times: (B, H_kv, T, D) to (B, H_kv * n_rep, T, D)."""
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
):
    key_states = repeat_kv(key, module.num_key_value_groups)
    value_states = repeat_kv(value, module.num_key_value_groups)

    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask

    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()

    return attn_output, attn_weights


class AttentionCall:
    """One execution of an attention module: the module, seen with the cache slot of this pass as its layer_idx.

    Serving backends look their key/value store up by `module.layer_idx`. A tied core runs K times per forward, so the
    module's own index would make its passes overwrite each other. Holds no state; everything else is the module's.
    """

    def __init__(self, module: nn.Module, cache_offset: int):
        # torch.compile guards on an attribute's value, on a tuple's only where it is read: one graph for all passes
        self.execution = (module, cache_offset)

    @property
    def layer_idx(self) -> int:
        module, cache_offset = self.execution
        return module.layer_idx + cache_offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.execution[0], name)


@use_kernelized_func(apply_rotary_pos_emb)
class LoopedAttention(nn.Module):
    """Multi-head attention with RMS-normed queries and keys."""

    def __init__(self, config: LoopedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        # CODEPATH: normed in the paper's and Qwen3-like checkpoints, not in Llama-like ones
        if config.qk_norm is not None:
            self.q_norm = LoopedRMSNorm(self.head_dim, config)
            self.k_norm = LoopedRMSNorm(self.head_dim, config)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        cache_offset: int = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        call = AttentionCall(self, cache_offset)

        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        # CODEPATH: Qwen3-like checkpoints
        if self.config.qk_norm == "before_rope":
            query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)
        # unlike Llama: tables in the dtype of the queries, as in the paper, so that autocast does not rotate in fp32
        cos, sin = (table.to(query_states.dtype) for table in position_embeddings)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        # CODEPATH: the paper's checkpoints; unlike Qwen3, the norm comes after the rotation
        if self.config.qk_norm == "after_rope":
            query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)

        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states, call.layer_idx, kwargs=kwargs)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )

        attn_output, attn_weights = attention_interface(
            call,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            **kwargs,
        )

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


class LoopedDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: LoopedConfig, layer_idx: int):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.residual_multiplier = config.residual_multiplier

        self.self_attn = LoopedAttention(config=config, layer_idx=layer_idx)

        self.mlp = LoopedMLP(config)
        self.input_layernorm = LoopedRMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = LoopedRMSNorm(config.hidden_size, config)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache_offset: int = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            cache_offset=cache_offset,
            **kwargs,
        )
        # unlike Llama: both branches are scaled by a constant
        hidden_states = torch.add(residual, hidden_states, alpha=self.residual_multiplier)

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = torch.add(residual, hidden_states, alpha=self.residual_multiplier)
        return hidden_states


@auto_docstring
class LoopedPreTrainedModel(PreTrainedModel):
    config: LoopedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LoopedDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True

    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": LoopedDecoderLayer,
        "attentions": LoopedAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        scale = self.config.uniform_init_scale
        if isinstance(module, BoundaryOperator):
            module.init_parameters()
        elif scale is None:
            return
        # The paper's initialisation: every branch and the head start at zero
        elif isinstance(module, LoopedAttention):
            bound = scale / self.config.hidden_size**0.5
            for projection in (module.q_proj, module.k_proj, module.v_proj):
                init.uniform_(projection.weight, -bound, bound)
            init.zeros_(module.o_proj.weight)
        elif isinstance(module, LoopedMLP):
            bound = scale / self.config.hidden_size**0.5
            for projection in (module.gate_proj, module.up_proj):
                init.uniform_(projection.weight, -bound, bound)
            init.zeros_(module.down_proj.weight)
        elif isinstance(module, LoopedForCausalLM) and not self.config.tie_word_embeddings:
            init.zeros_(module.lm_head.weight)

    def _initialize_weights(self, module, is_custom_code=False):
        # For custom code transformers passes over modules without a parameter of their own, and with them the branches
        # above for attention, MLP and head. `_init_weights` only uses functions that spare loaded weights.
        super()._initialize_weights(module)

    def executed_schedule(self, num_loops: int | None = None) -> list[int]:
        """`config.schedule(num_loops)`, cut short while `assistant_early_exit` drafts with the first blocks alone."""
        schedule = self.config.schedule(num_loops)
        # CODEPATH: any checkpoint; generate lowers config.num_hidden_layers while it drafts
        if self.config.num_hidden_layers < len(self.config.schedule()):
            schedule = schedule[: self.config.num_hidden_layers]
        return schedule

    def save_pretrained(self, save_directory, *args, **kwargs):
        # transformers maps only the class that is saved; a checkpoint of ours loads by every Auto class, and the map
        # names the code beside the weights, not the repository that they came from.
        if self.is_remote_code():
            self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)


def refuse_misspelt_keywords(kwargs: dict) -> None:
    """Raises TypeError for a keyword that is meant for us but would be swallowed: `num_lops`, `num_steps`."""
    own = ("num_loops", "skip_logits", "input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels")
    for name in kwargs:
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.8)
        if not near and any(word in name for word in PASS_WORDS):
            near = ["num_loops"]
        if near:
            raise TypeError(f"forward() has no argument `{name}`. Did you mean `{near[0]}`?")


def fit_cache(cache: Cache, num_slots: int) -> None:
    """Gives a still empty cache `num_slots` layers; raises ValueError if a used cache has another number."""
    if len(cache.layers) in (0, num_slots):  # 0: a DynamicCache without config, which grows as it is written
        return
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"The cache was filled by a forward with {len(cache.layers)} executed blocks, this one executes "
            f"{num_slots}: `num_loops` cannot change within a sequence. Start a new cache, or keep `num_loops`."
        )
    while len(cache.layers) < num_slots:
        cache.layers.append(copy.deepcopy(cache.layers[0]))
    del cache.layers[num_slots:]


@auto_docstring
class LoopedModel(LoopedPreTrainedModel):
    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        # CODEPATH: normed in the paper's checkpoints, not in converted dense ones
        if config.embedding_norm:
            self.embed_norm = LoopedRMSNorm(config.hidden_size, config)
        # One flat list in stored order: prelude, core 1..num_stored_cores, coda. config.schedule says what runs when.
        self.layers = nn.ModuleList(
            [LoopedDecoderLayer(config, layer_idx) for layer_idx in range(config.num_stored_blocks)]
        )
        self.boundary = make_boundary_operator(config)
        self.norm = LoopedRMSNorm(config.hidden_size, config)
        self.rotary_emb = LoopedRotaryEmbedding(config=config)
        self.gradient_checkpointing = False

        # Initialize weights and apply final processing
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        num_loops (`int`, *optional*, defaults to `config.num_loops`):
            Passes of the core in this forward. A tied core takes any number from 1, an untied one up to the number of
            cores that it stores.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        num_loops = self.config.num_loops if num_loops is None else num_loops
        schedule = self.executed_schedule(num_loops)
        if not torch.compiler.is_compiling():
            refuse_misspelt_keywords(kwargs)
            if self.config.tie_core and num_loops > self.config.num_loops:
                logger.warning_once(
                    f"Running {num_loops} passes of a core whose config says {self.config.num_loops}: it may not have "
                    f"been trained for that many."
                )

        if inputs_embeds is None:
            inputs_embeds: torch.Tensor = self.embed_tokens(input_ids)

        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if isinstance(cache, Cache):
            fit_cache(cache, len(schedule))

        if position_ids is None:
            past_seen_tokens = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )

        hidden_states = inputs_embeds
        # CODEPATH: normed in the paper's checkpoints, not in converted dense ones
        if self.config.embedding_norm:
            hidden_states = self.embed_norm(hidden_states)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        def execute(hidden_states: torch.Tensor, first_slot: int, num_blocks: int) -> torch.Tensor:
            for slot, layer in enumerate(schedule[first_slot : first_slot + num_blocks], start=first_slot):
                hidden_states = self.layers[layer](
                    hidden_states,
                    attention_mask=causal_mask,
                    position_embeddings=position_embeddings,
                    position_ids=position_ids,
                    cache=cache,
                    use_cache=use_cache,
                    cache_offset=slot - layer,
                    **kwargs,
                )
            return hidden_states

        hidden_states = execute(hidden_states, 0, self.config.num_prelude_blocks)

        prelude_output = hidden_states
        first_slot = self.config.num_prelude_blocks
        for loop_idx in range(num_loops):
            hidden_states = execute(hidden_states, first_slot, self.config.num_core_blocks)
            first_slot += self.config.num_core_blocks
            if first_slot <= len(schedule):
                hidden_states = self.boundary(
                    hidden_states, prelude_output.to(hidden_states.device), before_coda=loop_idx == num_loops - 1
                )

        hidden_states = execute(hidden_states, first_slot, self.config.num_coda_blocks)

        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            cache=cache,
        )


@auto_docstring
class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.model = LoopedModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        # Initialize weights and apply final processing
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_loops: int | None = None,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        r"""
        num_loops (`int`, *optional*, defaults to `config.num_loops`):
            Passes of the core in this forward. A tied core takes any number from 1, an untied one up to the number of
            cores that it stores.
        skip_logits (`bool`, *optional*, defaults to `False`):
            With `labels`, computes the loss a chunk of tokens at a time and returns `logits=None`: the logits of the
            whole batch never exist. For training.

        Example:

        ```python
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer

        >>> model = AutoModelForCausalLM.from_pretrained("exports/untied-grow", trust_remote_code=True)
        >>> tokenizer = AutoTokenizer.from_pretrained("exports/untied-grow", trust_remote_code=True)
        >>> inputs = tokenizer("def main():", return_tensors="pt")
        >>> tokens = model.generate(**inputs, max_new_tokens=30, num_loops=2)
        ```"""
        if skip_logits and labels is None:
            raise ValueError("`skip_logits=True` computes a loss without logits: pass `labels` too.")
        if skip_logits and not isinstance(self.lm_head, nn.Linear):
            raise ValueError(
                f"`skip_logits=True` reads the weight of `lm_head` and would miss what {type(self.lm_head).__name__} "
                f"adds to it. Leave it out, or keep adapters off `lm_head`."
            )

        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_loops=num_loops,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state

        loss, logits = None, None
        if skip_logits:
            loss = linear_causal_lm_loss(
                hidden_states, self.lm_head.weight, labels, scale=float(self.config.logit_scale), **kwargs
            )
        else:
            hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
            logits = self.lm_head(hidden_states)
            # CODEPATH: 0.5 in the paper's vanilla checkpoints, 1 in the rest and in converted dense ones
            if self.config.logit_scale != 1.0:
                logits = logits * self.config.logit_scale
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("cache")
        if not isinstance(cache, Cache):
            return
        fit_cache(cache, len(self.executed_schedule(model_kwargs.get("num_loops"))))
        # A prompt without a new token would be run a second time, behind itself. generate drops a mask of ones.
        attention_mask, cached = model_kwargs.get("attention_mask"), cache.get_seq_length()
        prompt_length = generation_config._mask_length if attention_mask is None else attention_mask.shape[-1]
        if 0 < prompt_length <= cached:
            raise ValueError(
                f"The cache holds {cached} tokens and the prompt has {prompt_length}: pass the whole text, cached and "
                f"new, with at least one new token, or shorten the cache by `cache.crop(-n)`."
            )


class LoopedForSequenceClassification(GenericForSequenceClassification, LoopedPreTrainedModel): ...


class LoopedForQuestionAnswering(GenericForQuestionAnswering, LoopedPreTrainedModel):
    base_model_prefix = "transformer"  # the name that GenericForQuestionAnswering gives its base model


class LoopedForTokenClassification(GenericForTokenClassification, LoopedPreTrainedModel): ...


AUTO_MAP = {
    "AutoConfig": "configuration_looped.LoopedConfig",
    "AutoModel": "modeling_looped.LoopedModel",
    "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM",
    "AutoModelForSequenceClassification": "modeling_looped.LoopedForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_looped.LoopedForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_looped.LoopedForQuestionAnswering",
}


__all__ = [
    "LoopedForCausalLM",
    "LoopedModel",
    "LoopedPreTrainedModel",
    "LoopedForSequenceClassification",
    "LoopedForQuestionAnswering",
    "LoopedForTokenClassification",
]
