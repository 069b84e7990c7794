"""The results file of an evaluation: its schema, reading and writing, and the partial results of a run under way.

One JSON object, see SCHEMA. Everything but `timing` and `environment` is the same whenever and on however many
processes the evaluation is repeated. A partial run has no aggregate: `aggregate.value` is null and `reason` says why.
"""

import json
import math
import os
from pathlib import Path

from eval.scoring import Outcome

SCHEMA_VERSION = 1
NUMBER = (int, float)
OPTIONAL_NUMBER = (int, float, type(None))
OPTIONAL_TEXT = (str, type(None))

# key -> type(s), a nested schema, or [schema of every element]; "*" stands for any key
SCHEMA = {
    "schema_version": int,
    "model": {
        "id": str,
        "revision": OPTIONAL_TEXT,
        "model_type": str,
        "num_parameters": int,
        "num_loops": (int, type(None)),
        "dtype": str,
        "weights_fingerprint": OPTIONAL_TEXT,
    },
    "settings": {
        "task_set": str,
        "tasks": [str],
        "compat": str,
        "seeds": [int],
        "max_per_task": (int, type(None)),
        "context_length": (int, type(None)),
        "empty_span": str,
        "bos_token": str,
        "core_version": str,
        "tokens_per_batch": int,
        "path": str,
    },
    "data": {"task_set_fingerprint": str, "files": {"*": str}},
    "tasks": {
        "*": {
            "status": str,  # complete or failed
            "error": OPTIONAL_TEXT,
            "type": str,
            "num_fewshot": int,
            "num_examples": int,
            "num_tokens": int,
            "num_empty_spans": int,
            "chance_percent": {"*": NUMBER},
            "accuracy": OPTIONAL_NUMBER,
            "accuracy_std": OPTIONAL_NUMBER,
            "accuracy_per_seed": {"*": NUMBER},
            "centered": OPTIONAL_NUMBER,
            "answer_nll": OPTIONAL_NUMBER,
            "answer_bits_per_byte": OPTIONAL_NUMBER,
        }
    },
    "aggregate": {
        "metric": str,
        "version": str,
        "status": str,  # complete, partial or failed
        "reason": OPTIONAL_TEXT,
        "value": OPTIONAL_NUMBER,
        "std": OPTIONAL_NUMBER,
        "per_seed": {"*": NUMBER},
        "by_version": {"*": NUMBER},
        "filtered": OPTIONAL_NUMBER,
        "answer_nll": OPTIONAL_NUMBER,
        "answer_bits_per_byte": OPTIONAL_NUMBER,
    },
    "timing": {
        "wall_seconds": NUMBER,
        "num_sequence_tokens": int,
        "num_executed_tokens": int,
        "num_resumed_examples": int,
        "finished": str,
    },
    "environment": {"*": (str, int, type(None))},
    "examples": {
        "*": [
            {
                "seed": int,
                "index": int,
                "correct": bool,
                "prediction": int,
                "gold": int,
                "option_losses": [OPTIONAL_NUMBER],
                "span_loss": NUMBER,
                "answer_nll": OPTIONAL_NUMBER,
            }
        ]
    },
}


def check_results(results: dict, schema=SCHEMA, where: str = "results") -> None:
    """Raises ValueError, naming the place, unless `results` is exactly what the schema says."""
    if isinstance(schema, dict):
        if not isinstance(results, dict):
            raise ValueError(f"{where}: expected an object, got {type(results).__name__}.")
        if "*" in schema:
            for key, value in results.items():
                check_results(value, schema["*"], f"{where}.{key}")
            return
        unknown, missing = results.keys() - schema.keys(), schema.keys() - results.keys()
        if unknown or missing:
            raise ValueError(f"{where}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}.")
        for key, value in results.items():
            check_results(value, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        if not isinstance(results, list):
            raise ValueError(f"{where}: expected a list, got {type(results).__name__}.")
        for i, value in enumerate(results):
            check_results(value, schema[0], f"{where}[{i}]")
    elif not isinstance(results, schema) or (isinstance(results, float) and not math.isfinite(results)):
        names = schema.__name__ if isinstance(schema, type) else " or ".join(kind.__name__ for kind in schema)
        raise ValueError(f"{where}: expected {names}, got {results!r}.")


def write_results(results: dict, path: str | Path) -> None:
    """Checks and writes the results; the file appears complete or not at all."""
    check_results(results)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_results(path: str | Path) -> dict:
    """Results as written by `write_results`; raises ValueError, naming the file, for anything else."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        check_results(results)
    except (json.JSONDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not a results file of schema version {SCHEMA_VERSION}: {error}") from error
    return results


def or_none(value: float) -> float | None:
    """NaN as None: JSON has no NaN."""
    return value if math.isfinite(value) else None


class PartialResults:
    """Outcomes of finished batches in a folder beside the results file, so that a killed run is taken up again.

    Every process appends to a file of its own; all are read. `identity` is all that decides the outcomes; a folder of
    another evaluation is refused with ValueError.
    """

    def __init__(self, folder: str | Path, identity: dict, process_index: int = 0):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_identity(json.loads(json.dumps(identity)), process_index)
        self.outcomes: dict[int, Outcome] = {}
        for path in sorted(self.folder.glob("outcomes-*.jsonl")):
            self._read(path)
        self._file = open(self.folder / f"outcomes-{process_index}.jsonl", "a", encoding="utf-8")

    def _check_identity(self, identity: dict, process_index: int) -> None:
        path = self.folder / "identity.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differing = sorted(key for key in identity.keys() | found.keys() if identity.get(key) != found.get(key))
            if differing:
                values = "; ".join(f"{key}: {found.get(key)!r} there, {identity.get(key)!r} now" for key in differing)
                raise ValueError(
                    f"{self.folder} holds partial results of another evaluation ({values}). "
                    f"Delete the folder to start again, or write to another output."
                )
        elif process_index == 0:
            temporary = path.with_name("identity.json.tmp")
            temporary.write_text(json.dumps(identity, indent=1), encoding="utf-8")
            os.replace(temporary, path)

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]  # a killed process may leave half a line
        if len(complete) < len(content):
            with open(path, "r+b") as f:
                f.truncate(len(complete))
        for line in complete.splitlines():
            for example, *fields in json.loads(line):
                self.outcomes[example] = Outcome(*fields)

    def add(self, outcomes: list[tuple[int, Outcome]]) -> None:
        """Keeps a batch's outcomes, on disk when this returns."""
        self.outcomes.update(outcomes)
        rows = [[example, *vars(outcome).values()] for example, outcome in outcomes]
        self._file.write(json.dumps(rows) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def delete_folder(folder: str | Path) -> None:
        """Removes a folder of partial results: the results are written."""
        folder = Path(folder)
        for path in [*folder.glob("outcomes-*.jsonl"), folder / "identity.json"]:
            path.unlink(missing_ok=True)
        folder.rmdir()
