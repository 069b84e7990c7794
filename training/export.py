"""A run, or one of its checkpoints, as a folder that loads anywhere without this package.

    python -m training.export runs/demo/untied-grow out=exports/demo
    python -m training.export runs/demo/untied-grow out=exports/demo prompt="def main():" dtype=bf16

The folder holds the weights as safetensors, a config with the map of Auto classes, the model's code, tokenizer,
generation config, the card (model_cards/TEMPLATE.md filled from the run's results), results.json and resolved.yaml. It
is written beside its destination, loaded there by a process that cannot import modeling_looped, which must give the
same logits and writes a sample, and renamed.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer, GenerationConfig

from modeling_looped import LoopedForCausalLM
from modeling_looped.convert import check_output, replace_folder
from training.config import parse_overrides
from training.engine.checkpoint import CheckpointError, list_checkpoints, load_checkpoint
from training.engine.records import read_results
from training.values import RecipeError

TEMPLATE = Path(__file__).parent.parent / "model_cards" / "TEMPLATE.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Runs without this package: a finder in front of all others refuses it, so that only the exported code can serve.
LOAD_ALONE = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_looped", "training"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt, new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
inputs = tokenizer(prompt, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[0, -1].float()
torch.manual_seed(0)
tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=True, temperature=0.8, top_k=50)
print(json.dumps({"logits": logits.tolist(), "sample": tokenizer.decode(tokens[0], skip_special_tokens=True)}))
"""


class ExportError(Exception):
    """The export cannot be made or does not load; the message says what to do."""


@dataclass(frozen=True)
class ExportOptions:
    """Words of the command line.

    Attributes:
        out: folder to write; null for exports/<name of the run>.
        dtype: of the weights, "fp32" or "bf16".
        prompt: what the sample continues.
        new_tokens: length of the sample.
        license: identifier for the card; null leaves it unset.
        overwrite: replace an earlier export.
    """

    out: str | None = None
    dtype: str = "fp32"
    prompt: str = "def main():\n"
    new_tokens: int = 80
    license: str | None = None
    overwrite: bool = False

    def __post_init__(self):
        for name in ("out", "prompt", "license"):
            if not isinstance(getattr(self, name), str | None):
                raise ExportError(f"{name}={getattr(self, name)!r} must be text")
        if not isinstance(self.overwrite, bool):
            raise ExportError(f"overwrite={self.overwrite!r} must be true or false")
        if self.dtype not in DTYPES:
            raise ExportError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if type(self.new_tokens) is not int or self.new_tokens < 1:
            raise ExportError(f"new_tokens={self.new_tokens!r} must be an integer of at least 1")
        if not self.prompt:
            raise ExportError("prompt must not be empty")


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """(run_dir, checkpoint folder) of a run, whose newest checkpoint is taken, or of a checkpoint itself.

    Raises:
        ExportError: neither is there.
    """
    if (path / "manifest.json").is_file():
        return path.parent.parent, path
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise ExportError(f"{path} holds no checkpoint: give a run_dir with checkpoints/step-*, or one of these.")
    return path, checkpoints[-1]


def export(source: str | Path, options: ExportOptions) -> tuple[Path, str]:
    """Writes the export of a run or checkpoint and returns its folder and a sample from it.

    Raises:
        ExportError: no checkpoint, no tokenizer, or the folder does not load to the same logits.
        CheckpointError: the checkpoint is damaged.
        ValueError: the destination exists.
    """
    run_dir, checkpoint = find_checkpoint(Path(source))
    out = Path(options.out) if options.out is not None else Path("exports") / run_dir.name
    check_output(out, options.overwrite, "overwrite=true")
    config, weights, _, state = load_checkpoint(checkpoint)
    if not (run_dir / "tokenizer").is_dir():
        raise ExportError(f"{run_dir} has no tokenizer folder: export needs the one that the run was trained with.")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "tokenizer")
    tokenizer.model_max_length = config.max_position_embeddings

    model = LoopedForCausalLM(config)
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    model = model.to(DTYPES[options.dtype]).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id
    )
    results_file = run_dir / "results.json"
    results = read_results(results_file) if results_file.is_file() else None
    if results is not None and results["num_steps"] != state["step"]:
        results = None  # the results speak of the run's end, this is a checkpoint before it

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        partial = Path(scratch) / "model"
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for name in ("resolved.yaml", *(["results.json"] if results is not None else [])):
            if (run_dir / name).is_file():
                shutil.copyfile(run_dir / name, partial / name)
        card = fill_card(TEMPLATE.read_text(), out.name, results, options.license)
        (partial / "README.md").write_text(card)
        sample = load_alone(partial, model, tokenizer, options)
        replace_folder(partial, out, Path(scratch) / "replaced")
    return out, sample


def load_alone(folder: Path, model: LoopedForCausalLM, tokenizer, options: ExportOptions) -> str:
    """Loads `folder` without this package, compares logits with `model`, and returns a sample.

    Raises:
        ExportError: it does not load, or the logits differ.
    """
    command = [sys.executable, "-c", LOAD_ALONE, str(folder.resolve()), options.prompt, str(options.new_tokens)]
    with tempfile.TemporaryDirectory() as elsewhere:
        finished = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    if finished.returncode != 0:
        raise ExportError(f"The export does not load without this package:\n{finished.stderr[-2000:]}")
    answer = json.loads(finished.stdout.splitlines()[-1])
    with torch.no_grad():
        expected = model(**tokenizer(options.prompt, return_tensors="pt")).logits[0, -1].float()
    difference = (torch.tensor(answer["logits"]) - expected).abs().max().item()
    # in bf16 a sum in another order can end one rounding away
    tolerance = 1e-5 if options.dtype == "fp32" else 2**-6 * max(1.0, expected.abs().max().item())
    if not difference <= tolerance:
        raise ExportError(f"The loaded export gives other logits: they differ by up to {difference:.3g}.")
    return answer["sample"]


def fill_card(template: str, name: str, results: dict | None, license_name: str | None) -> str:
    """The template with every `{{ key }}` filled from `results`; lines whose value is missing are dropped.

    A key may carry a format: `{{ validation_loss:.4f }}`. No number reaches the card from anywhere else.
    """
    values = {"name": name, "license": license_name, **(results or {})}
    growths = values.get("growths") or []
    if growths:
        values |= {f"growth_{key}": value for key, value in growths[-1].items()}
    lines = []
    for line in template.splitlines():
        found = re.findall(r"\{\{ (\w+)(?::([^ }]+))? \}\}", line)
        if any(values.get(key) is None for key, _ in found):
            continue
        for key, form in found:
            marker = f"{{{{ {key}{':' + form if form else ''} }}}}"
            line = line.replace(marker, format(values[key], form))
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    sources = [word for word in words if "=" not in word]
    if len(sources) != 1 or sources[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if sources and sources[0] in ("-h", "--help") else 2
    try:
        given = parse_overrides([word for word in words if "=" in word])
        known = ExportOptions.__dataclass_fields__
        if unknown := [key for key in given if key not in known]:
            raise ExportError(f"{unknown[0]} is no option of export; options are: {', '.join(known)}")
        out, sample = export(sources[0], ExportOptions(**given))
    except (ExportError, CheckpointError, RecipeError, ValueError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.rule("sample")
    console.print(sample, markup=False, highlight=False)
    console.rule()
    console.print(f"exported to {out}; load it with")
    console.print(f"AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
