"""Runs side by side: a table and a plot of their losses over training FLOPs.

    python -m training.compare runs/demo/vanilla runs/demo/untied-grow out=runs/demo/compare.png

The first run is the baseline. Every number comes from the runs' results.json and metrics.jsonl. The plot has the
validation losses over FLOPs, the training losses behind them, and a line where a run grew.
"""

import os
import sys
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from training.config import parse_overrides
from training.engine.records import RecordError, read_metrics, read_results
from training.values import RecipeError


class CompareError(Exception):
    """A run that cannot be compared; the message says why."""


def read_run(run_dir: Path) -> tuple[dict, list[dict]]:
    """(results, metrics) of a finished run.

    Raises:
        CompareError: it has no results yet.
    """
    try:
        return read_results(run_dir / "results.json"), read_metrics(run_dir / "metrics.jsonl")
    except FileNotFoundError as error:
        raise CompareError(f"{run_dir} is no finished run: {Path(error.filename).name} is missing") from error


def print_table(runs: list[tuple[dict, list[dict]]], console: Console) -> None:
    """One column a run, with the difference in loss to the first one."""
    table = Table(title="runs at their end; losses in nats per token", title_justify="left")
    table.add_column("", no_wrap=True)
    for results, _ in runs:
        table.add_column(f"{results['variant']} d{results['depth']}", justify="right", no_wrap=True)
    losses = [results["validation_loss"] for results, _ in runs]
    rows = {
        "validation loss": ["none" if loss is None else f"{loss:.4f}" for loss in losses],
        "difference": ["" if None in (loss, losses[0]) else f"{loss - losses[0]:+.4f}" for loss in losses],
        "stored parameters": [f"{results['stored_parameters']:,}" for results, _ in runs],
        "passes (K)": [str(results["num_loops"]) for results, _ in runs],
        "grown at step": [", ".join(str(g["step"]) for g in results["growths"]) or "never" for results, _ in runs],
        "steps": [f"{results['num_steps']:,}" for results, _ in runs],
        "tokens": [f"{results['tokens']:,}" for results, _ in runs],
        "training FLOPs": [f"{results['training_flops']:.3e}" for results, _ in runs],
        "wall time, s": [f"{results['training_seconds']:.0f}" for results, _ in runs],
        "tokens/s": [f"{results['tokens_per_second']:,.0f}" for results, _ in runs],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    console.print(table)


def plot(runs: list[tuple[dict, list[dict]]], path: Path) -> None:
    """Writes the losses over FLOPs as PNG, to a temporary name first."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    highest = 0.0
    for results, metrics in runs:
        label = f"{results['variant']} d{results['depth']}"
        evaluated = results["validation_curve"]
        (line,) = axes.plot(
            [point["flops"] for point in evaluated], [point["loss"] for point in evaluated], "o-", ms=3, label=label
        )
        axes.plot(
            [record["flops"] for record in metrics], [record["loss"] for record in metrics],
            color=line.get_color(), alpha=0.25, lw=0.8,
        )  # fmt: skip
        if evaluated:
            highest = max(highest, evaluated[min(1, len(evaluated) - 1)]["loss"])
        for growth in results["growths"]:
            flops = next((record["flops"] for record in metrics if record["step"] > growth["step"]), None)
            if flops is None:
                continue
            axes.axvline(flops, color=line.get_color(), ls=":", lw=1)
            axes.annotate(
                f"K {growth['from_num_loops']} to {growth['to_num_loops']}", (flops, 0.97),
                xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right", fontsize=8,
            )  # fmt: skip
    if highest:
        axes.set_ylim(top=highest * 1.15)  # the first steps would squeeze the rest
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("loss, nats per token (dots: validation)")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, dpi=130, format="png")
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    run_dirs = [Path(word) for word in words if "=" not in word]
    if not run_dirs or str(run_dirs[0]) in ("-h", "--help"):
        print(__doc__)
        return 0 if run_dirs else 2
    try:
        given = parse_overrides([word for word in words if "=" in word])
        if unknown := [key for key in given if key != "out"]:
            raise CompareError(f"{unknown[0]} is no option of compare; the only one is out")
        out = Path(str(given.get("out") or run_dirs[0].parent / "compare.png"))
        runs = [read_run(run_dir) for run_dir in run_dirs]
        console = Console()
        print_table(runs, console)
        plot(runs, out)
        console.print(f"plot: {out}")
    except (CompareError, RecipeError, RecordError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
