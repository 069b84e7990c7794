"""Model forwards of the fast path: the head on chosen positions only, and suffixes that read a prefix's cache.

Nothing here knows a model's code. The head is narrowed by a hook on the output embedding, so that whatever a model
does to its logits (scaling, soft caps) still happens; a prefix is read through a cache whose layers hand out the
prefix's keys and values and keep nothing. `prefix_sharing_problem` tries the second on the model at hand and compares
it with a plain forward, so that a model for which it does not hold (recurrent state, sliding windows, position biases
that ignore position_ids) is evaluated without it.
"""

import inspect

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class PrefixLayer(DynamicLayer):
    """A cache layer that puts rows of a prefix's keys and values before the new ones, and stores nothing."""

    def __init__(self, layer: DynamicLayer, rows: torch.Tensor, length: int):
        super().__init__()
        self.source, self.rows, self.length = layer, rows, length
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.length

    def update(self, key_states, value_states, *args, **kwargs):
        rows = self.rows.to(key_states.device)
        keys = torch.cat([self.source.keys[rows, :, : self.length], key_states], dim=-2)
        values = torch.cat([self.source.values[rows, :, : self.length], value_states], dim=-2)
        return keys, values


def scored_logits(model: nn.Module, input_ids: torch.Tensor, positions: np.ndarray, **kwargs):
    """(logits, output) of a forward: float32 logits (N, V) at N flat, distinct, ascending positions of input_ids."""
    index = torch.from_numpy(positions)
    head = model.get_output_embeddings()

    def narrow(module, args):
        hidden = args[0]
        return (hidden.reshape(1, -1, hidden.shape[-1])[:, index.to(hidden.device)], *args[1:])

    handle = head.register_forward_pre_hook(narrow) if head is not None else None
    try:
        output = model(input_ids=input_ids, **kwargs)
    finally:
        if handle is not None:
            handle.remove()
    logits = output.logits
    if logits.shape[:-1] != (1, len(positions)):  # the model did not call its head as a module
        logits = logits.reshape(1, -1, logits.shape[-1])[:, index.to(logits.device)]
    return logits[0].float(), output


def cache_name(model: nn.Module) -> str:
    """The forward argument and output field that holds the cache: `cache` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def suffix_logits(
    model: nn.Module,
    cache: Cache,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    segments: torch.Tensor,
    rows: torch.Tensor,
    prefix_lengths: torch.Tensor,
    positions: np.ndarray,
    **kwargs,
) -> torch.Tensor:
    """float32 logits (N, V) of suffixes packed into rows (R, W), at N flat positions.

    segments (R, W) numbers the suffixes of a row, -1 for padding; a token sees the first prefix_lengths[r] tokens of
    row rows[r] of the cache, and the tokens of its own segment up to itself.
    """
    longest = int(prefix_lengths.max())
    width = input_ids.shape[1]
    sees_prefix = torch.arange(longest)[None, None, :] < prefix_lengths[:, None, None]
    same_segment = segments[:, :, None] == segments[:, None, :]
    sees_suffix = same_segment & torch.ones(width, width, dtype=torch.bool).tril()
    allowed = torch.cat([sees_prefix.expand(-1, width, -1), sees_suffix], dim=-1)[:, None]
    dtype, device = model.dtype, input_ids.device
    # additive: what both eager attention and SDPA take
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min).to(device)
    prefix = DynamicCache()
    prefix.layers = [PrefixLayer(layer, rows, longest) for layer in cache.layers]
    kwargs[cache_name(model)] = prefix
    logits, _ = scored_logits(
        model,
        input_ids,
        positions,
        attention_mask=mask,
        position_ids=position_ids.to(device),
        use_cache=True,
        **kwargs,
    )
    return logits


@torch.no_grad()
def prefix_sharing_problem(model: nn.Module, forward_kwargs: dict | None = None) -> str | None:
    """Why prefixes cannot be shared with this model, None when they can: tried on two short sequences."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no position_ids"
    if model.get_output_embeddings() is None:
        return "it has no output embedding"
    kwargs = forward_kwargs or {}
    device = next(model.parameters()).device
    ids = (torch.arange(24) * 7 + 1) % model.config.get_text_config().vocab_size
    short, long = ids[:5], ids[5:12]  # two prefixes; `short` is continued twice
    suffixes = [ids[12:15], ids[15:19]]
    complete = [torch.cat([short, suffix]) for suffix in suffixes]
    everything = np.arange(7)
    try:
        expected = [model(input_ids=c[None].to(device), use_cache=False, **kwargs).logits[0, 5:] for c in complete]
        padded = torch.stack([nn.functional.pad(short, (0, 2)), long]).to(device)
        output = model(input_ids=padded, use_cache=True, **kwargs)
        cache = getattr(output, cache_name(model))
        if not isinstance(cache, Cache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return "its cache is not one of plain keys and values"
        # the second row of the cache's prefix is longer, so that the first row has a gap before its suffixes
        packed = torch.cat(suffixes)[None].expand(2, -1).to(device)
        segments = torch.tensor([0, 0, 0, 1, 1, 1, 1]).expand(2, -1)
        steps = torch.tensor([0, 1, 2, 0, 1, 2, 3])
        lengths = torch.tensor([5, 7])
        found = suffix_logits(
            model,
            cache,
            packed,
            lengths[:, None] + steps,
            segments,
            torch.tensor([0, 1]),
            lengths,
            everything,
            **kwargs,
        )
    # whatever a model's own code raises for a 4-D mask, a cache or positions that it was not written for
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        return f"it refuses a packed forward ({type(error).__name__}: {error})"
    expected = torch.cat(expected).float()
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    difference = (found - expected).abs().max() / expected.std()
    if not difference < tolerance:  # also true for NaN
        return f"a packed forward gives other logits (by {difference:.1e} of their spread)"
    return None
