"""Chinchilla's three approaches to compute-optimal size, and optima of one-knob sweeps (Hoffmann et al. 2203.15556).

1: the lower envelope of all runs in bins of compute. 2: a parabola in log size at each compute budget ("isoFLOP").
3: the minimum of a fitted L(N, T) on the line C = k N T. An optimum at the edge of its sweep is CENSORED: it is
reported as a bound and left out of the power laws.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as t_distribution

from modeling_looped.laws.fitting import FitRefused


@dataclass(frozen=True)
class Optimum:
    """Vertex of a parabola in log x. censored: "" inside the sweep, else "low", "high" (beyond that end) or "no
    minimum".
    """

    x: float
    value: float
    censored: str
    num_points: int
    curvature: float


def vertex(x, y, *, log_value=False, margin=1.0):
    """Optimum of y over log x by a parabola through all points (least squares); `log_value` fits log y instead.

    Censored when the vertex leaves [min x / margin, max x * margin], or when the parabola opens downwards.
    Raises ValueError with fewer than three distinct x.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(np.unique(x)) < 3:
        raise ValueError(f"a parabola needs at least 3 different values; got {np.unique(x).tolist()}")
    centre = np.log(x).mean()
    z = np.log(x) - centre
    a, b, c = np.polyfit(z, np.log(y) if log_value else y, 2)
    if a <= 0:
        return Optimum(float("nan"), float("nan"), "no minimum", len(x), float(a))
    at = -b / (2 * a)
    value = c - b * b / (4 * a)
    place = float(np.exp(at + centre))
    censored = "low" if place < x.min() / margin else "high" if place > x.max() * margin else ""
    return Optimum(place, float(np.exp(value) if log_value else value), censored, len(x), float(a))


def power_law(x, y):
    """log y = log k + slope log x by least squares: {"k", "slope", "slope_se", "p_value", "n"}; p for slope = 0."""
    lx, ly = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    if len(lx) < 2 or np.ptp(lx) == 0:
        raise FitRefused("too few optima", f"a power law needs at least 2 different budgets; got {len(lx)}")
    slope, intercept = np.polyfit(lx, ly, 1)
    freedom = len(lx) - 2
    error = ly - intercept - slope * lx
    spread = ((lx - lx.mean()) ** 2).sum()
    se = float(np.sqrt(error @ error / freedom / spread)) if freedom > 0 else float("nan")
    p = float(2 * t_distribution.sf(abs(slope) / max(se, 1e-300), freedom)) if freedom > 0 else float("nan")
    return {"k": float(np.exp(intercept)), "slope": float(slope), "slope_se": se, "p_value": p, "n": len(lx)}


def group_budgets(compute, tolerance=0.05):
    """Label of the compute budget of each run: runs within `tolerance` (relative) of their neighbour share one."""
    compute = np.asarray(compute, float)
    order = np.argsort(compute, kind="stable")
    steps = np.diff(np.log(compute[order])) > np.log1p(tolerance)
    labels = np.empty(len(compute), int)
    labels[order] = np.concatenate([[0], np.cumsum(steps)])
    return labels


def approach_1(compute, size, loss, *, num_bins=None):
    """Best run in each bin of log compute; size and tokens of the envelope as powers of compute.

    Returns {"envelope": row indices, "size": power law}. Bins default to a third of the number of runs, at most 30.
    """
    compute, size, loss = (np.asarray(v, float) for v in (compute, size, loss))
    num_bins = num_bins or int(np.clip(len(compute) // 3, 3, 30))
    edges = np.linspace(np.log(compute.min()), np.log(compute.max()) + 1e-9, num_bins + 1)
    bins = np.digitize(np.log(compute), edges) - 1
    best = [int(np.flatnonzero(bins == b)[np.argmin(loss[bins == b])]) for b in np.unique(bins)]
    # a run that a cheaper one beats is not on the envelope
    best = [i for i in best if not ((loss <= loss[i]) & (compute < compute[i])).any()]
    if len(best) < 3:
        raise FitRefused("too few optima", f"the envelope holds {len(best)} runs; approach 1 needs at least 3")
    return {"envelope": best, "size": power_law(compute[best], size[best])}


def approach_2(compute, size, loss, *, budgets=None, margin=1.0):
    """Parabola of the loss over log size in each budget. Returns {"optima": [{budget, optimum}], "size", "loss"}.

    size: power law of the optimal size over the budgets with an interior optimum; None with fewer than two.
    """
    compute, size, loss = (np.asarray(v, float) for v in (compute, size, loss))
    budgets = group_budgets(compute) if budgets is None else np.asarray(budgets)
    rows = []
    for label in np.unique(budgets):
        mask = budgets == label
        if len(np.unique(size[mask])) < 3:
            continue
        rows.append(
            {
                "budget": float(np.exp(np.log(compute[mask]).mean())),
                "optimum": vertex(size[mask], loss[mask], margin=margin),
            }
        )
    if not rows:
        raise FitRefused("too few sizes", "no budget holds three different sizes; approach 2 needs isoFLOP groups")
    inside = [r for r in rows if not r["optimum"].censored]
    x = [r["budget"] for r in inside]
    fitted = power_law(x, [r["optimum"].x for r in inside]) if len(inside) >= 2 else None
    return {"optima": rows, "size": fitted, "censored": len(rows) - len(inside)}


def approach_3(fit, arm=None):
    """Exponents of the optimum of a fitted L(N, T) under C = k N T: N ~ C^a, T ~ C^b, a = beta / (alpha + beta)."""
    q = fit.local(arm)
    a = q["beta"] / (q["alpha"] + q["beta"])
    return {"size_exponent": a, "token_exponent": 1 - a}


def curve_optima(compute, knob, loss, budgets, *, log_value=True):
    """Best value of a knob (such as the loop count) at given compute, from curves of different cost.

    Each knob value's losses are interpolated linearly in compute to the budget (never extrapolated), then a parabola
    of log loss in log knob is taken. Returns [Optimum or None] (None: fewer than three values reach the budget).
    """
    compute, knob, loss = (np.asarray(v, float) for v in (compute, knob, loss))
    found = []
    for budget in np.atleast_1d(budgets):
        xs, ys = [], []
        for value in np.unique(knob):
            mask = knob == value
            order = np.argsort(compute[mask], kind="stable")
            c, l = compute[mask][order], loss[mask][order]
            if c[0] * (1 - 1e-9) <= budget <= c[-1] * (1 + 1e-9):
                xs.append(value), ys.append(np.interp(budget, c, l))
        found.append(vertex(xs, ys, log_value=log_value) if len(xs) >= 3 else None)
    return found
