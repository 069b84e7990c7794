"""Export of a paper checkpoint, from a folder or from the Hub, to a folder that is ready for the Hub.

The folder holds safetensors weights, config with the map of Auto classes, the model's code, generation config,
tokenizer and a card with the values of result.json. It is written beside its destination and renamed when complete.
"""

import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .configuration_looped import LoopedConfig
from .flops import stored_parameters
from .upcycle import from_paper_checkpoint, read_json_object

DEFAULT_TOKENIZER = "openai-community/gpt2"
SOURCE_FILES = ("final.pt", "result.json", "README.md")


def convert(
    source: str | Path,
    output: str | Path,
    revision: str | None = None,
    tokenizer: str | Path = DEFAULT_TOKENIZER,
    overwrite: bool = False,
) -> LoopedConfig:
    """Writes the looped model of a paper checkpoint to the folder `output` and returns its config.

    Args:
        source: a folder with final.pt and, as the paper writes it, result.json; or the name of a Hub repository with
            them, of which only these and README.md are downloaded.
        output: the folder to make.
        revision: branch, tag or commit of a Hub repository. The card names the commit that it stood for.
        tokenizer: folder or Hub name of the tokenizer, whose length is the vocabulary size of the model.
        overwrite: replace `output` where it exists and holds a model.

    Raises FileNotFoundError or ValueError, before anything is written, for a source, tokenizer or output that cannot
    be used; those of `from_paper_checkpoint` for a checkpoint that cannot.
    """
    output = Path(output)
    check_output(output, overwrite)
    folder, origin = find_source(source, revision)
    if output.exists() and folder.resolve().is_relative_to(output.resolve()):
        raise ValueError(f"The output {output} would replace the source {folder}: choose another folder.")
    loaded_tokenizer = load_tokenizer(tokenizer)
    result_json = folder / "result.json"
    result = read_json_object(result_json) if result_json.is_file() else {}
    model = from_paper_checkpoint(
        folder / "final.pt", result_json if result else None, vocab_size=len(loaded_tokenizer)
    )
    for config in (model.config, model.generation_config):
        config.bos_token_id = loaded_tokenizer.bos_token_id
        config.eos_token_id = loaded_tokenizer.eos_token_id
    loaded_tokenizer.model_max_length = model.config.max_position_embeddings

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        partial = Path(scratch) / "model"
        partial.mkdir()
        model.save_pretrained(partial)
        loaded_tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(make_card(output.name, origin, model.config, result), encoding="utf-8")
        replace_folder(partial, output, Path(scratch) / "replaced")
    return model.config


def check_output(output: Path, overwrite: bool, option: str = "--overwrite") -> None:
    """Raises ValueError, naming the `option` that allows it, unless a model may be written to `output`."""
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"The output {output} exists already. Choose another, or pass {option} to replace it.")
    replaceable = output.is_dir() and ((output / "config.json").is_file() or not any(output.iterdir()))
    if not replaceable:
        raise ValueError(f"The output {output} exists and is no model folder (it has no config.json): not replaced.")


def find_source(source: str | Path, revision: str | None) -> tuple[Path, dict[str, str]]:
    """The local folder of `source`, and its repository and commit where it came from the Hub.

    Raises ValueError or FileNotFoundError for what is neither.
    """
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{source} is a local folder: --revision is for Hub repositories.")
        return folder, {}
    if folder.exists():
        raise ValueError(f"{source} is a file: give the folder that holds final.pt and result.json.")
    try:
        snapshot = Path(snapshot_download(str(source), revision=revision, allow_patterns=list(SOURCE_FILES)))
    except (OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ValueError(f"There is no folder {source}, and no Hub repository of that name{at}: {error}") from error
    return snapshot, {"repository": str(source), "commit": snapshot.name}


def load_tokenizer(tokenizer: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer at a folder or Hub name; raises ValueError saying what to pass where there is none."""
    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The tokenizer {tokenizer} could not be loaded: pass --tokenizer with a folder that holds one, or with a "
            f"Hub name. ({error})"
        ) from error


def replace_folder(new: Path, output: Path, aside: Path) -> None:
    """Moves `new` to `output`; what stood there goes to `aside`, and back if the move fails. One file system."""
    replacing = output.exists()
    if replacing:
        output.rename(aside)
    try:
        new.rename(output)
    except OSError:
        if replacing:
            aside.rename(output)
        raise


def make_card(name: str, origin: dict[str, str], config: LoopedConfig, result: dict[str, Any]) -> str:
    """The README.md of a converted checkpoint: how to use it, and what result.json says of the run."""
    front = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- looped"]
    where = "a checkpoint"
    if origin:
        front.append(f"base_model: {origin['repository']}")
        where = (
            f"[{origin['repository']}](https://huggingface.co/{origin['repository']}) at commit `{origin['commit']}`"
        )
    core = "one core" if config.tie_core else f"{config.num_stored_cores} cores"
    lines = [
        "---",
        *front,
        "---",
        "",
        f"# {name}",
        "",
        f"Converted by `looped convert` from {where} of the paper *How Model Growth, Recursion, and Boundary "
        "Operators Influence Scaling Exponents* (arXiv 2609.19107). Names and layout of the weights are new and the "
        "pad rows of the vocabulary are gone; the logits are the same.",
        "",
        f"{config.num_prelude_blocks} prelude blocks, {core} of {config.num_core_blocks} blocks executed in "
        f"{config.num_loops} passes, {config.num_coda_blocks} coda blocks; boundary operator "
        f"`{config.boundary_operator}`; {stored_parameters(config).total:,} stored parameters.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)',
        'inputs = tokenizer(tokenizer.bos_token + "The capital of France is", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
        "```",
        "",
        "In training every document began with the BOS token.",
        "",
        "## Run",
        "",
    ]
    grows = result.get("core_repetition_schedule", "none") != "none"
    shown = {key: label for key, label in RESULT_LABELS.items() if grows or key not in GROWTH_KEYS}
    rows = [(label, result[key]) for key, label in shown.items() if result.get(key) is not None]
    if rows:
        lines += ["From the result.json of the run.", "", "| | |", "|---|---|"]
        lines += [f"| {label} | {_format(value)} |" for label, value in rows]
    else:
        lines += ["The checkpoint came without a result.json."]
    return "\n".join(lines) + "\n"


def _format(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ", ".join(str(part) for part in value) if isinstance(value, list) else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}"


# Defaults stand here in runs that do not grow
GROWTH_KEYS = ("core_repetition_schedule", "core_repetition_low", "core_repetition_crossover_fraction")
# Keys of result.json that the card shows, in its order
RESULT_LABELS: dict[str, str] = {
    "final_val_loss": "validation loss, last step (nats per token)",
    "best_val_loss": "validation loss, best (nats per token)",
    "best_val_bpb": "validation bits per byte, best",
    "depth_scale_mode": "core (none: plain stack, loop: tied, dep: untied)",
    "core_repetitions": "passes of the core",
    "core_repetition_schedule": "growth",
    "core_repetition_low": "passes before growth",
    "core_repetition_crossover_fraction": "growth at this fraction of the steps",
    "parameter_count": "stored parameters, vocabulary padded",
    "completed_train_steps": "steps",
    "total_batch_size": "tokens per step",
    "num_epochs": "epochs",
    "estimated_training_flops": "training FLOPs",
    "effective_matrix_lr": "learning rate, matrices",
    "effective_embedding_lr": "learning rate, embedding",
    "effective_unembedding_lr": "learning rate, head",
    "weight_decay": "weight decay",
    "adam_betas": "AdamW betas",
    "adam_eps": "AdamW epsilon",
    "warmup_steps": "warmup steps",
    "warmdown_ratio": "share of the steps with falling learning rate",
    "seed": "seed",
}
