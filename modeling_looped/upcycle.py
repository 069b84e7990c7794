"""Upcycling: checkpoints that other code wrote become looped models with the same logits.

The paper's training writes `final.pt` (tensors, its settings, the final number of passes) and `result.json` (settings
and measurements); newer exports hold tensors and the final number of passes only, and result.json gives the settings.
`depth_scale_mode` none is a plain stack, loop a tied core, dep untied cores. Its RoPE turns the other way round than
Llama's, so the second half of each head's query and key rows changes sign. Settings that a LoopedConfig cannot express
are refused by name. Files are opened with torch.load(weights_only=True): nothing in them is executed.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from .configuration_looped import LoopedConfig
from .flops import pad_vocab_size
from .modeling_looped import LoopedForCausalLM, LoopedRotaryEmbedding
from .variants import split_thirds

PAPER_BLOCK_NAMES = {
    "attn.c_q": "self_attn.q_proj",
    "attn.c_k": "self_attn.k_proj",
    "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_gate": "mlp.gate_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
BOS_TOKEN_ID = 50256  # <|endoftext|> of the GPT-2 tokenizer, with which every document begins

# Settings without which the architecture is not known
REQUIRED_SETTINGS = (
    "depth_scale_mode",
    "n_layer",
    "n_head",
    "n_embd",
    "core_repetitions",
    "output_multiplier",
    "residual_branch_multiplier",
)
BOUNDARY_SETTINGS = ("recurrence_rmsnorm", "recurrence_emb_alpha", "decoder_inject")
SECTION_SETTINGS = ("prelude_layer_count", "core_layer_count", "coda_layer_count")
OPTIONAL_SETTINGS = ("head_dim", "wte_init_std", "uniform_init_scale", "final_eval_active_core_repetitions")
# Settings of which only one value can be expressed; None stands for absent
FIXED_SETTINGS: dict[str, tuple] = {
    "window_pattern": (None, "L"),
    "core_residual_branch_scale": (None, 1.0),
    "resolved_core_residual_branch_scale": (None, 1.0),
}

# (recurrence_rmsnorm, alpha is not zero, decoder_inject) -> name in BOUNDARY_OPERATORS
PAPER_BOUNDARIES: dict[tuple[str, bool, bool], str] = {
    ("recurrence_only", True, True): "norm_inject",
    ("recurrence_only", True, False): "norm_inject_between",
    ("recurrence_only", False, True): "norm",
    ("recurrence_only", False, False): "norm",
    ("none", True, True): "inject",
    ("none", False, True): "none",
    ("none", False, False): "none",
}


def from_paper_checkpoint(
    final_pt: str | Path,
    result_json: str | Path | None = None,
    vocab_size: int = 50257,
    max_position_embeddings: int = 2048,
) -> LoopedForCausalLM:
    """The model of a checkpoint that the paper's training wrote, in evaluation mode, with the same logits.

    Holds one copy of the weights in memory, and does not depend on the file afterwards. Weights keep their dtype, fp32
    in the paper's files.

    Args:
        final_pt: the checkpoint.
        result_json: the result file of the same run; needed where final.pt holds no settings.
        vocab_size: tokens of the tokenizer. Neither file says it: the rows of embedding and head are padded to a
            multiple of 64, and the pad rows are dropped.
        max_position_embeddings: context length in tokens, which neither file says.

    Raises FileNotFoundError for a missing file; ValueError, naming the file, for one that is cut, foreign or lacks
    tensors or settings, and for settings that no LoopedConfig expresses.
    """
    final_pt = Path(final_pt)
    # Checked on a memory map, before gigabytes are read
    shapes = {name: tuple(tensor.shape) for name, tensor in _paper_tensors(final_pt, mmap=True).items()}
    settings = read_paper_settings(final_pt, result_json)
    config = paper_config(settings, shapes, vocab_size, max_position_embeddings, source=str(final_pt))
    state_dict = convert_paper_tensors(_paper_tensors(final_pt, mmap=False), config)

    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    model.model.rotary_emb = LoopedRotaryEmbedding(config)  # its buffers are not in the checkpoint
    model.load_state_dict(state_dict, assign=True)
    return model.eval()


def read_paper_settings(final_pt: str | Path, result_json: str | Path | None = None) -> dict[str, Any]:
    """The settings of the run, in the paper's words, from final.pt and, where given, result.json.

    Holds every name of REQUIRED_SETTINGS and OPTIONAL_SETTINGS, and of BOUNDARY_SETTINGS and SECTION_SETTINGS unless
    the model is a plain stack; None is a setting that neither file gives. Raises ValueError where a required one is
    missing, or where the two files contradict each other; FileNotFoundError for a missing file.
    """
    final_pt = Path(final_pt)
    checkpoint = _load(final_pt, mmap=True)
    given = {name: value for name, value in checkpoint.items() if not isinstance(value, (dict, torch.Tensor))}
    args = checkpoint.get("args") or {}
    given |= {name: value for name, value in args.items() if value is not None}
    measured = read_json_object(result_json) if result_json is not None else {}

    settings = {}
    for name in (*REQUIRED_SETTINGS, *BOUNDARY_SETTINGS, *SECTION_SETTINGS, *OPTIONAL_SETTINGS, *FIXED_SETTINGS):
        values = {"final.pt": given.get(name), "result.json": measured.get(name)}
        if name in SECTION_SETTINGS and values["result.json"] is None:
            values["result.json"] = measured.get(f"resolved_{name}")
        known = {file: value for file, value in values.items() if value is not None}
        if len(known) == 2 and known["final.pt"] != known["result.json"]:
            raise ValueError(
                f"{final_pt} and {result_json} are not of one run: `{name}` is {known['final.pt']!r} in the first and "
                f"{known['result.json']!r} in the second."
            )
        settings[name] = next(iter(known.values()), None)

    required = list(REQUIRED_SETTINGS)
    if settings["depth_scale_mode"] != "none":
        required += BOUNDARY_SETTINGS
    missing = [name for name in required if settings[name] is None]
    files = str(final_pt) if result_json is None else f"{final_pt} and {result_json}"
    if missing:
        raise ValueError(f"{files}: settings missing: {', '.join(missing)}. Pass the result.json of the same run.")
    for name in ("n_layer", "n_head", "n_embd", "head_dim", *SECTION_SETTINGS):
        if settings[name] is not None and (type(settings[name]) is not int or settings[name] < 1):
            raise ValueError(f"{files}: `{name}` must be an integer of at least 1, got {settings[name]!r}.")
    for name in (
        "core_repetitions",
        "final_eval_active_core_repetitions",
        "recurrence_emb_alpha",
        "output_multiplier",
        "residual_branch_multiplier",
        "wte_init_std",
        "uniform_init_scale",
    ):
        if settings[name] is not None and type(settings[name]) not in (int, float):
            raise ValueError(f"{files}: `{name}` must be a number, got {settings[name]!r}.")
    return settings


def read_json_object(path: str | Path) -> dict[str, Any]:
    """The content of a JSON file; raises ValueError, naming the file, where it is not a JSON object."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, expected an object.")
    return content


def paper_config(
    settings: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    vocab_size: int,
    max_position_embeddings: int,
    source: str,
) -> LoopedConfig:
    """The LoopedConfig of a paper run, checked against its tensors.

    Args:
        settings: from `read_paper_settings`.
        shapes: name -> shape of the checkpoint's tensors.
        vocab_size, max_position_embeddings: in tokens.
        source: the file's name, for error messages.

    Raises ValueError for settings that cannot be expressed and for tensors that do not fit them.
    """
    for name, allowed in FIXED_SETTINGS.items():
        if settings.get(name) not in allowed:
            raise ValueError(f"{source}: `{name}` is {settings[name]!r}, which a LoopedConfig cannot express.")
    num_heads, hidden_size = settings["n_head"], settings["n_embd"]
    head_dim = settings["head_dim"] or hidden_size // num_heads
    # A tensor that is missing or has another number of dimensions is reported by _check_shapes
    gate_rows = [*shapes.get("transformer.h.0.mlp.c_gate.weight", ()), None][0]
    key_rows = [*shapes.get("transformer.h.0.attn.c_k.weight", ()), num_heads * head_dim][0]
    optional = {
        field: settings[name]
        for field, name in {"initializer_range": "wte_init_std", "uniform_init_scale": "uniform_init_scale"}.items()
        if settings[name] is not None
    }
    config = LoopedConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=gate_rows,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, key_rows // head_dim),
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        residual_multiplier=settings["residual_branch_multiplier"],
        logit_scale=settings["output_multiplier"],
        bos_token_id=BOS_TOKEN_ID if BOS_TOKEN_ID < vocab_size else None,
        eos_token_id=BOS_TOKEN_ID if BOS_TOKEN_ID < vocab_size else None,
        **_sections(settings, source),
        **_boundary(settings, source),
        **optional,
    )
    _check_shapes(shapes, config, source)
    return config


def convert_paper_tensors(tensors: dict[str, torch.Tensor], config: LoopedConfig) -> dict[str, torch.Tensor]:
    """State dict of a LoopedForCausalLM from the paper's tensors, which it takes over: `tensors` is emptied.

    Copies one tensor at a time, and only those that change: queries, keys, embedding and head. Tensors of several
    dtypes all become float32.
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype = torch.float32 if len(dtypes) > 1 else dtypes.pop()
    names = _paper_names(config)
    state_dict = {}
    for paper_name in list(tensors):
        name, tensor = names[paper_name], tensors.pop(paper_name).to(dtype)
        if paper_name in (EMBEDDING, HEAD):
            tensor = tensor[: config.vocab_size].clone()
        if ".q_proj." in name or ".k_proj." in name:
            # y2 = -x1 sin + x2 cos there, y2 = x1 sin + x2 cos here: negating x2 and y2 keeps every score
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            tensor.view(-1, 2, config.head_dim // 2, tensor.shape[-1])[:, 1].neg_()
        state_dict[name] = tensor
    return state_dict


def _sections(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """The section fields of LoopedConfig."""
    mode, num_blocks = settings["depth_scale_mode"], settings["n_layer"]
    if mode not in ("none", "loop", "dep"):
        raise ValueError(f"{source}: `depth_scale_mode` is {mode!r}, known are none, loop and dep.")
    if mode == "none":
        return _plain_sections(num_blocks, settings["n_embd"])
    sections = [settings[name] for name in SECTION_SETTINGS]
    if None in sections:
        sections = split_thirds(num_blocks)
    if sum(sections) != num_blocks:
        named = ", ".join(f"{name} {value}" for name, value in zip(SECTION_SETTINGS, sections, strict=True))
        raise ValueError(f"{source}: {named} do not add up to n_layer {num_blocks}.")
    stored = _whole_passes("core_repetitions", settings["core_repetitions"], source)
    active = settings["final_eval_active_core_repetitions"]
    if active is not None:
        active = _whole_passes("final_eval_active_core_repetitions", active, source)
    return {
        "num_prelude_blocks": sections[0],
        "num_core_blocks": sections[1],
        "num_coda_blocks": sections[2],
        "num_loops": stored if active is None else active,
        "num_stored_cores": 1 if mode == "loop" else stored,
        "tie_core": mode == "loop",
    }


def _plain_sections(num_blocks: int, hidden_size: int) -> dict[str, Any]:
    """Sections of a plain stack, which has none of its own: those of vanilla, or of deep-vanilla if the sizes fit."""
    depth, rest = divmod(hidden_size, 128)  # the paper's width is 128 d
    deep_vanilla = False
    if rest == 0 and depth >= 3 and depth != num_blocks:
        prelude, core, coda = split_thirds(depth)
        deep_vanilla = prelude + 2 * core + coda == num_blocks
    if not deep_vanilla:
        prelude, core, coda = split_thirds(num_blocks)
    return {
        "num_prelude_blocks": prelude,
        "num_core_blocks": core,
        "num_coda_blocks": coda,
        "num_loops": 2 if deep_vanilla else 1,
        "tie_core": not deep_vanilla,
    }


def _whole_passes(name: str, value: float, source: str) -> int:
    if float(value).is_integer() and value >= 1:
        return int(value)
    raise ValueError(f"{source}: `{name}` is {value}; a LoopedConfig has a whole number of passes, at least 1.")


def _boundary(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """The boundary fields of LoopedConfig."""
    if settings["depth_scale_mode"] == "none":
        return {"boundary_operator": "none"}
    norm, alpha, coda_inject = (settings[name] for name in BOUNDARY_SETTINGS)
    operator = PAPER_BOUNDARIES.get((norm, alpha != 0, bool(coda_inject)))
    if operator is None:
        raise ValueError(
            f"{source}: recurrence_rmsnorm={norm!r} with recurrence_emb_alpha={alpha} and "
            f"decoder_inject={coda_inject} is no boundary operator of a LoopedConfig. Expressible are "
            f"recurrence_rmsnorm 'recurrence_only', and 'none' with decoder_inject=True or recurrence_emb_alpha=0."
        )
    return {"boundary_operator": operator} | ({"boundary_alpha": alpha} if alpha != 0 else {})


def _paper_names(config: LoopedConfig) -> dict[str, str]:
    """The paper's tensor names -> ours, for a whole checkpoint."""
    names = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
    for block in range(config.num_stored_blocks):
        for theirs, ours in PAPER_BLOCK_NAMES.items():
            names[f"transformer.h.{block}.{theirs}.weight"] = f"model.layers.{block}.{ours}.weight"
    return names


def _check_shapes(shapes: dict[str, tuple[int, ...]], config: LoopedConfig, source: str) -> None:
    names = _paper_names(config)
    missing = [name for name in names if name not in shapes]
    unexpected = [name for name in shapes if name not in names]
    if missing or unexpected:
        found = [f"lacks {_some(missing)}"] if missing else []
        found += [f"holds the unknown {_some(unexpected)}"] if unexpected else []
        raise ValueError(
            f"{source} {' and '.join(found)}: its settings make {config.num_stored_blocks} stored blocks of "
            f"{len(PAPER_BLOCK_NAMES)} matrices, {EMBEDDING} and {HEAD}."
        )
    padded = pad_vocab_size(config.vocab_size)
    for name in (EMBEDDING, HEAD):
        if shapes[name][:1] not in ((config.vocab_size,), (padded,)):
            raise ValueError(
                f"{source}: {name} has shape {shapes[name]}, whose rows do not fit vocab_size={config.vocab_size} "
                f"(padded to {padded}). Give the tokenizer, or its vocabulary size, of the training."
            )
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    expected = {
        "attn.c_q": (queries, width),
        "attn.c_k": (keys, width),
        "attn.c_v": (keys, width),
        "attn.c_proj": (width, queries),
        "mlp.c_gate": (inner, width),
        "mlp.c_fc": (inner, width),
        "mlp.c_proj": (width, inner),
    }
    wanted = {EMBEDDING: (shapes[EMBEDDING][0], width), HEAD: (shapes[HEAD][0], width)}
    for block in range(config.num_stored_blocks):
        wanted |= {f"transformer.h.{block}.{name}.weight": shape for name, shape in expected.items()}
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(f"{source}: {name} has shape {shapes[name]}, expected {shape} from its settings.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _paper_tensors(final_pt: Path, mmap: bool) -> dict[str, torch.Tensor]:
    checkpoint = _load(final_pt, mmap)
    weights = checkpoint.get("model", checkpoint)
    weights = weights if isinstance(weights, dict) else {}
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    if EMBEDDING not in tensors:
        raise ValueError(f"{final_pt} is not a checkpoint of the paper's training: it has no tensor {EMBEDDING}.")
    return tensors


def _load(final_pt: Path, mmap: bool) -> dict[str, Any]:
    if not final_pt.is_file():
        raise FileNotFoundError(f"There is no file {final_pt}.")
    try:
        checkpoint = torch.load(final_pt, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0][:200]
        raise ValueError(f"{final_pt} cannot be read: it is cut, damaged or foreign ({reason}).") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("args") or {}, dict):
        raise ValueError(
            f"{final_pt} is not a checkpoint of the paper's training: expected a dict of tensors and settings."
        )
    return checkpoint
