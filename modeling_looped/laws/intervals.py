"""How well the runs fix each parameter: profiles, bootstraps, and the verdict "identified" or not.

A profile holds one parameter at a series of values and refits the others; the interval is where the objective stays
within its threshold (F distribution; the scale of a Huber or asymmetric fit is sum psi^2 / sum psi'). A parameter
whose interval is open, or wider than it is large, is NOT identified, and its point value should not be quoted.
Bootstraps refit all draws at once: 1,000 refits of 240 runs take about a second.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import f as f_distribution

from modeling_looped.laws.fitting import FitRefused
from modeling_looped.laws.minimise import derivatives, minimise, residuals

_EXPONENT_RANGE = (0.002, 3.0)
_STEPS = np.array([0.5, 1.0, 1.5, 2.0, 2.5, 3.5, 5.0, 8.0, 15.0, 40.0, 150.0])
_FLOOR_SHARES = np.array([0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97, 0.99])  # of the lowest loss
MAX_HALF_WIDTH = {"exponent": 0.5, "floor": 0.2}  # of the estimate; wider is not identified
MAX_FAILED_DRAWS = 0.05
NARROW_SPAN = 30.0  # of N * T, below which a free L(N, T) rests on the shape of its optimum alone


@dataclass
class Profile:
    """Profile of one parameter. `values` are natural (an exponent, or a level at the pivot in units of the loss).

    statistic: 2 (objective - optimum) / scale at each value; the interval is where it is below `threshold`.
    closed: (low end closed, high end closed); an open end is where the search stopped.
    """

    name: str
    estimate: float
    low: float
    high: float
    closed: tuple
    level: float
    threshold: float
    values: np.ndarray = field(repr=False)
    statistic: np.ndarray = field(repr=False)
    role: str = "exponent"

    @property
    def identified(self):
        half = 0.5 * (self.high - self.low)
        return all(self.closed) and half <= MAX_HALF_WIDTH[self.role] * abs(self.estimate)

    def __str__(self):
        left = f"{self.low:.4g}" if self.closed[0] else f"below {self.low:.4g}"
        right = f"{self.high:.4g}" if self.closed[1] else f"above {self.high:.4g}"
        verdict = "" if self.identified else "  NOT IDENTIFIED"
        return f"{self.name} = {self.estimate:.4g} [{left}, {right}]{verdict}"


def scale_of(fit):
    """Variance unit of the objective: SSE / (n - p) for least squares, sum psi^2 / sum psi' corrected alike else."""
    r = residuals(fit.model, fit.theta[None], fit.target, fit.objective_kind)[0]
    _, psi, second, _ = fit.objective_kind(r)
    freedom = max(fit.n - fit.model.p, 1)
    curvature = max((fit.weights * second).sum(), 1.0)
    return float((fit.weights * psi**2).sum() / curvature * fit.n / freedom)


def _natural(fit, name, value):
    """The printed value of a fitting coordinate: exp for levels, itself for exponents."""
    parameter = name.split("[")[0]
    if parameter in fit.law.terms:
        return np.exp(value)
    if fit.law.curve is not None and parameter not in fit.law.curve.positive_exponents and parameter != "phi":
        return np.exp(value)
    return value


def _is_floor(fit, name):
    return name.split("[")[0] in (fit.law.floor, "E")


def _range(fit, name):
    parameter = name.split("[")[0]
    if parameter == "phi":
        return -2.0, 3.0
    if parameter in fit.law.terms or (fit.law.curve is not None and parameter not in fit.law.curve.positive_exponents):
        lowest = fit.target.min()
        if _is_floor(fit, name):
            return lowest - np.log(100.0), lowest + 0.02
        return fit.theta[fit.model.names.index(name)] - 12.0, fit.theta[fit.model.names.index(name)] + 12.0
    return _EXPONENT_RANGE


def profile(fit, name, level=0.95):
    """Profile of the parameter `name` (as in `fit.model.names`) with its interval at `level`.

    Raises ValueError for an unknown name.
    """
    model = fit.model
    if name not in model.names:
        raise ValueError(f"no parameter {name!r}; there are {model.names}")
    index = model.names.index(name)
    scale = scale_of(fit)
    threshold = f_distribution.ppf(level, 1, max(fit.n - model.p, 1))
    hessian = derivatives(model, fit.theta[None], fit.target[None], fit.weights[None], fit.objective_kind)[2][0]
    inverse = np.linalg.pinv(hessian, hermitian=True)
    unit = np.sqrt(max(inverse[index, index] * scale, 1e-24))
    response = inverse[:, index] / max(inverse[index, index], 1e-300)  # how the others move with this one
    low, high = _range(fit, name)
    centre = fit.theta[index]

    role = "floor" if _is_floor(fit, name) else "exponent"
    centre = max(centre, low)
    other_floors = [] if fit.law.floor is None else sorted(set(model.slots[fit.law.floor].values()) - {index})

    def statistic(at):
        followed = fit.theta + np.outer(at - centre, response)
        plain = np.tile(fit.theta, (len(at), 1))
        starts = [followed, plain]
        if other_floors:  # a floor that ran to zero is a trap: its log is flat there
            lifted = plain.copy()
            lifted[:, other_floors] = fit.target.min() - 0.5
            starts.append(lifted)
        count, starts = len(starts), np.concatenate(starts)
        starts[:, index] = np.tile(at, count)
        with np.errstate(all="ignore"):
            found = minimise(
                model,
                starts,
                fit.target,
                fit.weights,
                fit.objective_kind,
                fixed=[index],
                max_iterations=100,
                tolerance=1e-6,
            )
        least = np.nanmin(found.objective.reshape(count, -1), axis=0)
        return np.maximum(2 * (least - fit.objective) / max(scale, 1e-300), 0)

    steps = [unit * _STEPS, unit * _STEPS]
    if role == "floor":
        shares = fit.target.min() + np.log(_FLOOR_SHARES) - centre
        steps = [np.union1d(s, side * shares[side * shares > 0]) for side, s in zip((-1, 1), steps, strict=True)]
    sides = []
    for side, bound, step in ((-1, low, steps[0]), (1, high, steps[1])):
        at = centre + side * step
        at = at[(at > low) & (at < high)]
        sides.append(np.append(at, bound) if side * (bound - centre) > 0 else at)
    stats = statistic(np.concatenate(sides))
    stats = [stats[: len(sides[0])], stats[len(sides[0]) :]]
    ends, closed, brackets = [centre, centre], [False, False], {}
    for k, (at, stat) in enumerate(zip(sides, stats, strict=True)):
        beyond = np.flatnonzero(stat > threshold)
        if len(beyond):
            outer = beyond[0]
            inner = (centre, 0.0) if outer == 0 else (at[outer - 1], stat[outer - 1])
            brackets[k] = [*inner, at[outer], stat[outer]]
            closed[k] = True
        elif len(at):
            ends[k] = at[-1]
    for k, end in zip(brackets, _crossings(statistic, list(brackets.values()), threshold), strict=True):
        ends[k] = end
    values = np.concatenate([sides[0], [centre], sides[1]])
    stats = np.concatenate([stats[0], [0.0], stats[1]])
    order = np.argsort(values)
    ends = [float(_natural(fit, name, e)) for e in ends]
    return Profile(
        name,
        float(_natural(fit, name, centre)),
        ends[0],
        ends[1],
        tuple(closed),
        level,
        float(threshold),
        _natural(fit, name, values[order]),
        stats[order],
        role,
    )


def _crossings(statistic, brackets, threshold):
    """Where the statistic crosses the threshold in each (inside, its value, outside, its value).

    The root of the statistic is nearly linear, so three secant steps do.
    """
    if not brackets:
        return []
    root = np.sqrt(threshold)
    a, fa, b, fb = np.array(brackets).T.copy()
    fa, fb = np.sqrt(np.maximum(fa, 0)), np.sqrt(fb)
    for _ in range(3):
        share = (root - fa) / np.maximum(fb - fa, 1e-12)
        at = a + (b - a) * np.clip(share, 0.02, 0.98)
        value = np.sqrt(np.maximum(statistic(at), 0))
        outside = value > root
        b, fb = np.where(outside, at, b), np.where(outside, value, fb)
        a, fa = np.where(outside, a, at), np.where(outside, fa, value)
    return a + (b - a) * np.clip((root - fa) / np.maximum(fb - fa, 1e-12), 0, 1)


def profiles(fit, level=0.95):
    """{name: Profile} of every parameter of the fit."""
    return {name: profile(fit, name, level) for name in fit.model.names}


@dataclass
class Bootstrap:
    """Refits of resampled runs. theta: (draws, p) in fitting coordinates; failed: share that did not converge."""

    kind: str
    theta: np.ndarray = field(repr=False)
    failed: float
    fit: object = field(repr=False)

    def natural(self, arm=None):
        """{symbol: (draws,) array} of one arm."""
        model = self.fit.model
        values = model.local_to_natural(model.local(self.theta.T, arm))
        return {k: np.broadcast_to(v, len(self.theta)) for k, v in values.items()}

    def standard_errors(self, arm=None):
        return {k: float(v.std(ddof=1)) for k, v in self.natural(arm).items()}

    def interval(self, symbol, arm=None, level=0.95):
        tail = 50 * (1 - level)
        return tuple(float(x) for x in np.percentile(self.natural(arm)[symbol], [tail, 100 - tail]))


def bootstrap(fit, kind="case", *, draws=1000, seed=0, blocks=None):
    """Refit `draws` resamples, warm-started at the fit. Deterministic for a seed.

    case: runs, within each arm. block: whole blocks of runs (`blocks`: (n,) labels, such as one budget and loop
    count). residual: fitted curve plus resampled, centred residuals, within each arm: keeps the design.
    Raises FitRefused when more than 5% of the refits fail.
    """
    rng = np.random.default_rng(seed)
    model, n = fit.model, fit.n
    targets, weights = fit.target, fit.weights
    groups = [np.flatnonzero(model.arm_index == a) for a in range(len(model.arm_names))]
    if kind == "case":
        counts = np.zeros((draws, n))
        for rows in groups:
            counts[:, rows] = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=draws)
        weights = fit.weights * counts
    elif kind == "block":
        if blocks is None or len(blocks) != n:
            raise ValueError(f"kind='block' needs blocks: one label for each of the {n} runs")
        labels, index = np.unique(np.asarray(blocks), return_inverse=True)
        if len(labels) < 5:
            raise FitRefused("too few blocks", f"{len(labels)} blocks; resampling needs at least 5")
        counts = rng.multinomial(len(labels), np.full(len(labels), 1 / len(labels)), size=draws)
        weights = fit.weights * counts[:, index]
    elif kind == "residual":
        on_loss = fit.objective_kind.on == "loss"
        fitted = model.values(fit.theta[None])[0]
        error = -residuals(model, fit.theta[None], fit.target, fit.objective_kind)[0]
        inflation = np.sqrt(n / max(n - model.p, 1))
        drawn = np.empty((draws, n))
        for rows in groups:
            centred = (error[rows] - error[rows].mean()) * inflation
            drawn[:, rows] = centred[rng.integers(0, len(rows), (draws, len(rows)))]
        targets = np.log(np.exp(fitted) + drawn) if on_loss else fitted + drawn
    else:
        raise ValueError(f"bootstrap kind {kind!r}; there are case, block, residual")
    start = np.tile(fit.theta, (draws, 1))
    with np.errstate(all="ignore"):
        found = minimise(model, start, targets, weights, fit.objective_kind)
    good = found.converged & np.isfinite(found.theta).all(axis=1)
    failed = float(1 - good.mean())
    if failed > MAX_FAILED_DRAWS:
        raise FitRefused(
            "bootstrap failed",
            f"{failed:.0%} of {draws} {kind} refits did not converge: too few runs for resampling. Use profiles, or "
            "kind='residual', or share parameters between arms.",
        )
    return Bootstrap(kind, found.theta[good], failed, fit)


@dataclass(frozen=True)
class Verdict:
    """Whether one parameter may be quoted, and why not."""

    name: str
    identified: bool
    reason: str
    profile: Profile
    unstable: str = ""

    def __str__(self):
        text = str(self.profile).removesuffix("  NOT IDENTIFIED")
        text += "" if self.identified else f"  NOT IDENTIFIED: {self.reason}"
        return text + (f"  (unstable: {self.unstable})" if self.unstable else "")


def identification(fit, level=0.95):
    """{name: Verdict} for the exponents and the irreducible loss.

    Not identified: an open or wide profile; any of them when a two-variable law was fitted to runs whose N * T spans
    less than 30x (there E from 0 to 2.6 fits alike, depending on the subset). `unstable` says when a quarter of the
    runs carries the value (`stability`): the law bends, whatever its interval.
    """
    span_reason = ""
    columns = fit.model.columns
    if {"num_parameters", "num_tokens"} <= set(columns) and fit.law.floor is not None:
        span = np.exp(np.ptp(np.log(columns["num_parameters"]) + np.log(columns["num_tokens"])))
        if span < NARROW_SPAN:
            span_reason = f"N * T spans {span:.1f}x only; a free L(N, T) needs {NARROW_SPAN:.0f}x"
    unsteady = stability(fit)
    found = {}
    for name in _asked(fit):
        shape = profile(fit, name, level)
        reason = span_reason
        if not all(shape.closed):
            reason = "its profile is open: the runs do not bound it"
        elif not shape.identified:
            reason = f"its {level:.0%} interval is wider than {2 * MAX_HALF_WIDTH[shape.role]:.0%} of its value"
        worst = unsteady.get(name)
        unstable = ""
        if worst and abs(worst["z"]) > 4:
            unstable = f"{worst['subset']} it is {worst['value']:.4g}"
        found[name] = Verdict(name, not reason, reason, shape, unstable)
    if any(not v.identified and v.profile.role == "floor" for v in found.values()):
        # an exponent moves with the irreducible loss: with that unknown, only a tight exponent stands
        for name, v in found.items():
            half = 0.5 * (v.profile.high - v.profile.low)
            if v.identified and v.profile.role == "exponent" and half > 0.25 * abs(v.profile.estimate):
                found[name] = replace(
                    v, identified=False, reason="the irreducible loss it moves with is not identified"
                )
    return found


def _asked(fit):
    """Exponents and irreducible losses: what people quote."""
    return [n for n in fit.model.names if n.split("[")[0] not in fit.law.terms or n.split("[")[0] == fit.law.floor]


def stability(fit):
    """Refits without the lowest and without the highest quarter of the runs (by the product of the law's columns).

    {name: {"subset", "value", "z"}}: the worse of the two, z by Hausman: difference over the root of the difference of
    variances. Empty when a quarter holds fewer than three runs.
    """
    size = sum(np.log(v) for v in fit.model.columns.values())
    order = np.argsort(size, kind="stable")
    quarter = fit.n // 4
    if quarter < 3 or fit.n - quarter < fit.model.p + 3:
        return {}
    weights = np.tile(fit.weights, (2, 1))
    weights[0, order[:quarter]] = 0.0
    weights[1, order[-quarter:]] = 0.0
    with np.errstate(all="ignore"):
        found = minimise(fit.model, np.tile(fit.theta, (2, 1)), fit.target, weights, fit.objective_kind)
    variance = scale_of(fit) * np.diag(np.linalg.pinv(_hessian(fit, fit.theta, fit.weights), hermitian=True))
    worst = {}
    for subset, theta, weight, good in zip(
        ("without the smallest quarter", "without the largest quarter"),
        found.theta,
        weights,
        found.converged,
        strict=True,
    ):
        if not good:
            continue
        partial = scale_of(fit) * np.diag(np.linalg.pinv(_hessian(fit, theta, weight), hermitian=True))
        for name in _asked(fit):
            i = fit.model.names.index(name)
            spread = np.sqrt(max(partial[i] - variance[i], 0.1 * variance[i], 1e-30))
            z = float((theta[i] - fit.theta[i]) / spread)
            if name not in worst or abs(z) > abs(worst[name]["z"]):
                worst[name] = {"subset": subset, "value": float(_natural(fit, name, theta[i])), "z": z}
    return worst


def _hessian(fit, theta, weights):
    return derivatives(fit.model, theta[None], fit.target[None], weights[None], fit.objective_kind)[2][0]
