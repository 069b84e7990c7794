"""Fit a law to runs: start by variable projection, polish to a certified optimum, or refuse and say why.

    fit = fit_law("chinchilla", {"num_parameters": N, "num_tokens": T}, loss)

A fit is returned only when its convergence is certified (further decrease of the objective below 1e-9 of its value,
positive curvature) and the runs can tell the parameters apart. `certify` puts the same questions to parameters found
elsewhere: many published fits hold an optimiser's initial values or stopped early.
"""

from dataclasses import dataclass, field

import numpy as np

from modeling_looped.laws.forms import LAWS
from modeling_looped.laws.minimise import derivatives, minimise, residuals, totals
from modeling_looped.laws.models import GRID_EXPONENTS, bind
from modeling_looped.laws.objectives import Huber

CERTIFIED_DECREMENT = 1e-9
NUM_POLISHED = 6
MAX_CONDITION = 1e10


class FitRefused(ValueError):
    """The runs or the optimum do not support a fit. `reason` is a short name, the message says what to do."""

    def __init__(self, reason, message):
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclass
class Fit:
    """A certified fit. `parameters` is {symbol: value} (one arm) or {arm: {symbol: value}}.

    `objective` is the SUM over runs of the objective on log loss; `standard_errors` (sandwich) are in fitting
    coordinates: exponents as they are, levels as logs at the centre of the data (`pivots`).
    """

    law_name: str
    model: object = field(repr=False)
    theta: np.ndarray = field(repr=False)
    target: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    objective_kind: object
    objective: float
    certificate: dict
    warnings: list

    @property
    def law(self):
        return self.model.law

    @property
    def n(self):
        return self.model.n

    @property
    def arms(self):
        return self.model.arm_names

    @property
    def parameters(self):
        natural = self.model.natural(self.theta)
        natural = {arm: {k: float(v) for k, v in values.items()} for arm, values in natural.items()}
        return natural[None] if list(natural) == [None] else natural

    @property
    def pivots(self):
        return self.model.pivots

    def local(self, arm=None):
        """{symbol: value} of one arm."""
        return self.parameters if self.arms == [None] else self.parameters[arm]

    @property
    def residuals(self):
        """log(observed) - log(fitted), per run."""
        return self.target - self.model.values(self.theta[None])[0]

    @property
    def covariance(self):
        """Sandwich covariance in fitting coordinates, with the n / (n - p) correction."""
        value, slope = self.model.evaluate(self.theta[None])
        if self.objective_kind.on == "loss":
            slope = slope * np.exp(value)[..., None]
        psi = self.objective_kind(residuals(self.model, self.theta[None], self.target, self.objective_kind)[0])[1]
        hessian = derivatives(
            self.model, self.theta[None], self.target[None], self.weights[None], self.objective_kind
        )[2][0]
        score = slope[0] * (self.weights * psi)[:, None]
        inverse = np.linalg.pinv(hessian, hermitian=True)
        return inverse @ (score.T @ score) @ inverse * self.n / max(self.n - self.model.p, 1)

    @property
    def standard_errors(self):
        return dict(zip(self.model.names, np.sqrt(np.maximum(np.diag(self.covariance), 0)), strict=True))

    def at_pivot(self):
        """{name: value}: every term at the centre of the data in units of the loss, every exponent as it is."""
        levels = set(self.law.terms)
        return {
            name: float(np.exp(v) if name.split("[")[0] in levels else v)
            for name, v in zip(self.model.names, self.theta, strict=True)
        }

    def predict(self, columns, arm=None):
        """Predicted target (loss) at `columns` {name: array}; `arm` is one name for all rows."""
        n = len(np.atleast_1d(next(iter(columns.values()))))
        arms = None if self.arms == [None] else [arm] * n
        columns = {k: np.atleast_1d(np.asarray(v, float)) for k, v in columns.items()}
        return np.exp(self.model.rebind(columns, arms).values(self.theta[None])[0])

    @property
    def r_squared(self):
        """On the target itself (loss), not its log."""
        observed = np.exp(self.target)
        fitted = np.exp(self.target - self.residuals)
        return float(1 - ((observed - fitted) ** 2).sum() / ((observed - observed.mean()) ** 2).sum())


def check_design(model):
    """Raise FitRefused when the runs cannot tell the law's parameters apart, whatever the losses are."""
    law = model.law
    distinct = len(np.unique(np.stack([model.arm_index, *model.columns.values()], axis=1), axis=0))
    if distinct < model.p + 1:
        raise FitRefused(
            "too few runs",
            f"{distinct} distinct runs for {model.p} parameters of {law.formula!r}; at least {model.p + 1} are needed",
        )
    logs = {c: np.log(v) for c, v in model.columns.items()}
    fitted_columns = [c for c in law.columns if law.curve is None or c in ("num_parameters", "num_tokens")]
    for column in fitted_columns:
        spread = np.ptp(logs[column])
        if spread < np.log(1.5):
            raise FitRefused(
                "no spread",
                f"column {column} spans a factor of {np.exp(spread):.2f} only; its exponent needs at least 1.5, "
                f"better 10. Fix that exponent or add runs.",
            )
    if (
        {"num_parameters", "num_tokens"} <= set(law.columns)
        and law.target == "loss"
        and "unique_tokens" not in law.columns
    ):
        x = logs["num_parameters"] - logs["num_parameters"].mean()
        y = logs["num_tokens"] - logs["num_tokens"].mean()
        axes = np.linalg.svd(np.stack([x, y], axis=1), compute_uv=False)
        if axes[1] < 0.03 * axes[0]:
            slope = (x @ y) / (x @ x)
            raise FitRefused(
                "runs on one line",
                f"tokens follow parameters (T ~ N^{slope:.2f}, off the line by {axes[1] / axes[0]:.1%} of its "
                "length), so the exponents of N and T cannot be told apart. Fit L(C) instead, or add runs at other "
                "ratios T/N.",
            )


def fit_law(law, columns, target, *, arms=None, own=(), objective=None, weights=None, fixed=None, max_iterations=300):
    """Fit `law` (a name in LAWS or a Law) to `target` (loss in nats) by minimising the summed objective (of log loss
    unless it says otherwise).

    columns: {column of the law: (n,) array}. arms: (n,) labels; `own` names the parameters that each arm has for
    itself. objective: Huber(1e-3) unless given. weights: (n,) per run. fixed: {symbol: value} held while the rest is
    fitted (levels at their unit; only with parameters shared by the arms).
    Raises FitRefused when the design or the optimum does not support the fit, ValueError for bad input.
    """
    name = law if isinstance(law, str) else law.formula
    if isinstance(law, str):
        if law not in LAWS:
            raise ValueError(f"no law {law!r}; there are {sorted(LAWS)}")
        law = LAWS[law]
    target = np.asarray(target, float)
    if not (np.isfinite(target).all() and (target > 0).all()):
        bad = int(np.flatnonzero(~(np.isfinite(target) & (target > 0)))[0])
        raise ValueError(f"{law.target} must be finite and positive; row {bad} holds {target[bad]}")
    model = bind(law, columns, arms, own)
    if len(target) != model.n:
        raise ValueError(f"{len(target)} values of {law.target} for {model.n} rows")
    objective = objective or Huber()
    weights = np.ones(model.n) if weights is None else np.asarray(weights, float)
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise ValueError(
            "weights must be finite, not negative and not all zero (a weight is not a standard deviation)"
        )
    fixed = fixed or {}
    free_count = model.p - len(fixed)
    if not fixed:
        check_design(model)
    elif model.n < free_count + 1:
        raise FitRefused("too few runs", f"{model.n} runs for {free_count} free parameters")
    held = _hold(model, fixed)
    log_target = np.log(target)
    starts = model.starts(target)
    for index, value in held.items():
        starts[:, index] = value
    with np.errstate(all="ignore"):
        score = totals(model, starts, log_target, weights, objective)
    order = np.argsort(np.where(np.isfinite(score), score, np.inf), kind="stable")[:NUM_POLISHED]
    result = minimise(
        model, starts[order], log_target, weights, objective, fixed=list(held), max_iterations=max_iterations
    )
    best = int(np.argmin(np.where(np.isfinite(result.objective), result.objective, np.inf)))
    best, result, held = _without_floor(model, result, best, held, target, weights, objective, max_iterations)
    theta = result.theta[best]
    agreeing = int((result.objective <= result.objective[best] * (1 + 1e-6) + 1e-300).sum())
    certificate = _certificate(model, theta, log_target, weights, objective, list(held))
    certificate |= {"starts": len(starts), "polished": len(order), "agreeing": agreeing}
    certificate |= {"iterations": int(result.iterations[best])}
    _refuse_uncertified(certificate, bool(result.converged[best]), max_iterations, model)
    fit = Fit(name, model, theta, log_target, weights, objective, float(result.objective[best]), certificate, [])
    fit.warnings = _warnings(fit, target, held)
    return fit


def _hold(model, fixed):
    """{column of theta: value} for the symbols in `fixed`."""
    held = {}
    for symbol, value in fixed.items():
        if symbol not in model.law.parameters:
            raise ValueError(f"fixed={symbol!r}: the law has the parameters {list(model.law.parameters)}")
        if model.law.curve is not None or model.law.terms.get(symbol):
            raise ValueError(f"fixed={symbol!r}: only exponents and the irreducible loss can be held")
        for index in set(model.slots[symbol].values()):
            held[index] = np.log(value) if symbol in model.law.terms else value
    return held


def _without_floor(model, result, best, held, target, weights, objective, max_iterations):
    """An irreducible loss that runs to zero has no optimum in its log: hold it at zero when that is as good."""
    floors = set(model.slots[model.law.floor].values()) - set(held) if model.law.floor is not None else set()
    gone = [i for i in floors if result.theta[best, i] < np.log(1e-3 * target.min())]
    if not gone:
        return best, result, held
    held = held | dict.fromkeys(gone, np.log(target.min()) - 20.0)
    theta = result.theta[best].copy()
    theta[gone] = np.log(target.min()) - 20.0
    again = minimise(
        model, theta[None], np.log(target), weights, objective, fixed=list(held), max_iterations=max_iterations
    )
    return 0, again, held


def _certificate(model, theta, log_target, weights, objective, fixed):
    """Numbers that say whether theta is an optimum: predicted decrease, least curvature, condition of the runs."""
    free = np.setdiff1d(np.arange(model.p), fixed)
    with np.errstate(all="ignore"):
        f, g, h, u = (part[0] for part in derivatives(model, theta[None], log_target[None], weights[None], objective))
    g, h, u = g[free], h[np.ix_(free, free)], u[np.ix_(free, free)]
    if not (np.isfinite(f) and np.isfinite(g).all() and np.isfinite(h).all()):
        return {"objective": f, "decrement": np.inf, "least_curvature": np.nan, "condition": np.inf}
    scale = np.sqrt(np.maximum(np.diag(u), 1e-300))
    value, vector = np.linalg.eigh(u / np.outer(scale, scale))
    condition = value[-1] / max(value[0], 1e-300)
    root = vector / np.sqrt(np.maximum(value, 1e-14 * value[-1])) / scale[:, None]
    curvature, basis = np.linalg.eigh(root.T @ h @ root)
    slope = basis.T @ (root.T @ g)
    decrease = 0.5 * (slope**2 / np.maximum(np.abs(curvature), 1e-8)).sum()
    noise = 1e-24 * weights.sum()
    return {
        "objective": float(f),
        "decrement": float(0.0 if decrease < noise else decrease / max(f, 1e-300)),
        "least_curvature": float(curvature[0]),
        "condition": float(condition),
        "least_known": [str(n) for n in _least_known(model, free, vector[:, 0])],
    }


def _least_known(model, free, direction):
    names = [model.names[i] for i in free]
    order = np.argsort(-np.abs(direction))
    return [names[i] for i in order[:3] if abs(direction[i]) > 0.3]


def _refuse_uncertified(certificate, converged, max_iterations, model):
    if certificate["condition"] > MAX_CONDITION:
        raise FitRefused(
            "not identifiable",
            f"the runs fix no unique value of {certificate['least_known']} (condition "
            f"{certificate['condition']:.1e}). Share a parameter between arms, fix one, or add runs that separate "
            "them.",
        )
    if not converged or certificate["decrement"] > CERTIFIED_DECREMENT:
        raise FitRefused(
            "not converged",
            f"after {max_iterations} iterations the objective would still fall by {certificate['decrement']:.1e} of "
            "its value. Raise max_iterations; if that does not help, the law does not fit these runs.",
        )
    if certificate["least_curvature"] <= 0:
        raise FitRefused(
            "no minimum",
            "the objective curves downwards at the best point found: a saddle or a flat ridge, not an optimum",
        )


def _warnings(fit, target, held):
    """What a reader must know before using the numbers."""
    found = []
    law, model = fit.law, fit.model
    exponents = (
        [p for p in law.parameters if p not in law.terms] if law.curve is None else law.curve.positive_exponents
    )
    for exponent in exponents:
        for index in sorted(set(model.slots[exponent].values()) - set(held)):
            value = fit.theta[index]
            if not GRID_EXPONENTS[0] <= value <= GRID_EXPONENTS[-1]:
                found.append(
                    f"censored: {model.names[index]} = {value:.3g} lies outside [{GRID_EXPONENTS[0]:g}, "
                    f"{GRID_EXPONENTS[-1]:g}]; read it as a bound, not as a value"
                )
    if law.floor is not None:
        for index in sorted(set(model.slots[law.floor].values())):
            if np.exp(fit.theta[index]) < 0.01 * target.min():
                found.append(f"{model.names[index]} ran to zero: the runs show no irreducible loss")
    if fit.certificate["condition"] > 1e6:
        found.append(
            f"weakly identified: {fit.certificate['least_known']} trade off against each other "
            f"(condition {fit.certificate['condition']:.1e}); read their profiles, not their values"
        )
    residual = fit.residuals
    spread = 1.4826 * np.median(np.abs(residual - np.median(residual)))
    if spread > 1e-12:
        far = np.flatnonzero(np.abs(residual - np.median(residual)) > 8 * spread)
        if len(far):
            found.append(f"outliers: rows {far.tolist()[:8]} lie more than 8 robust standard deviations off the curve")
    return found


def certify(law, columns, target, parameters, *, arms=None, own=(), objective=None, weights=None, tolerance=1e-4):
    """Is `parameters` ({symbol: value}, or per arm) an optimum of the summed objective? Returns a dict with `verdict`.

    "optimum" when the objective is within `tolerance` (relative) of our certified optimum, else "not an optimum" with
    the ratio of the objectives and our parameters. Catches initial values passed off as a fit and early stops.
    """
    best = fit_law(law, columns, target, arms=arms, own=own, objective=objective, weights=weights)
    theta = best.model.from_natural(parameters)
    value = float(totals(best.model, theta[None], best.target, best.weights, best.objective_kind)[0])
    return {
        "verdict": "optimum" if value <= best.objective * (1 + tolerance) else "not an optimum",
        "objective": value,
        "best_objective": best.objective,
        "ratio": value / best.objective,
        "best": best.parameters,
    }
