"""Bar chart of centered accuracies, a result against others.

    python -m eval.chart results/core-x.json --against gpt2 gpt2-xl gpt3-13b results/core-y.json --output chart.png

What to compare with: a results file, or a name in references.json (published figures, with their source).
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files only, also where there is no display

import matplotlib.pyplot as plt
import numpy as np

from eval.aggregate import center
from eval.results import read_results
from eval.tasks import load_task_set

REFERENCES = Path(__file__).parent / "references.json"


def load_comparison(source: str, version: str) -> tuple[str, dict[str, float], float | None]:
    """(label, centered accuracy per task, aggregate or None) of a results file or a published reference.

    Raises ValueError for a source that is neither, or that has no figures in this version of the baselines.
    """
    if Path(source).is_file():
        results = read_results(source)
        return results["model"]["id"], _centered(results), results["aggregate"]["by_version"].get(version)
    references = json.loads(REFERENCES.read_text(encoding="utf-8"))
    if source not in references:
        raise ValueError(f"{source!r} is neither a results file nor one of {', '.join(references)}.")
    reference = references[source]
    tasks = load_task_set("core").tasks
    centered = {name: center(tasks[name], a, version) for name, a in reference["accuracies"].items()}
    if version == reference["version"]:
        return source, centered, reference["value"]
    if not centered:
        raise ValueError(f"{source} is known in version {reference['version']} only, not {version}.")
    return source, centered, sum(centered.values()) / len(centered)


def _centered(results: dict) -> dict[str, float]:
    return {name: task["centered"] for name, task in results["tasks"].items() if task["centered"] is not None}


def draw_chart(results: dict, against: list[str], output: str | Path) -> None:
    """Writes the chart to `output`: a group of bars per task and one for the aggregate, a color per model."""
    aggregate = results["aggregate"]
    version = aggregate["version"]
    series = [(results["model"]["id"], _centered(results), aggregate["value"])]
    series += [load_comparison(source, version) for source in against]
    names = [*results["tasks"], aggregate["metric"]]
    figure, axes = plt.subplots(figsize=(max(6, 0.55 * len(names) + 1), 5), layout="constrained")
    width = 0.8 / len(series)
    for i, (label, centered, value) in enumerate(series):
        heights = [*(centered.get(name, np.nan) for name in results["tasks"]), np.nan if value is None else value]
        shown = label if value is None else f"{label} ({value:.3f})"
        axes.bar(np.arange(len(names)) + (i - (len(series) - 1) / 2) * width, heights, width, label=shown)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel(f"centered accuracy ({version}); 0 is guessing")
    axes.legend(fontsize=8)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.chart", description=__doc__.split("\n")[0])
    parser.add_argument("results", help="results file of eval.core")
    parser.add_argument("--against", nargs="+", default=[], help="results files or names in references.json")
    parser.add_argument("--output", type=Path, default=Path("core.png"))
    args = parser.parse_args(argv)
    try:
        draw_chart(read_results(args.results), args.against, args.output)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
