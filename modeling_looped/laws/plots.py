"""Figures: runs and curves, profiles, residuals, multipliers, isoFLOP sweeps. The only file that needs matplotlib.

Every function returns a matplotlib Figure; `save` writes a PNG, `embedded` gives it as text for one HTML file.
"""

import base64
import io
import os
from pathlib import Path

import numpy as np


def _figure(columns=1, rows=1, width=5.2, height=3.9):
    """Axes (rows, columns) of a Figure that needs no display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'modeling-looped[laws]'") from None
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, np.atleast_2d(figure.subplots(rows, columns, squeeze=False))


def save(figure, path):
    """Write a PNG: to a temporary name first, then renamed."""
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    figure.savefig(partial, format="png", dpi=130)
    os.replace(partial, path)


def embedded(figure):
    """The figure as a data URI."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def plot_ladders(ladders, fits=None):
    """Loss over compute per arm; `fits` {arm: Fit of L(C)} as lines, with the excess over E beside it."""
    fits = fits or {}
    figure, axes = _figure(columns=2 if fits else 1)
    for i, (arm, ladder) in enumerate(ladders.items()):
        color = f"C{i % 10}"
        axes[0, 0].plot(ladder.compute, ladder.loss, "o", color=color, ms=4, label=arm)
        if arm in fits:
            at = np.geomspace(ladder.compute.min(), ladder.compute.max() * 3, 200)
            curve = fits[arm].predict({"compute_flops": at}, arm if fits[arm].arms != [None] else None)
            axes[0, 0].plot(at, curve, color=color, lw=1)
            floor = fits[arm].local(arm if fits[arm].arms != [None] else None)["E"]
            axes[0, 1].plot(ladder.compute, ladder.loss - floor, "o", color=color, ms=4)
            axes[0, 1].plot(at, curve - floor, color=color, lw=1)
    axes[0, 0].set(xscale="log", xlabel="training FLOPs", ylabel="loss (nats)")
    axes[0, 0].legend(fontsize=7)
    if fits:
        axes[0, 1].set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel="loss - E (each arm's own E)")
    return figure


def plot_profiles(found):
    """One panel per Profile: the statistic over the parameter, its threshold and interval."""
    figure, axes = _figure(columns=max(len(found), 1), width=3.2, height=2.8)
    for ax, shape in zip(axes[0], found.values(), strict=False):
        near = shape.statistic <= 6 * shape.threshold
        ax.plot(shape.values[near], shape.statistic[near], "-o", ms=2.5, lw=1)
        ax.axhline(shape.threshold, color="0.5", lw=0.8, ls="--")
        ax.axvspan(shape.low, shape.high, color="C0", alpha=0.12)
        ax.set(
            title=f"{shape.name}" + ("" if shape.identified else " (not identified)"), ylim=(0, 5 * shape.threshold)
        )
        ax.title.set_fontsize(9)
    axes[0, 0].set_ylabel("rise of the objective")
    return figure


def plot_residuals(fit):
    """log(observed / fitted) over each column of the law."""
    columns = fit.model.columns
    figure, axes = _figure(columns=len(columns), width=3.6, height=2.8)
    for ax, (name, values) in zip(axes[0], columns.items(), strict=True):
        ax.plot(values, fit.residuals, "o", ms=3)
        ax.axhline(0, color="0.5", lw=0.8)
        ax.set(xscale="log", xlabel=name)
    axes[0, 0].set_ylabel("log(observed / fitted)")
    return figure


def plot_multipliers(by_arm, index="baseline"):
    """Interpolated multipliers over the indexed compute: {arm: {index: result of `interpolated`}}."""
    figure, axes = _figure()
    for arm, found in by_arm.items():
        known = np.isfinite(found[index]["multiplier"])
        axes[0, 0].plot(found[index]["compute"][known], found[index]["multiplier"][known], "-o", ms=4, label=arm)
    axes[0, 0].axhline(1, color="0.5", lw=0.8)
    axes[0, 0].set(xscale="log", xlabel=f"FLOPs of the {index}", ylabel="compute multiplier (interpolated)")
    axes[0, 0].legend(fontsize=7)
    return figure


def plot_budgets(size, loss, labels, optima):
    """IsoFLOP sweeps: loss over size per budget label, with the vertex of each parabola ({label: Optimum})."""
    figure, axes = _figure()
    for i, label in enumerate(dict.fromkeys(np.asarray(labels).tolist())):
        rows = np.asarray(labels) == label
        order = np.argsort(np.asarray(size)[rows])
        axes[0, 0].plot(np.asarray(size)[rows][order], np.asarray(loss)[rows][order], "-o", ms=3, color=f"C{i % 10}")
        if label in optima and not optima[label].censored:
            axes[0, 0].plot(optima[label].x, optima[label].value, "*", ms=10, color=f"C{i % 10}")
    axes[0, 0].set(xscale="log", xlabel="parameters", ylabel="loss (nats)")
    return figure
