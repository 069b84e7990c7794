"""The evaluation tasks as data: task sets, their rows, and the checks that a row must pass before it is scored.

A task set is a YAML file under `eval/task_sets` (or any path), or a folder in the layout of the public CORE bundle
(`core.yaml` with `icl_tasks`, `eval_meta_data.csv`, `eval_data/`). Data files are JSON lines and are checked against
their sha256 where the task set names one.
"""

import csv
import difflib
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import yaml

TASK_SETS = Path(__file__).parent / "task_sets"

# Keys that every row of a kind of task must have.
ROW_KEYS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


class TaskError(ValueError):
    """A task that cannot be evaluated, with the reason: its data, or a row that cannot be scored."""


@dataclass(frozen=True)
class Task:
    """One task: `type` is a key of ROW_KEYS, `delimiter` stands between a context and its continuation.

    `chance_percent` maps a version of the baselines to the accuracy of guessing, in percent.
    """

    name: str
    type: str
    num_fewshot: int
    delimiter: str
    file: str
    chance_percent: dict[str, float]
    sha256: str | None = None
    num_rows: int | None = None


@dataclass(frozen=True)
class TaskSet:
    """Tasks with the folder of their data; `folder` is None where the data is the CORE bundle's."""

    name: str
    metric: str
    tasks: dict[str, Task]
    folder: Path | None
    filtered_out: tuple[str, ...] = ()

    def select(self, names: list[str]) -> dict[str, Task]:
        """The named tasks in the set's order; raises ValueError for an unknown name, with the nearest one."""
        for name in names:
            if name not in self.tasks:
                near = difflib.get_close_matches(name, self.tasks, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Allowed: {', '.join(self.tasks)}."
                raise ValueError(f"Task set {self.name!r} has no task {name!r}.{hint}")
        return {name: task for name, task in self.tasks.items() if name in names}

    def fingerprint(self) -> str:
        """sha256 over what decides prompts and scores: every task's fields, in order."""
        fields = [sorted(vars(task).items()) for task in self.tasks.values()]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def load_task_set(source: str | Path) -> TaskSet:
    """Task set by name (`core`, `tiny`), by path to its YAML, or by path to a folder in the bundle's layout.

    Raises FileNotFoundError for a name or path that is neither, ValueError for a key that is unknown or missing.
    """
    path = Path(source)
    named = TASK_SETS / f"{source}.yaml"
    if named.is_file():
        path = named
    elif (path / "core.yaml").is_file():
        return _bundle_layout(path)
    elif not path.is_file():
        known = ", ".join(sorted(p.stem for p in TASK_SETS.glob("*.yaml")))
        raise FileNotFoundError(
            f"No task set {str(source)!r}: expected one of {known}, a YAML file, or a folder with a core.yaml."
        )
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    allowed = {"name", "metric", "source", "filtered_out", "tasks"}
    _check_keys(content, allowed, {"name", "metric", "source", "tasks"}, str(path))
    tasks = {}
    for name, entry in content["tasks"].items():
        fields = set(Task.__dataclass_fields__) - {"name"}
        _check_keys(entry, fields, fields - {"sha256", "num_rows"}, f"{path}, task {name}")
        tasks[name] = _checked(Task(name=name, **entry))
    folder = None if content["source"] == "bundle" else path.parent / content["source"]
    return TaskSet(content["name"], content["metric"], tasks, folder, tuple(content.get("filtered_out", ())))


def _bundle_layout(folder: Path) -> TaskSet:
    chance = {}
    with open(folder / "eval_meta_data.csv", encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            chance[row["Eval Task"]] = float(row["Random baseline"])
    tasks = {}
    for entry in yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]:
        name = entry["label"]
        if name not in chance:
            raise ValueError(f"{folder / 'eval_meta_data.csv'} has no random baseline for task {name!r}.")
        tasks[name] = _checked(
            Task(
                name=name,
                type=entry["icl_task_type"],
                num_fewshot=entry["num_fewshot"][0],
                delimiter=entry.get("continuation_delimiter", " "),
                file=entry["dataset_uri"],
                chance_percent={"v1": chance[name], "v2": chance[name]},
            )
        )
    return TaskSet(folder.name, "mean centered accuracy", tasks, folder / "eval_data")


def _check_keys(mapping: dict, allowed: set[str], required: set[str], where: str) -> None:
    for key in mapping:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Allowed: {', '.join(sorted(allowed))}."
            raise ValueError(f"{where}: unknown key {key!r}.{hint}")
    if missing := sorted(required - mapping.keys()):
        raise ValueError(f"{where}: missing {', '.join(missing)}.")


def _checked(task: Task) -> Task:
    if task.type not in ROW_KEYS:
        raise ValueError(f"Task {task.name}: type {task.type!r} is not one of {', '.join(ROW_KEYS)}.")
    if task.num_fewshot < 0:
        raise ValueError(f"Task {task.name}: num_fewshot must be at least 0, got {task.num_fewshot}.")
    for version, percent in task.chance_percent.items():
        if not 0 <= percent < 100:
            raise ValueError(f"Task {task.name}: chance_percent {version} must be in [0, 100), got {percent}.")
    return task


def read_rows(task: Task, read) -> list[dict]:
    """Rows of a task in file order, every one checked; `read` maps the task's file name to its bytes.

    Raises TaskError for a missing file, another sha256 than the task's, a line that is no JSON object, a missing key,
    an empty option or continuation, or a gold index without its option.
    """
    try:
        content = read(task.file)
    except (OSError, KeyError) as error:
        raise TaskError(f"task {task.name}: data file {task.file} cannot be read: {error}") from error
    if task.sha256 is not None:
        digest = hashlib.sha256(content).hexdigest()
        if digest != task.sha256:
            raise TaskError(
                f"task {task.name}: {task.file} has sha256 {digest}, expected {task.sha256}. "
                f"Other data gives other scores: get the public bundle with `python -m eval.bundle download`."
            )
    rows = []
    # not splitlines(): a JSON string may hold U+2028, which it takes for the end of a line
    for number, line in enumerate(io.StringIO(_text(task, content), newline="\n"), start=1):
        where = f"task {task.name}, {task.file} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{where}: not JSON: {error}") from error
        _check_row(task, row, where)
        rows.append(row)
    if not rows:
        raise TaskError(f"task {task.name}: {task.file} has no rows.")
    return rows


def _text(task: Task, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"task {task.name}: {task.file} is not UTF-8: {error}") from error


def _check_row(task: Task, row, where: str) -> None:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: expected a JSON object, got {type(row).__name__}.")
    for key in ROW_KEYS[task.type]:
        if key not in row:
            raise TaskError(f"{where}: a {task.type} row needs the key {key!r}, it has {', '.join(row)}.")
    texts = {key: row[key] for key in ("query", "context", "continuation") if key in ROW_KEYS[task.type]}
    options_key = {"multiple_choice": "choices", "schema": "context_options"}.get(task.type)
    if options_key is not None:
        options = row[options_key]
        if not isinstance(options, list) or len(options) < 2:
            raise TaskError(f"{where}: {options_key!r} must list at least two options, got {options!r}.")
        texts.update({f"{options_key}[{i}]": option for i, option in enumerate(options)})
        gold = row["gold"]
        if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(options):
            raise TaskError(f"{where}: 'gold' must be an index into the {len(options)} options, got {gold!r}.")
    for key, text in texts.items():
        if not isinstance(text, str):
            raise TaskError(f"{where}: {key!r} must be a string, got {text!r}.")
        # an empty context is a question asked without one; an empty answer leaves nothing to score
        if not text.strip() and key not in ("query", "context"):
            raise TaskError(f"{where}: {key!r} is empty: there is nothing to score.")
