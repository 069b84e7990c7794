"""What a run writes down: metrics.jsonl while it goes, results.json at its end, and the line on the terminal."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

PACKAGES = ("modeling-looped", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, each with the number of steps completed under "step".

    A resumed run first drops the lines beyond the step it resumes from, so that no step is recorded twice.
    """

    def __init__(self, path: Path, resume_step: int):
        kept: list[str] = []
        if path.is_file():
            kept = [json.dumps(record) for record in read_metrics(path) if record["step"] <= resume_step]
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        os.replace(temporary, path)
        self._file = open(path, "a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


class RecordError(ValueError):
    """A file of a run that is not what it should be; the message names it."""


def read_results(path: Path) -> dict[str, Any]:
    """A results.json.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is not one of ours.
    """
    try:
        results = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path} is not JSON ({error}): remove it, and the run's command writes it again") from error
    if not isinstance(results, dict) or results.get("schema_version") != 1:
        raise RecordError(f"{path} has no schema_version 1: remove it, and the run's command writes it again")
    return results


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, in order. A line that is none, as a kill can cut it, is passed over."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


class Progress:
    """A bar with loss, tokens/s and time left on a terminal; elsewhere a line per logged step."""

    def __init__(self, num_steps: int, resume_step: int, label: str, enabled: bool):
        self._enabled = enabled
        self._label = label
        self._num_steps = num_steps
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=num_steps, initial=resume_step, desc=label, unit="step", dynamic_ncols=True)

    def step(self, completed: int, loss: float, tokens_per_second: float, num_loops: int, logged: bool) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tok/s, K={num_loops}", refresh=False)
            self._bar.update(1)
        elif logged:
            self.say(
                f"step {completed}/{self._num_steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tok/s  K={num_loops}"
            )

    def say(self, text: str) -> None:
        """Prints a line that stays, above the bar where there is one."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(f"{self._label}: {text}", file=sys.stderr)
        else:
            print(f"{self._label}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def provenance() -> dict[str, Any]:
    """Commit, package versions and machine: what a result needs to be made again."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "commit": _git_commit(),
        "packages": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "num_threads": torch.get_num_threads(),
    }


def _git_commit() -> str | None:
    try:
        finished = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or not a checkout
    return finished.stdout.strip()
