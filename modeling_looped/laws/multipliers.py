"""Compute multipliers: how many times the compute a baseline needs for the loss that a variant reaches.

The headline is interpolated between measured runs and never leaves them. A law extrapolates; its answer depends on the
model chosen, so `law_multiplier` states its index and `compare.multiplier_by_model` gives a set of models with
weights. Index: "baseline" asks at a compute C of the baseline (the looped-and-growing paper's text), "variant" at the
variant's.
"""

from dataclasses import dataclass

import numpy as np
from scipy.interpolate import PchipInterpolator

from modeling_looped.laws.fitting import FitRefused, fit_law
from modeling_looped.laws.objectives import Squares

INDICES = ("baseline", "variant")


@dataclass(frozen=True)
class Ladder:
    """(compute, loss) of one arm, sorted by compute, with runs that a cheaper one beats left out (`dropped`)."""

    compute: np.ndarray
    loss: np.ndarray
    dropped: int

    @classmethod
    def of(cls, compute, loss):
        compute, loss = np.asarray(compute, float), np.asarray(loss, float)
        order = np.lexsort((loss, compute))
        compute, loss = compute[order], loss[order]
        best = np.minimum.accumulate(np.concatenate([[np.inf], loss[:-1]]))
        keep = loss < best
        return cls(compute[keep], loss[keep], int((~keep).sum()))

    def compute_for(self, loss, method="linear"):
        """Compute at which this ladder reaches `loss`, nan outside the measured losses. Interpolates log compute.

        linear: in the loss. pchip: monotone cubic in the loss. power: linear in log loss.
        """
        x, at = self.loss[::-1], np.asarray(loss, float)
        if method == "power":
            x, at = np.log(x), np.log(at)
        elif method not in ("linear", "pchip"):
            raise ValueError(f"interpolation {method!r}; there are linear, pchip, power")
        y = np.log(self.compute[::-1])
        inside = (at >= x[0]) & (at <= x[-1])
        value = PchipInterpolator(x, y)(np.clip(at, x[0], x[-1])) if method == "pchip" else np.interp(at, x, y)
        return np.where(inside, np.exp(value), np.nan)

    def loss_at(self, compute):
        """Loss at `compute` (linear in log compute), nan outside the measured range."""
        x, at = np.log(self.compute), np.log(np.asarray(compute, float))
        inside = (at >= x[0] - 1e-12) & (at <= x[-1] + 1e-12)
        return np.where(inside, np.interp(at, x, self.loss), np.nan)


def interpolated(baseline, variant, *, at=None, index="baseline", method="linear"):
    """Multiplier at each compute of `at`; by default at the runs of the indexed ladder. nan where it would
    extrapolate.

    Returns {"compute", "loss", "multiplier"} as arrays.
    """
    if index not in INDICES:
        raise ValueError(f"index {index!r}; there are {INDICES}")
    indexed, other = (baseline, variant) if index == "baseline" else (variant, baseline)
    compute = indexed.compute if at is None else np.atleast_1d(np.asarray(at, float))
    loss = indexed.loss if at is None else indexed.loss_at(compute)
    reached = other.compute_for(loss, method)
    multiplier = compute / reached if index == "baseline" else reached / compute
    return {"compute": compute, "loss": loss, "multiplier": multiplier}


def iso_loss(ladders, losses, method="linear"):
    """Compute that each arm needs for each loss: {arm: array}, nan outside its runs."""
    return {arm: ladder.compute_for(losses, method) for arm, ladder in ladders.items()}


def law_loss(parameters, compute):
    """E + A (C / 1e18)^-gamma."""
    return parameters["E"] + parameters["A"] * (np.asarray(compute, float) / 1e18) ** -parameters["gamma"]


def law_compute(parameters, loss):
    """Inverse of `law_loss`; infinite where the loss lies at or below E."""
    excess = np.asarray(loss, float) - parameters["E"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(excess > 0, 1e18 * (excess / parameters["A"]) ** (-1 / parameters["gamma"]), np.inf)


def law_multiplier(baseline, variant, compute, index="baseline"):
    """Multiplier from two L(C) laws {E, A, gamma} at `compute` of the indexed one."""
    if index not in INDICES:
        raise ValueError(f"index {index!r}; there are {INDICES}")
    compute = np.asarray(compute, float)
    if index == "baseline":
        return compute / law_compute(variant, law_loss(baseline, compute))
    return law_compute(baseline, law_loss(variant, compute)) / compute


def shared_floor_laws(compute, loss, arms, baseline, *, objective=None):
    """The looped-and-growing paper's procedure: E from the baseline's own fit, then log(L - E) regressed on log C.

    Returns {arm: {"E", "A", "gamma", "gamma_se"}}, A at 1e18 FLOPs; the baseline's A and gamma are regressed too, and
    "fitted" under the baseline's name holds its direct fit. Raises FitRefused when a loss lies at or below E.
    """
    compute, loss, arms = np.asarray(compute, float), np.asarray(loss, float), np.asarray(arms)
    if baseline not in set(arms.tolist()):
        raise ValueError(f"baseline {baseline!r} is not among the arms {sorted(set(arms.tolist()))}")
    mask = arms == baseline
    fit = fit_law("compute", {"compute_flops": compute[mask]}, loss[mask], objective=objective or Squares(on="loss"))
    floor = fit.parameters["E"]
    laws = {}
    for arm in dict.fromkeys(arms.tolist()):
        rows = arms == arm
        excess = loss[rows] - floor
        if (excess <= 0).any():
            raise FitRefused("below the floor", f"arm {arm} has a loss at or below the shared E = {floor:.4f}")
        if rows.sum() < 3:
            raise FitRefused("too few runs", f"arm {arm} has {rows.sum()} runs; an exponent needs at least 3")
        x, y = np.log(compute[rows] / 1e18), np.log(excess)
        slope, intercept = np.polyfit(x, y, 1)
        error = y - intercept - slope * x
        se = np.sqrt((error @ error) / max(len(x) - 2, 1) / ((x - x.mean()) ** 2).sum())
        laws[arm] = {"E": floor, "A": float(np.exp(intercept)), "gamma": float(-slope), "gamma_se": float(se)}
    laws[baseline]["fitted"] = fit.parameters
    return laws
