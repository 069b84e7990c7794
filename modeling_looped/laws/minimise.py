"""The minimiser behind every fit: damped Newton steps on many problems of one law at once, deterministic.

Each problem has its own start, target and run weights, so that a thousand bootstrap refits are one call. The step is
taken in coordinates where the quadratic above the objective (Gauss-Newton with weights psi(r) / r) is the identity;
there the true Hessian's eigenvalues are made positive and damped, so each accepted step lowers the objective.
"""

from dataclasses import dataclass

import numpy as np

RELATIVE = 1e-11  # predicted decrease of the objective, relative to it, at which a problem is finished


@dataclass
class Minimum:
    """Arrays over the B problems: parameters (B, p), objective, predicted further decrease relative to it, done."""

    theta: np.ndarray
    objective: np.ndarray
    decrement: np.ndarray
    converged: np.ndarray
    iterations: np.ndarray


def derivatives(model, theta, target, weights, objective):
    """Objective (B,), gradient (B, p), Hessian (B, p, p) and the quadratic majorant (B, p, p) at theta (B, p)."""
    value, slope = model.evaluate(theta)
    if objective.on == "loss":
        value, observed = np.exp(value), np.exp(target)
        slope = slope * value[..., None]
        rho, psi, second, majorant = objective(value - observed)
        curvature = model.curvature(theta, weights * psi * value)
        bend = weights * psi / value  # d2 exp(f) = exp(f) (d2 f + df df')
    else:
        rho, psi, second, majorant = objective(value - target)
        curvature = model.curvature(theta, weights * psi)
        bend = 0.0
    gradient = np.einsum("bn,bnp->bp", weights * psi, slope)
    transposed = np.swapaxes(slope, 1, 2)
    upper = transposed @ ((weights * majorant)[..., None] * slope)
    hessian = transposed @ ((weights * second + bend)[..., None] * slope) + curvature
    return (weights * rho).sum(axis=1), gradient, hessian, upper


def residuals(model, theta, target, objective):
    """prediction - observation on the objective's scale; target holds logs."""
    value = model.values(theta)
    return np.exp(value) - np.exp(target) if objective.on == "loss" else value - target


def totals(model, theta, target, weights, objective):
    """The summed objective for each row of theta, (B,)."""
    return (weights * objective(residuals(model, theta, target, objective))[0]).sum(axis=1)


def _whitened(gradient, hessian, upper):
    """Gradient and Hessian in coordinates where `upper` is the identity, and the map back."""
    scale = np.sqrt(np.maximum(np.einsum("bpp->bp", upper), 1e-300))
    unit = upper / (scale[:, :, None] * scale[:, None, :])
    value, vector = np.linalg.eigh(unit)
    # directions that the runs do not see at all stay where they are instead of running away
    root = np.where(value > 1e-14 * value[:, -1:], 1 / np.sqrt(np.maximum(value, 1e-300)), 0.0)
    back = vector * root[:, None, :] / scale[:, :, None]
    g = np.einsum("bpi,bp->bi", back, gradient)
    return g, np.swapaxes(back, 1, 2) @ hessian @ back, back


def _state(model, theta, target, weights, objective, free):
    """Objective, and slope, curvature and basis along the principal directions of the damped step."""
    f, g, h, u = derivatives(model, theta, target, weights, objective)
    gw, hw, back = _whitened(g[:, free], h[:, free][:, :, free], u[:, free][:, :, free])
    value, vector = np.linalg.eigh(hw)
    return [f, np.einsum("bji,bj->bi", vector, gw), value, back @ vector]


def minimise(model, theta, target, weights, objective, *, fixed=(), max_iterations=300, tolerance=RELATIVE):
    """Minimise sum_i weights_i objective(model_i - target_i) for each row of theta, in place of a loop over rows.

    tolerance: predicted further decrease, relative to the objective, at which a problem is finished.
    target, weights: (n,) or (B, n). `fixed`: columns of theta that stay at their start (for profiles).
    """
    theta = np.array(theta, float)
    count = len(theta)
    free = np.setdiff1d(np.arange(model.p), np.asarray(fixed, int))
    target = np.broadcast_to(target, (count, model.n))
    weights = np.broadcast_to(weights, (count, model.n))
    damping = np.full(count, 1e-2)
    final = Minimum(theta, np.full(count, np.inf), np.full(count, np.inf), np.zeros(count, bool), np.zeros(count, int))
    # below this the residuals are rounding (a curve through its points), and a relative decrease means nothing
    floor = 1e-26 * weights.sum(axis=1)
    live = np.arange(count)
    state = None
    for iteration in range(max_iterations):
        if state is None:
            state = _state(model, theta[live], target[live], weights[live], objective, free)
        f, slope, value, basis = state
        curved = np.maximum(np.abs(value), 1e-10)
        decrement = 0.5 * (slope**2 / curved).sum(axis=1)
        relative = decrement / np.maximum(f, 1e-300)
        finished = (decrement <= tolerance * f + floor[live]) & np.isfinite(f)
        final.objective[live], final.decrement[live], final.iterations[live] = f, relative, iteration
        final.converged[live] = finished
        if finished.any():
            keep = ~finished
            live = live[keep]
            if not len(live):
                break
            state = [part[keep] for part in state]
            f, slope, value, basis = state
            curved = curved[keep]
        amount = -slope / (curved + damping[live][:, None])
        trial = theta[live]
        trial[:, free] += np.einsum("bpi,bi->bp", basis, amount)
        predicted = -(slope * amount + 0.5 * value * amount**2).sum(axis=1)
        with np.errstate(all="ignore"):
            reached = totals(model, trial, target[live], weights[live], objective)
        ratio = (f - reached) / np.maximum(predicted, 1e-300)
        accept = np.isfinite(reached) & (reached < f)
        shrink = np.where(ratio > 0.75, 0.2, np.where(ratio > 0.25, 0.6, 2.0))
        damping[live] = np.clip(np.where(accept, damping[live] * shrink, damping[live] * 5), 1e-12, 1e12)
        stuck = ~accept & (damping[live] >= 1e12)
        if accept.any():
            theta[live[accept]] = trial[accept]
            moved = live[accept]
            fresh = _state(model, theta[moved], target[moved], weights[moved], objective, free)
            for part, new in zip(state, fresh, strict=True):
                part[accept] = new
        if stuck.any():
            live = live[~stuck]
            if not len(live):
                break
            state = [part[~stuck] for part in state]
    final.theta = theta
    return final
