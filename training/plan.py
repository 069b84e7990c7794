"""What a recipe comes to, before anything is trained.

    python -m training.plan show untied-grow depth=12 optimizer.matrix_lr=0.03
    python -m training.plan show variant=loop-2 depth=8 budget.flops=1e18
    python -m training.plan ladder
    python -m training.plan ladder --ladder PATH

`show` prints every derived number with its rule and source. `ladder` derives the paper's 67 published runs from the
recipes and prints them beside the published numbers; it exits with 1 unless counts are equal and all else is to 1e-6.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from training.budget import Plan, print_plan, resolve
from training.config import load_command_line, load_recipe
from training.values import RecipeError

LADDER = Path(__file__).parent.parent / "tests" / "assets" / "ladder.json"
TOLERANCE = 1e-6

# Heading, the ladder's column, the plan's number; an integer must be equal, a float within the tolerance
COLUMNS = (
    ("stored parameters", "stored_parameters", "final_stored_parameters"),
    ("tokens", "tokens", "num_tokens"),
    ("steps", "optimizer_steps", "num_steps"),
    ("growth step", "growth_step", "growth_step"),
    ("matrix LR", "matrix_lr", "matrix_lr"),
    ("embedding LR", "embedding_lr", "embedding_lr"),
    ("head LR", "unembedding_lr", "head_lr"),
    ("FLOPs", "training_flops", "training_flops"),
)
ALL_COUNTS = ("stored_parameters", "tokens", "optimizer_steps", "growth_step")


def plan_of_row(row: dict[str, Any]) -> Plan:
    """Our plan of a published run: the recipe of its variant, at its depth, on its corpus."""
    recipe = row["variant"].lower().replace(" ", "-")
    corpus = row["corpus"].lower()
    return resolve(load_recipe(recipe, {"depth": row["depth_coordinate"], "data": {"source": corpus}}))


def compare(row: dict[str, Any], plan: Plan) -> dict[str, float]:
    """Relative difference (ours - published) / published of each column; 0 where both are None."""
    differences = {}
    for _, published_name, name in COLUMNS:
        published, ours = row[published_name], getattr(plan, name)
        if (published is None) != (ours is None):
            differences[published_name] = float("inf")
        else:
            differences[published_name] = 0.0 if published is None else (ours - published) / published
    return differences


def ladder(path: Path) -> bool:
    """Print the published runs beside ours with a verdict; True if they agree."""
    rows = json.loads(path.read_text())["checkpoints"]
    widths = [max(len(heading), 18 if name == "training_flops" else 13) for heading, name, _ in COLUMNS]
    print(_line("", "", [heading for heading, _, _ in COLUMNS], widths))
    worst, missed = 0.0, 0
    for row in rows:
        plan = plan_of_row(row)
        differences = compare(row, plan)
        label = f"{row['variant']} d{row['depth_coordinate']} {row['corpus']}"
        print(_line(label, "published", [_number(row[name]) for _, name, _ in COLUMNS], widths))
        print(_line("", "ours", [_number(getattr(plan, name)) for _, _, name in COLUMNS], widths))
        shown = ["-" if row[name] is None else f"{differences[name]:.1e}" for _, name, _ in COLUMNS]
        print(_line("", "difference", shown, widths))
        worst = max(worst, *map(abs, differences.values()))
        exact = all(differences[name] == 0 for name in ALL_COUNTS)
        missed += not (exact and all(abs(difference) <= TOLERANCE for difference in differences.values()))
    verdict = "all agree" if not missed else f"{missed} DO NOT AGREE"
    print(
        f"\n{len(rows)} published runs, {verdict}: parameters, tokens, steps and growth steps to be equal, learning "
        f"rates and FLOPs to {TOLERANCE:g}. Maximum relative difference {worst:.1e}."
    )
    return not missed


def _line(label: str, what: str, cells: list[str], widths: list[int]) -> str:
    padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{label:<30}{what:<11}" + "  ".join(padded)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and value < 1e15:
        return f"{value:,}"
    return f"{value:.8g}" if value < 1 else f"{value:.10e}"


def main(arguments: list[str]) -> int:
    """The exit status of a command: 1 if the ladder does not agree, 2 without a command.

    Raises:
        ValueError: an unknown command, or a recipe that cannot be resolved.
    """
    match arguments:
        case ["show", *words]:
            console = Console() if sys.stdout.isatty() else Console(width=160)
            print_plan(resolve(load_command_line(words)), console)
            return 0
        case ["ladder"]:
            return 0 if ladder(LADDER) else 1
        case ["ladder", "--ladder", path]:
            return 0 if ladder(Path(path)) else 1
        case [] | ["--help"] | ["-h"] | ["help"]:
            print(__doc__)
            return 0 if arguments else 2
    raise RecipeError(f"unknown command {' '.join(arguments)!r}; allowed are: show RECIPE key=value ..., ladder")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        sys.exit(2)
