"""Run tables: one row per run, columns under fixed names, with the conventions behind the numbers declared.

    table = read_table("runs.csv", conventions={"loss": "nats", "parameters": "stored, without embedding"})

Reads CSV (leading `# key: value` lines declare conventions), JSONL (a first record {"conventions": {...}} likewise),
or a folder of run_dirs (each with results.json; conventions.json beside them). A file NAME.conventions.json next to
the table is read too. Column names of other people are translated by ALIASES; a column is never rescaled without
being told.
"""

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# what may be declared, and what the declaration must answer
CONVENTIONS = {
    "loss": "unit of the loss: nats, bits (per token) or bits_per_byte; and on which data",
    "parameters": "stored or executed; with or without embedding and head; padded rows or not",
    "flops": "rule of compute_flops: 6 N T, or with head / attention; forward + backward",
    "tokens": "tokens seen in training (with repetition) or unique",
    "recipe": "how each run was tuned; one recipe per arm",
}

ALIASES = {
    "compute_flops": ("compute_flops", "flops", "compute", "training_flops", "total_flops", "c",
                      "compute_flops_no_attention", "approx_compute_flops"),
    "loss": ("loss", "val_loss", "validation_loss", "final_loss", "eval_loss", "l", "test_loss", "loss_star"),
    "num_parameters": ("num_parameters", "n_params", "params", "parameters", "n", "n_stored", "num_stored_parameters",
                       "model_size", "n_star"),
    "num_tokens": ("num_tokens", "tokens", "d", "t", "training_tokens", "t_star"),
    "unique_tokens": ("unique_tokens", "num_unique_tokens"),
    "arm": ("arm", "variant", "architecture", "arch", "config", "regime"),
    "depth": ("depth",),
    "num_loops": ("num_loops", "loops", "k", "r"),
    "recipe": ("recipe", "recipe_name", "recipe_hash"),
    "seed": ("seed",),
    "status": ("status", "state"),
    "run": ("run", "run_id", "name", "run_name"),
    "steps": ("steps", "num_steps", "step"),
    "planned_steps": ("planned_steps", "total_steps", "max_steps"),
    "once_parameters": ("once_parameters", "n_once"),
    "recurrent_parameters": ("recurrent_parameters", "n_rec"),
    "weight_decay": ("weight_decay", "wd"),
    "parameter_convention": ("parameter_convention",),
    "flops_rule": ("flops_rule",),
    "loss_unit": ("loss_unit",),
}  # fmt: skip

_TEXT = {"arm", "recipe", "status", "run", "parameter_convention", "flops_rule", "loss_unit"}


@dataclass
class RunTable:
    """Columns {name: array (n,)}; numbers are float, nan where missing. `sources` maps our name to the file's."""

    columns: dict
    conventions: dict
    sources: dict = field(default_factory=dict)
    path: str = ""

    @property
    def n(self):
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __contains__(self, name):
        return name in self.columns

    def __getitem__(self, name):
        if name not in self.columns:
            raise ValueError(f"{self.path or 'the table'} has no column {name}; it has {sorted(self.columns)}")
        return self.columns[name]

    def arms(self):
        """Arm of each run; "all" for every run of a table without arms."""
        return self.columns["arm"] if "arm" in self.columns else np.array(["all"] * self.n)

    def where(self, mask):
        """The runs with a true mask."""
        mask = np.asarray(mask)
        return RunTable(
            {k: v[mask] for k, v in self.columns.items()}, dict(self.conventions), dict(self.sources), self.path
        )

    def loss_in_nats(self):
        """The loss in nats: converted from bits when so declared. Raises ValueError for bits_per_byte or unknown
        units.
        """
        unit = str(self.conventions.get("loss", "nats")).split(",")[0].split()[0].lower().rstrip(";:")
        if unit in ("nat", "nats"):
            return self["loss"]
        if unit in ("bit", "bits"):
            return self["loss"] * math.log(2)
        raise ValueError(
            f"loss is declared as {self.conventions['loss']!r}; laws are fitted in nats per token. Declare nats or "
            "bits, or convert bits per byte with the tokenizer's bytes per token."
        )


def read_table(path, *, conventions=None, rename=None):
    """Read a CSV, a JSONL file or a folder of run_dirs into a RunTable.

    conventions: {key of CONVENTIONS: text}, over those declared in the file. rename: {our name: column of the file}
    for columns ALIASES does not know. Raises ValueError (unknown convention, two columns for one name, no rows),
    FileNotFoundError.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no table at {path}")
    if path.is_dir():
        rows, declared = _read_run_dirs(path)
    elif path.suffix == ".jsonl":
        rows, declared = _read_jsonl(path)
    elif path.suffix in (".csv", ".tsv", ".txt"):
        rows, declared = _read_csv(path)
    else:
        raise ValueError(f"{path.name}: tables are .csv, .tsv, .jsonl or a folder of run_dirs")
    beside = path.with_name(path.name + ".conventions.json")
    if beside.exists():
        declared |= json.loads(beside.read_text())
    declared |= conventions or {}
    if not rows:
        raise ValueError(f"{path} holds no runs")
    return table_from_rows(rows, declared, rename=rename, path=str(path))


def table_from_rows(rows, conventions=None, *, rename=None, path=""):
    """A RunTable from a list of dicts (one per run)."""
    unknown = set(conventions or {}) - set(CONVENTIONS)
    if unknown:
        raise ValueError(f"unknown conventions {sorted(unknown)}; there are {sorted(CONVENTIONS)}")
    names = list(dict.fromkeys(key for row in rows for key in row))
    sources = _match(names, rename or {}, path)
    columns = {}
    for ours, theirs in sources.items():
        values = [row.get(theirs) for row in rows]
        columns[ours] = (
            np.array([_text(v) for v in values]) if ours in _TEXT else np.array([_number(v) for v in values])
        )
    taken = set(sources.values())
    for name in names:
        if name not in taken and name not in columns:
            values = [row.get(name) for row in rows]
            numbers = np.array([_number(v) for v in values])
            missing = np.array([v is None or v == "" for v in values])
            text = np.isnan(numbers) & ~missing & np.array([str(v).lower() != "nan" for v in values])
            columns[name] = np.array([_text(v) for v in values]) if text.any() else numbers
    return RunTable(columns, dict(conventions or {}), sources, path)


def _match(names, rename, path):
    lowered = {name.lower().strip(): name for name in names}
    sources = {}
    for ours, aliases in ALIASES.items():
        if ours in rename:
            if rename[ours] not in names:
                raise ValueError(f"rename {ours}={rename[ours]}: {path or 'the table'} has the columns {names}")
            sources[ours] = rename[ours]
            continue
        found = [lowered[a] for a in aliases if a in lowered]
        if ours in lowered:
            found = [lowered[ours]]
        if len(found) > 1:
            raise ValueError(f"{path or 'the table'}: columns {found} all mean {ours}; choose one with {ours}=COLUMN")
        if found:
            sources[ours] = found[0]
    for ours, theirs in rename.items():
        if theirs not in names:
            raise ValueError(f"rename {ours}={theirs}: {path or 'the table'} has the columns {names}")
        sources.setdefault(ours, theirs)
    return sources


def _number(value):
    if value is None or value == "" or isinstance(value, dict | list):
        return math.nan
    if isinstance(value, bool):
        return float(value)
    try:
        return float(value)
    except ValueError:
        return math.nan


def _text(value):
    return "" if value is None else str(value)


def _read_csv(path):
    declared, body = {}, []
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        if line.startswith("#") and not body:
            key, _, value = line.lstrip("# ").partition(":")
            if key.strip() in CONVENTIONS:
                declared[key.strip()] = value.strip()
        elif line.strip():
            body.append(line)
    delimiter = "\t" if path.suffix == ".tsv" or (body and "\t" in body[0]) else ","
    rows = list(csv.DictReader(body, delimiter=delimiter))
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"{path}: row {number} has another number of fields than the header")
    return rows, declared


def _read_jsonl(path):
    declared, rows = {}, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is not JSON ({error.msg})") from None
        if set(record) == {"conventions"}:
            declared |= record["conventions"]
        else:
            rows.append(_flat(record))
    return rows, declared


def _read_run_dirs(path):
    declared = json.loads((path / "conventions.json").read_text()) if (path / "conventions.json").exists() else {}
    rows = []
    for results in sorted(path.glob("**/results.json")):
        rows.append(_flat(json.loads(results.read_text())) | {"run": str(results.parent.relative_to(path))})
    if not rows:
        raise ValueError(f"{path} holds no run_dirs: no results.json below it")
    return rows, declared


def _flat(record):
    """Nested records one level down: {"final": {"val_loss": 3}} gives val_loss unless the outer level has it."""
    flat = {k: v for k, v in record.items() if not isinstance(v, dict | list)}
    for value in record.values():
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(inner, dict | list):
                    flat.setdefault(key, inner)
    return flat
