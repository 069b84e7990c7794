"""Recompute every published value in a folder of reference tables and print published, ours, verdict.

    looped laws reproduce FOLDER

The folder holds `scaling/` and `paper/` with their manifest.json (published values and tolerances in words) and
reference fits. Verdicts: reproduced (within the tolerance), DIFFERS, does not follow (a published number that its own
source does not yield, with the reason), missing (no such file).
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One published value against ours. tolerance is absolute, or a share of the published value with `relative`."""

    source: str
    name: str
    published: float
    ours: float
    tolerance: float
    relative: bool = False
    at_most: bool = False
    explained: str = ""

    @property
    def verdict(self):
        if self.explained:
            return f"does not follow: {self.explained}"
        if self.at_most:
            return "reproduced" if self.ours <= self.published else "DIFFERS"
        limit = self.tolerance * abs(self.published) if self.relative else self.tolerance
        return "reproduced" if abs(self.ours - self.published) <= limit * (1 + 1e-9) else "DIFFERS"

    def __str__(self):
        unit = "rel" if self.relative else "abs"
        bound = "at most" if self.at_most else f"{unit} {self.tolerance:.1g}"
        return f"{self.name[:58]:58s} {self.published:>15.8g} {self.ours:>15.8g}  {bound:>12s}  {self.verdict}"


class Reference:
    """Files of the folder, and the rows found so far."""

    def __init__(self, folder):
        self.folder = Path(folder)
        if not (self.folder / "scaling").is_dir() and not (self.folder / "paper").is_dir():
            raise FileNotFoundError(
                f"{self.folder} holds neither scaling/ nor paper/: not a folder of reference tables"
            )
        self.rows, self.missing = [], []

    def path(self, name):
        """The file, or None after noting that it is missing."""
        path = self.folder / name
        if path.exists():
            return path
        self.missing.append(name)
        return None

    def json(self, name):
        path = self.path(name)
        return None if path is None else json.loads(path.read_text())

    def add(self, source, name, published, ours, tolerance, **options):
        self.rows.append(Row(source, name, float(published), float(ours), tolerance, **options))

    def published(self, file):
        """The manifest's entry of scaling/<file>."""
        manifest = self.json("scaling/manifest.json") or {"datasets": []}
        return next((d for d in manifest["datasets"] if d["file"] == file), {})


def reproduce(folder):
    """Every check as [Row], and the list of missing files. Deterministic."""
    from modeling_looped.laws import reproduce_paper, reproduce_scaling

    reference = Reference(folder)
    for check in (*reproduce_scaling.CHECKS, *reproduce_paper.CHECKS):
        check(reference)
    return reference.rows, sorted(set(reference.missing))


def print_rows(rows, missing):
    """The table on the terminal; returns the number of rows that differ."""
    source = None
    for row in rows:
        if row.source != source:
            source = row.source
            print(f"\n{source}\n{'':58s} {'published':>15s} {'ours':>15s}  {'tolerance':>12s}  verdict")
        print(row)
    counts = {
        key: sum(r.verdict.startswith(key) for r in rows) for key in ("reproduced", "DIFFERS", "does not follow")
    }
    print(f"\n{len(rows)} values: " + ", ".join(f"{v} {k}" for k, v in counts.items()))
    if missing:
        print("missing files: " + ", ".join(missing))
    return counts["DIFFERS"]
