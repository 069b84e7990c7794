"""How fast the fit is, measured: cold fit, 1,000 bootstrap refits, and a grid of L-BFGS starts in the same run.

looped laws speed chinchilla_points.csv
"""

import time

import numpy as np
from scipy.optimize import minimize

from modeling_looped.laws.fitting import fit_law
from modeling_looped.laws.intervals import bootstrap
from modeling_looped.laws.objectives import Huber

# Hoffmann et al., appendix D.3: 5 x 6 x 6 x 5 x 5 = 4,500 starts of L-BFGS
GRID = {
    "e": (-1.0, -0.5, 0.0, 0.5, 1.0),
    "a": (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
    "b": (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
    "alpha": (0.0, 0.5, 1.0, 1.5, 2.0),
    "beta": (0.0, 0.5, 1.0, 1.5, 2.0),
}


def grid_of_starts(num_parameters, num_tokens, loss, *, every=1):
    """Best objective of L-BFGS-B (analytic gradient, summed Huber 1e-3) over every `every`-th start of GRID."""
    log_n, log_t, goal = np.log(num_parameters), np.log(num_tokens), np.log(loss)
    objective = Huber()

    def value(q):
        terms = np.stack([np.full_like(goal, q[0]), q[1] - q[3] * log_n, q[2] - q[4] * log_t])
        top = terms.max(axis=0)
        weights = np.exp(terms - top)
        total = weights.sum(axis=0)
        weights /= total
        rho, psi, _, _ = objective(top + np.log(total) - goal)
        shares = weights * psi
        gradient = [shares[0].sum(), shares[1].sum(), shares[2].sum(), -shares[1] @ log_n, -shares[2] @ log_t]
        return rho.sum(), np.array(gradient)

    starts = np.stack(np.meshgrid(*GRID.values(), indexing="ij"), axis=-1).reshape(-1, 5)[::every]
    best, arrived = np.inf, []
    for start in starts:
        found = minimize(value, start, jac=True, method="L-BFGS-B")
        arrived.append(found.fun)
        best = min(best, found.fun)
    return best, len(starts), float(np.mean(np.array(arrived) <= 1.01 * best))


def measure(table, *, every=1, refits=1000):
    """Seconds and objectives of our fit, the refits and the grid, on a table with sizes, tokens and losses."""
    columns = {"num_parameters": table["num_parameters"], "num_tokens": table["num_tokens"]}
    loss = table.loss_in_nats()
    start = time.perf_counter()
    fit = fit_law("chinchilla", columns, loss)
    cold = time.perf_counter() - start
    start = time.perf_counter()
    failed = bootstrap(fit, "case", draws=refits).failed
    resampled = time.perf_counter() - start
    start = time.perf_counter()
    objective, count, share = grid_of_starts(columns["num_parameters"], columns["num_tokens"], loss, every=every)
    grid = time.perf_counter() - start
    return {
        "runs": table.n,
        "fit_seconds": cold,
        "fit_objective": fit.objective,
        "refits": refits,
        "refit_seconds": resampled,
        "refits_failed": failed,
        "grid_starts": count,
        "grid_seconds": grid,
        "grid_objective": float(objective),
        "grid_share_within_1_percent": share,
        "times_faster": grid / cold,
    }
