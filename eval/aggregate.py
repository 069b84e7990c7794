"""From task accuracies to CORE: the unweighted mean of centered accuracies, over all tasks of a set or not at all.

The accuracy of guessing has versions (see task_sets/core.yaml), and a score without its version is not comparable:
every function here takes or returns it.
"""

import math

from eval.metrics.centered_accuracy.formula import centered_accuracy
from eval.tasks import Task, TaskSet

DEFAULT_VERSION = "v1"


class IncompleteError(ValueError):
    """An aggregate was asked for without the scores of all its tasks."""


def center(task: Task, accuracy: float, version: str = DEFAULT_VERSION) -> float:
    """Centered accuracy of a task; raises ValueError for an unknown version of the baselines."""
    if version not in task.chance_percent:
        raise ValueError(f"version must be one of {', '.join(task.chance_percent)}, got {version!r}.")
    return centered_accuracy(accuracy, task.chance_percent[version] / 100)


def aggregate(task_set: TaskSet, accuracies: dict[str, float], version: str = DEFAULT_VERSION) -> float:
    """Mean of the centered accuracies of all tasks in the set: CORE, for the task set `core`.

    Raises IncompleteError, naming them, when tasks have no accuracy or one that is not finite.
    """
    missing = [name for name in task_set.tasks if not math.isfinite(accuracies.get(name, math.nan))]
    if missing:
        raise IncompleteError(
            f"{task_set.metric} needs all {len(task_set.tasks)} tasks, {len(missing)} have no score: "
            f"{', '.join(missing)}."
        )
    return sum(center(task, accuracies[name], version) for name, task in task_set.tasks.items()) / len(task_set.tasks)


def filtered_aggregate(task_set: TaskSet, accuracies: dict[str, float], version: str = DEFAULT_VERSION) -> float:
    """`aggregate` over the tasks that the paper's filter keeps (17 of CORE's 22)."""
    kept = {name: task for name, task in task_set.tasks.items() if name not in task_set.filtered_out}
    subset = TaskSet(task_set.name, f"filtered {task_set.metric}", kept, task_set.folder)
    return aggregate(subset, accuracies, version)


def mean_and_std(values: list[float]) -> tuple[float, float]:
    """Mean and population standard deviation (0 for one value), as the paper reports them over few-shot seeds."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
