"""Results on the terminal: the table, and the progress of a run with the time each task still takes."""

import sys
import time

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def results_table(results: dict) -> str:
    """The results as text: a row per task and the aggregate, or why there is none."""
    aggregate = results["aggregate"]
    with_nll = any(task["answer_nll"] is not None for task in results["tasks"].values())
    width = max(len(name) for name in [*results["tasks"], "task"])
    lines = [f"{'task':<{width}}  shots  examples  accuracy  centered" + ("  answer_nll" if with_nll else "")]
    for name, task in results["tasks"].items():
        line = f"{name:<{width}}  {task['num_fewshot']:>5}  {task['num_examples']:>8}"
        if task["status"] == "failed":
            lines.append(f"{line}    failed: {task['error']}")
            continue
        line += f"  {task['accuracy']:>8.4f}  {task['centered']:>8.4f}"
        lines.append(line + (f"  {task['answer_nll']:>10.4f}" if task["answer_nll"] is not None else ""))
    lines.append(headline(results))
    if aggregate["filtered"] is not None:
        lines.append(f"filtered {aggregate['metric']} (paper's 17 tasks): {aggregate['filtered']:.4f}")
    if aggregate["answer_nll"] is not None:
        lines.append(f"answer_nll: {aggregate['answer_nll']:.4f} nats per token, mean over tasks")
    return "\n".join(lines)


def headline(results: dict) -> str:
    """One line: the aggregate with its version and subset, or why there is none."""
    aggregate, settings = results["aggregate"], results["settings"]
    if aggregate["value"] is None:
        return f"no {aggregate['metric']} ({aggregate['status']}): {aggregate['reason']}"
    subset = "" if settings["max_per_task"] is None else f", {settings['max_per_task']} examples per task"
    spread = f" +- {aggregate['std']:.5f} over seeds" if len(aggregate["per_seed"]) > 1 else ""
    others = {v: x for v, x in aggregate["by_version"].items() if v != aggregate["version"]}
    other = "".join(f", {version}: {value:.4f}" for version, value in others.items() if value != aggregate["value"])
    name = f"{aggregate['metric']} ({aggregate['version']}, {settings['compat']} rules{subset})"
    return f"{name}: {aggregate['value']:.4f}{spread}{other}"


class RunProgress:
    """Progress of this process's batches: on a terminal a bar per task, else a line now and then on stderr.

    batch_tokens[i] is the work of batch i and task_counts[i] its examples per task. A task is done with the last batch
    that holds one of its examples, so its remaining time is the work up to there at the rate so far.
    """

    LINE_SECONDS = 30.0

    def __init__(self, batch_tokens: list[int], task_counts: list[dict[str, int]], enabled: bool = True):
        self.enabled = enabled and bool(batch_tokens)
        self.work = np.cumsum(batch_tokens)
        self.task_counts = task_counts
        self.last_batch = {name: i for i, counts in enumerate(task_counts) for name in counts}
        self.totals = {name: sum(counts.get(name, 0) for counts in task_counts) for name in self.last_batch}
        self.done = 0
        self.bars, self.display = {}, None
        self.started = self.last_line = time.monotonic()

    def __enter__(self):
        if self.enabled and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self.display = Progress(*columns)
            self.bars = {name: self.display.add_task(name, total=n, left="") for name, n in self.totals.items()}
            self.display.start()
        return self

    def __exit__(self, *exception):
        if self.display is not None:
            self.display.stop()

    def seconds_left(self, name: str) -> float:
        """Seconds until the last batch with examples of a task is done."""
        if self.last_batch[name] < self.done:
            return 0.0
        finished = self.work[self.done - 1] if self.done else 0
        elapsed = time.monotonic() - self.started
        return float((self.work[self.last_batch[name]] - finished) * elapsed / max(finished, 1))

    def advance(self) -> None:
        """One more batch is done."""
        counts = self.task_counts[self.done]
        self.done += 1
        if not self.enabled:
            return
        if self.display is not None:
            for name, bar in self.bars.items():
                self.display.update(bar, advance=counts.get(name, 0), left=_clock(self.seconds_left(name)))
        elif time.monotonic() - self.last_line > self.LINE_SECONDS:
            self.last_line = time.monotonic()
            left = max(self.seconds_left(name) for name in self.last_batch)
            share = self.work[self.done - 1] / self.work[-1]
            print(f"{share:.1%} of the tokens, {_clock(left)} left", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
