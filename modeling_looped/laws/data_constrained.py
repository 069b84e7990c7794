"""Training on repeated data (Muennighoff et al., arXiv 2305.16264): loss, allocation, fit, profile of R_D.

The law counts repeated tokens (and parameters beyond the optimum for the unique data) at a decaying rate. On the
released 182 runs the objective stays within 0.9% for R_D from 8 to 1,000: quote profiles, not the published 15.4.
"""

import numpy as np
from scipy.optimize import minimize_scalar

from modeling_looped.laws.curves import DataConstrained, optimal_parameters
from modeling_looped.laws.fitting import fit_law
from modeling_looped.laws.objectives import Huber

BASE = DataConstrained.base
PUBLISHED = {"R_D": 15.387756, "R_N": 5.309743}


def _worth(unit, repeats, scale):
    return unit if scale is None else unit * (1 + scale * -np.expm1(-repeats / scale))


def effective(num_parameters, num_tokens, unique_tokens, *, r_d=PUBLISHED["R_D"], r_n=PUBLISHED["R_N"], base=BASE):
    """(effective parameters, effective tokens). r_d or r_n None: that quantity counts in full, however often
    repeated.
    """
    n, t = np.asarray(num_parameters, float), np.asarray(num_tokens, float)
    unique = np.minimum(t, unique_tokens)
    useful = np.minimum(n, optimal_parameters(unique, base))
    tokens = t if r_d is None else _worth(unique, t / unique - 1, r_d)
    size = n if r_n is None else _worth(useful, n / useful - 1, r_n)
    return size, tokens


def loss(num_parameters, num_tokens, unique_tokens, *, r_d=PUBLISHED["R_D"], r_n=PUBLISHED["R_N"], base=BASE):
    """E + A Nhat^-alpha + B That^-beta in nats."""
    size, tokens = effective(num_parameters, num_tokens, unique_tokens, r_d=r_d, r_n=r_n, base=base)
    return base["E"] + base["A"] * size ** -base["alpha"] + base["B"] * tokens ** -base["beta"]


def allocation(flops, unique_tokens, *, r_d=PUBLISHED["R_D"], r_n=PUBLISHED["R_N"], base=BASE, k=6.0):
    """(num_tokens, num_parameters, loss) that minimise the loss on C = k N T with `unique_tokens` available."""

    def value(log_tokens):
        tokens = np.exp(log_tokens)
        return float(loss(flops / k / tokens, tokens, unique_tokens, r_d=r_d, r_n=r_n, base=base))

    grid = np.linspace(np.log(1e6), np.log(flops / k / 1e6), 2000)
    start = int(np.argmin([value(x) for x in grid]))
    bounds = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    best = minimize_scalar(value, bounds=bounds, method="bounded", options={"xatol": 1e-12, "maxiter": 500})
    tokens = float(np.exp(best.x))
    return tokens, flops / k / tokens, float(best.fun)


def objective(columns, observed, *, r_d, r_n, delta=1e-3):
    """Summed Huber on log loss at given R_D, R_N."""
    predicted = loss(columns["num_parameters"], columns["num_tokens"], columns["unique_tokens"], r_d=r_d, r_n=r_n)
    return float(Huber(delta)(np.log(predicted) - np.log(observed))[0].sum())


def r_squared(columns, observed, *, r_d=PUBLISHED["R_D"], r_n=PUBLISHED["R_N"]):
    """1 - SSE / SST of the loss."""
    predicted = loss(columns["num_parameters"], columns["num_tokens"], columns["unique_tokens"], r_d=r_d, r_n=r_n)
    observed = np.asarray(observed, float)
    return float(1 - ((observed - predicted) ** 2).sum() / ((observed - observed.mean()) ** 2).sum())


def fit(columns, observed, *, objective_kind=None):
    """Fit R_D and R_N to runs with repetition, the base law held. See `profile_r_d` before quoting R_D."""
    return fit_law("data-constrained", columns, observed, objective=objective_kind or Huber())


def profile_r_d(columns, observed, values, *, r_n_grid=None):
    """For each R_D the least objective over R_N, relative to the best of all: [(R_D, R_N, ratio)]."""
    r_n_grid = np.geomspace(0.05, 1000, 60) if r_n_grid is None else r_n_grid
    rows = []
    for r_d in values:

        def value(log_rn, r_d=r_d):
            return objective(columns, observed, r_d=r_d, r_n=np.exp(log_rn))

        start = int(np.argmin([value(x) for x in np.log(r_n_grid)]))
        bounds = np.log(r_n_grid[max(start - 1, 0)]), np.log(r_n_grid[min(start + 1, len(r_n_grid) - 1)])
        best = minimize_scalar(value, bounds=bounds, method="bounded")
        rows.append((float(r_d), float(np.exp(best.x)), float(best.fun)))
    least = min(r[2] for r in rows)
    return [(r_d, r_n, value / least) for r_d, r_n, value in rows]


def fit_one(columns, observed, symbol):
    """R_D with parameters counted in full, or R_N with tokens counted in full: the least objective on a fine
    search.
    """
    if symbol not in ("R_D", "R_N"):
        raise ValueError(f"symbol {symbol!r}; there are R_D, R_N")

    def value(log_r):
        given = {"r_d": np.exp(log_r), "r_n": None} if symbol == "R_D" else {"r_d": None, "r_n": np.exp(log_r)}
        return objective(columns, observed, **given)

    grid = np.linspace(-4, 8, 2000)  # the objective is bumpy: a coarse grid stops at a side minimum
    start = int(np.argmin([value(x) for x in grid]))
    bounds = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    return float(np.exp(minimize_scalar(value, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x))
