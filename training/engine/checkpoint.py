"""Checkpoints of a run: weights, optimizer state and position, keyed by parameter name, written whole or not at all.

A checkpoint is a folder `step-00000123` under `<run_dir>/checkpoints`: model.safetensors, optimizer.safetensors,
config.json (the architecture at that step, so that a grown model resumes grown), trainer.json and manifest.json with
the size and SHA-256 of each file. It is written to a temporary name, fsynced and renamed; a folder under the final
name is complete. Nothing in it depends on the number of processes.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from modeling_looped import LoopedConfig

FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "trainer.json")


class CheckpointError(Exception):
    """A checkpoint that is incomplete, altered, or cannot be written; the message names the file."""


def write_text(path: Path, content: str) -> None:
    """Writes `content` to a temporary name in the same folder, fsyncs and renames it to `path`; or leaves nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def lock_run_dir(run_dir: Path) -> AcquireReturnProxy:
    """Takes the run_dir for this process; a context manager that gives it back. A process that dies gives it back too.

    Raises:
        CheckpointError: another process trains there.
    """
    try:
        return FileLock(run_dir / ".lock").acquire(timeout=0)
    except Timeout as error:
        raise CheckpointError(
            f"Another process trains in {run_dir}. Wait for it, stop it, or choose another training.run_dir."
        ) from error


def check_run_dir(run_dir: Path, bytes_needed: int) -> None:
    """Raises CheckpointError unless `run_dir` can be created, written to, and holds `bytes_needed` more bytes."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"run_dir {run_dir} cannot be written: {error.strerror}. Choose another run_dir."
        ) from error
    free = shutil.disk_usage(run_dir).free
    if free < bytes_needed:
        raise CheckpointError(
            f"run_dir {run_dir} has {free / 1e9:.2f} GB free, its checkpoints need {bytes_needed / 1e9:.2f} GB. "
            f"Free some space, choose another run_dir, or lower training.keep_last."
        )


def save_checkpoint(
    run_dir: Path,
    step: int,
    config: LoopedConfig,
    weights: dict[str, torch.Tensor],
    optimizer_state: dict[str, dict[str, torch.Tensor]],
    trainer_state: dict[str, Any],
    keep_last: int | None,
) -> Path:
    """Writes the checkpoint that continues at `step`, then removes all but the newest `keep_last` (None keeps all).

    Args:
        weights: parameter name -> tensor.
        optimizer_state: parameter name -> state name -> tensor.
        trainer_state: JSON-serialisable counters.

    Raises:
        CheckpointError: the disk refused; earlier checkpoints are untouched.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step-{step:08d}"
    temporary = folder / f".tmp-step-{step:08d}"
    if final.is_dir():
        return final  # this step of this run, whole: there is nothing to add, and nothing is put at risk
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, temporary / FILES[0])
        flat = {f"{name}|{key}": value for name, state in optimizer_state.items() for key, value in state.items()}
        save_file({name: tensor.detach().contiguous() for name, tensor in flat.items()}, temporary / FILES[1])
        (temporary / FILES[2]).write_text(config.to_json_string(use_diff=False))
        (temporary / FILES[3]).write_text(json.dumps({"step": step, **trainer_state}, indent=2))
        manifest = {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": _sha256(temporary / name)} for name in FILES
        }
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2))
        for name in (*FILES, "manifest.json"):
            _fsync(temporary / name)
        os.replace(temporary, final)
        _fsync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to {folder}: {error}. Earlier checkpoints are intact."
        ) from error
    superseded = list_checkpoints(run_dir)[:-keep_last] if keep_last is not None else []
    for old in superseded:
        shutil.rmtree(old)
    return final


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{8}", path.name))


def load_checkpoint(path: Path) -> tuple[LoopedConfig, dict, dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """(config, weights, optimizer state, trainer state) of a checkpoint whose files match its manifest.

    Raises:
        CheckpointError: a file is missing, cut short or altered; the message names it.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: manifest.json cannot be read ({error}).") from error
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(name), dict) for name in FILES):
        raise CheckpointError(f"{path / 'manifest.json'} does not list the files of a checkpoint: it was altered.")
    for name in FILES:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing. Delete {path} to go on from the checkpoint before it.")
        if file.stat().st_size != manifest[name].get("bytes") or _sha256(file) != manifest[name].get("sha256"):
            raise CheckpointError(
                f"{file} does not match the manifest of its checkpoint: it was cut short or altered. "
                f"Delete {path} to go on from the checkpoint before it."
            )
    config = LoopedConfig.from_dict(json.loads((path / "config.json").read_text()))
    optimizer_state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(path / "optimizer.safetensors").items():
        parameter, key = name.rsplit("|", 1)
        optimizer_state.setdefault(parameter, {})[key] = tensor
    return (
        config,
        load_file(path / "model.safetensors"),
        optimizer_state,
        json.loads((path / "trainer.json").read_text()),
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
