"""Loops as a scaling knob: recurrence equivalence, the best loop count by budget, compute saved against growing size.

Recurrence equivalence (arXiv 2604.21106): a core used K times counts as K^phi cores. The other functions analyse
grids of depth x loop count x weight decay such as the data-constrained study of arXiv 2609.19107.
"""

import numpy as np

from modeling_looped.laws.approaches import curve_optima


def equivalent_parameters(once, recurrent, num_loops, phi):
    """N_once + K^phi N_rec."""
    return np.asarray(once, float) + np.asarray(num_loops, float) ** phi * np.asarray(recurrent, float)


def block_worth(num_loops, phi):
    """How many untied blocks a block used `num_loops` times is worth: K^phi."""
    return float(num_loops) ** phi


def isodepth_size_ratio(num_loops, *, executed=20, once=4, injection=1 / 6):
    """Unique parameters of an iso-depth loop over the plain stack: (once + (executed - once)/K + injection) /
    executed.

    Blocks are the unit; `injection` is the input adapter of a loop (absent at K = 1).
    """
    return (once + (executed - once) / num_loops + (injection if num_loops > 1 else 0.0)) / executed


def frontier_exponents(alpha, beta):
    """(size, token) exponents of the compute-optimal frontier on C = k N T."""
    return beta / (alpha + beta), alpha / (alpha + beta)


def best_loops(compute, num_loops, loss, budgets):
    """[Optimum or None] per budget: parabola of log loss in log K, losses interpolated linearly in compute.

    An optimum below the smallest or above the largest loop count is censored.
    """
    return curve_optima(compute, num_loops, loss, budgets)


def convex_frontier(compute, loss):
    """Row indices of the lower convex hull in (log compute, loss), up to the lowest loss, by compute."""
    x, y = np.log(np.asarray(compute, float)), np.asarray(loss, float)
    hull = []
    for i in np.lexsort((y, x)):
        if hull and x[i] == x[hull[-1]]:
            continue
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(int(i))
    return hull[: int(np.argmin(y[hull])) + 1]


def compute_saved(reference_compute, reference_loss, compute, loss):
    """For each reference run: its compute over the compute at which the convex frontier of the other runs has its
    loss.

    Compute is interpolated linearly in the loss between neighbours on the frontier; nan outside it.
    """
    keep = convex_frontier(compute, loss)
    x, y = np.asarray(loss, float)[keep][::-1], np.asarray(compute, float)[keep][::-1]
    at = np.atleast_1d(np.asarray(reference_loss, float))
    inside = (at >= x[0]) & (at <= x[-1])
    return np.where(inside, np.asarray(reference_compute, float) / np.interp(at, x, y), np.nan)


def best_by(keys, loss):
    """Lowest loss for each distinct row of `keys` (list of arrays): indices, in order of the keys."""
    stacked = np.stack([np.asarray(k, float) for k in keys], axis=1)
    loss = np.asarray(loss, float)
    found = []
    for row in np.unique(stacked, axis=0):
        members = np.flatnonzero((stacked == row).all(axis=1))
        found.append(int(members[np.argmin(loss[members])]))
    return found
