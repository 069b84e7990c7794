"""Loading what is to be evaluated: export folders, run folders, Hub names; and saying exactly which model it was."""

import ctypes
import hashlib
import platform
import re
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import modeling_looped  # noqa: F401  (registers the looped models with the Auto classes)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def process_state() -> PartialState:
    """This process among those that were launched together; without an accelerator they talk over gloo."""
    return PartialState(cpu=not torch.cuda.is_available())


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks for the rest of the process; elsewhere it does nothing.

    By default it returns large blocks to the system, and a forward on the CPU then spends a good part of its time on
    page faults.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def resolve_model(source: str | Path) -> str:
    """A folder with a config.json as it is; a run folder to its newest model folder; anything else is a Hub name.

    Raises FileNotFoundError for an existing folder that holds no model.
    """
    folder = Path(source)
    if not folder.is_dir():
        return str(source)
    if (folder / "config.json").is_file():
        return str(folder)
    found = [config.parent for config in folder.rglob("config.json")]
    if not found:
        raise FileNotFoundError(f"{folder} holds no model: no config.json in it or below it.")

    def step(path: Path) -> tuple[int, float]:
        numbers = re.findall(r"\d+", str(path.relative_to(folder)))
        return (int(numbers[-1]) if numbers else -1, (path / "config.json").stat().st_mtime)

    return str(max(found, key=step))


def find_tokenizer(path: str) -> str:
    """Where the tokenizer of a model is: with it, or beside the checkpoints of the run that the model is one of."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "tokenizer_config.json").is_file():
        for parent in folder.resolve().parents[:2]:
            if (parent / "tokenizer").is_dir():
                return str(parent / "tokenizer")
    return path


def load_model(
    source: str | Path,
    dtype: str = "float32",
    device: str | torch.device | None = None,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, PreTrainedTokenizerBase, dict]:
    """(model in evaluation mode, tokenizer, model description for the results).

    Raises ValueError for an unknown dtype or a folder without tokenizer files, FileNotFoundError or OSError for a
    source that is nowhere.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    path = resolve_model(source)
    kwargs = {"revision": revision, "trust_remote_code": trust_remote_code}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], **kwargs).eval()
    where = str(tokenizer or find_tokenizer(path))
    try:
        loaded_tokenizer = AutoTokenizer.from_pretrained(where, **(kwargs if where == path else {}))
    except (OSError, ValueError) as error:
        raise ValueError(f"No tokenizer in {where}: name one with --tokenizer. ({error})") from error
    if device is not None:
        model.to(device)
    description = describe_model(model, str(source))
    description["revision"] = getattr(model.config, "_commit_hash", None) or revision
    description["weights_fingerprint"] = weights_fingerprint(model)
    return model, loaded_tokenizer, description


def describe_model(model: nn.Module, name: str) -> dict:
    """The results' `model` entry: what is known without reading the weights."""
    config = model.config
    return {
        "id": name,
        "revision": None,
        "model_type": config.model_type,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_loops": getattr(config, "num_loops", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_fingerprint": None,
    }


def check_num_loops(model: nn.Module, num_loops: list[int]) -> None:
    """Raises ValueError unless the model is looped and can run every one of these numbers of passes."""
    check = getattr(model.config, "check_num_loops", None)
    if check is None:
        raise ValueError(f"{model.config.model_type} is no looped model: it has no passes to vary.")
    if not num_loops or len(set(num_loops)) != len(num_loops):
        raise ValueError(f"num_loops must be distinct, and at least one; got {num_loops}.")
    for number in num_loops:
        check(number)


@torch.no_grad()
def weights_fingerprint(model: nn.Module) -> str:
    """sha256 over every parameter's name, shape, dtype and 64 of its elements: other weights, other fingerprint."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        picks = torch.linspace(0, len(flat) - 1, min(64, len(flat)), device=flat.device, dtype=torch.float64).long()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(flat[picks].double().cpu().numpy().tobytes())
    return digest.hexdigest()
