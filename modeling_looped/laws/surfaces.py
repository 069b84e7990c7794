"""A surface without a formula over (log N, log T): a cheap cross-check of a parametric law, inside the runs only.

Thin-plate splines (radial basis functions) or a smoothing spline; a Delaunay hull guards every prediction: outside the
hull of the runs the answer is nan, never an extrapolation.
"""

import warnings

import numpy as np
from scipy.interpolate import RBFInterpolator, SmoothBivariateSpline
from scipy.spatial import Delaunay, QhullError

from modeling_looped.laws.approaches import power_law
from modeling_looped.laws.fitting import FitRefused


class Surface:
    """Log loss over (log N, log T). kind: "rbf" (thin plate, `smoothing`) or "spline" (cubic, `smoothing` in log
    loss).
    """

    def __init__(self, size, tokens, loss, *, kind="rbf", smoothing=None):
        points = np.log(np.stack([np.asarray(size, float), np.asarray(tokens, float)], axis=1))
        self.centre, self.scale = points.mean(axis=0), points.std(axis=0)
        if (self.scale == 0).any() or len(points) < 10:
            raise FitRefused(
                "no surface", f"{len(points)} runs, spread {self.scale}: a surface needs 10 runs over an area"
            )
        self.points = (points - self.centre) / self.scale
        try:
            self.hull = Delaunay(self.points)
        except QhullError:
            raise FitRefused("runs on one line", "the runs span no area in (log N, log T)") from None
        target = np.log(np.asarray(loss, float))
        if kind == "rbf":
            unique, index = np.unique(self.points.round(9), axis=0, return_inverse=True)
            index = index.ravel()
            mean = np.bincount(index, target) / np.bincount(index)
            self._value = RBFInterpolator(
                unique, mean, kernel="thin_plate_spline", smoothing=1e-2 if smoothing is None else smoothing
            )
        elif kind == "spline":
            error = 0.004 if smoothing is None else smoothing
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # fitpack warns when the knots reach the smoothing asked for
                spline = SmoothBivariateSpline(*self.points.T, target, s=len(target) * error**2)
            self._value = lambda at: spline.ev(at[:, 0], at[:, 1])
        else:
            raise ValueError(f"surface kind {kind!r}; there are rbf, spline")

    def predict(self, size, tokens):
        """Loss at (N, T), nan outside the hull of the runs."""
        at = np.log(np.stack(np.broadcast_arrays(np.atleast_1d(size), np.atleast_1d(tokens)), axis=-1).astype(float))
        at = (at.reshape(-1, 2) - self.centre) / self.scale
        inside = self.hull.find_simplex(at) >= 0
        value = np.full(len(at), np.nan)
        if inside.any():
            value[inside] = np.exp(self._value(at[inside]))
        return value

    def frontier(self, budgets, *, flops_per_token_parameter=6.0, steps=400):
        """Best (N, T, loss) on N T = C / 6 within the hull: [(C, N, T, loss)], only optima away from the hull's
        edge.
        """
        found = []
        for budget in budgets:
            product = np.log(budget / flops_per_token_parameter)
            low, high = self.points[:, 0].min(), self.points[:, 0].max()
            size = np.exp(np.linspace(low, high, steps) * self.scale[0] + self.centre[0])
            value = self.predict(size, np.exp(product) / size)
            known = np.flatnonzero(np.isfinite(value))
            if len(known) < 5:
                continue
            best = known[np.argmin(value[known])]
            if best in (known[0], known[-1]):
                continue
            found.append((float(budget), float(size[best]), float(np.exp(product) / size[best]), float(value[best])))
        return found

    def frontier_exponent(self, budgets):
        """N ~ C^a along the frontier, by least squares over the budgets with an interior optimum."""
        path = self.frontier(budgets)
        if len(path) < 3:
            raise FitRefused(
                "too few optima", f"{len(path)} budgets have an optimum inside the hull; at least 3 are needed"
            )
        return power_law([p[0] for p in path], [p[1] for p in path])


def cross_validate(predictor, n, *, folds=10, seed=0):
    """Root mean square of log(prediction / observation) over held-out folds.

    predictor(train_rows, test_rows) -> (predicted, observed) losses; nan predictions (outside the hull) are left out.
    Returns {"rmse", "scored", "folds"}.
    """
    order = np.random.default_rng(seed).permutation(n)
    errors = []
    for test in np.array_split(order, folds):
        train = np.setdiff1d(order, test)
        predicted, observed = predictor(train, np.sort(test))
        error = np.log(predicted) - np.log(observed)
        errors.append(error[np.isfinite(error)])
    errors = np.concatenate(errors)
    return {"rmse": float(np.sqrt((errors**2).mean())), "scored": len(errors), "folds": folds}
