"""Which of several laws the runs prefer, and what may be said when they cannot tell.

`model_set` fits every way of sharing L(C) = E + A C^-gamma between arms and weighs them by BIC; `bayes` integrates the
same models over stated priors. `exponent_or_constant` turns both into one sentence. `leave_largest_out` forecasts the
biggest runs from the smaller ones. Comparisons use least squares on the loss (Gaussian noise of one size in nats).
"""

from dataclasses import dataclass, field

import numpy as np
from scipy.special import gammaln

from modeling_looped.laws.fitting import FitRefused, fit_law
from modeling_looped.laws.intervals import bootstrap
from modeling_looped.laws.minimise import derivatives, residuals
from modeling_looped.laws.multipliers import law_multiplier
from modeling_looped.laws.objectives import Squares

# what each arm has for itself
SHARINGS = {
    "one curve": (),
    "own constant (shared E and exponent)": ("A",),
    "own exponent (shared E)": ("A", "gamma"),
    "own E (shared exponent)": ("A", "E"),
    "everything own": ("A", "E", "gamma"),
}
DECISIVE = 10.0  # difference of BIC (or of twice the log evidence) taken as settled
SETTLED_CONSTANT = 2.0  # one spare parameter can cost log n at most, so a constant never wins by much


@dataclass
class Candidate:
    """One model of the set. weight: share of evidence by BIC; log_evidence: see `bayes`."""

    name: str
    fit: object = field(repr=False)
    bic: float
    delta: float = 0.0
    weight: float = 0.0
    log_evidence: float = np.nan


def bic(fit):
    """n log(SSE / n) + k log n with k = parameters + 1 (the noise). Least squares only: raises ValueError
    otherwise.
    """
    if fit.objective_kind.name != "squares":
        raise ValueError(f"BIC needs a likelihood: fit with Squares, not {fit.objective_kind.describe()}")
    return float(fit.n * np.log(2 * fit.objective / fit.n) + (fit.model.p + 1) * np.log(fit.n))


def model_set(compute, loss, arms, *, objective=None):
    """Every sharing in SHARINGS fitted to (compute, loss, arms): [Candidate], best first. A refused one is left
    out.
    """
    objective = objective or Squares(on="loss")
    found = []
    for name, own in SHARINGS.items():
        try:
            fit = fit_law("compute", {"compute_flops": compute}, loss, arms=arms, own=own, objective=objective)
        except FitRefused:
            continue
        found.append(Candidate(name, fit, bic(fit)))
    if not found:
        raise FitRefused("no model", "none of the sharings of L(C) could be fitted to these runs")
    least = min(c.bic for c in found)
    total = sum(np.exp(-0.5 * (c.bic - least)) for c in found)
    for c in found:
        c.delta, c.weight = c.bic - least, float(np.exp(-0.5 * (c.bic - least)) / total)
    return sorted(found, key=lambda c: c.bic)


@dataclass(frozen=True)
class Priors:
    """Normal priors in fitting coordinates (log levels at the centre of the data; log exponents), stated with results.

    A parameter that each arm has for itself: the first arm has the wide prior, the others differ from it by `between`.
    """

    log_floor: tuple = (np.log(1.7), 0.3)
    log_level_sd: float = 1.0
    log_exponent: tuple = (np.log(0.1), 0.7)
    between: tuple = (("E", 0.10), ("A", 0.10), ("gamma", 0.05))

    def describe(self):
        between = ", ".join(f"{k} {v:.0%}" for k, v in self.between)
        return (
            f"E log-normal about {np.exp(self.log_floor[0]):.2f} nats (sd {self.log_floor[1]:.0%}), exponent about "
            f"{np.exp(self.log_exponent[0]):.2f} (sd {self.log_exponent[1]:.0%}), level within a factor "
            f"{np.exp(self.log_level_sd):.1f}; arms differ from the first by (1 sd) {between}; noise: Jeffreys"
        )


def bayes(candidates, priors=None, *, draws=20000, seed=0):
    """Log evidence of each candidate by importance sampling around its posterior mode; sets `log_evidence`.

    Noise is integrated out under Jeffreys' prior. Returns {name: {"log_evidence", "probability", "effective_draws"}};
    fewer than 200 effective draws: read as rough.
    """
    priors = priors or Priors()
    rng = np.random.default_rng(seed)
    found = {}
    for candidate in candidates:
        fit = candidate.fit
        mean, precision = _prior(fit, priors)
        mode, precision_post = _mode(fit, mean, precision)
        covariance = np.linalg.inv(precision_post)
        root = np.linalg.cholesky(covariance)
        p, freedom = fit.model.p, 20.0
        normal = rng.standard_normal((draws, p))
        chi = rng.chisquare(freedom, draws) / freedom
        offset = normal / np.sqrt(chi)[:, None]
        theta = mode + offset @ root.T
        log_q = (
            gammaln((freedom + p) / 2)
            - gammaln(freedom / 2)
            - 0.5 * p * np.log(freedom * np.pi)
            - np.log(np.diag(root)).sum()
            - 0.5 * (freedom + p) * np.log1p((offset**2).sum(axis=1) / freedom)
        )
        log_p = np.concatenate([_log_joint(fit, part, mean, precision) for part in np.array_split(theta, 40)])
        ratio = log_p - log_q
        top = ratio.max()
        share = np.exp(ratio - top)
        candidate.log_evidence = float(top + np.log(share.mean()))
        found[candidate.name] = {
            "log_evidence": candidate.log_evidence,
            "effective_draws": float(share.sum() ** 2 / (share**2).sum()),
        }
    best = max(v["log_evidence"] for v in found.values())
    total = sum(np.exp(v["log_evidence"] - best) for v in found.values())
    for value in found.values():
        value["probability"] = float(np.exp(value["log_evidence"] - best) / total)
    return found


def _log_exponent(model):
    return np.array([name.split("[")[0] not in model.law.terms for name in model.names])


def _prior(fit, priors):
    """Mean and precision matrix over theta, exponents in logs."""
    model = fit.model
    mean, precision = np.zeros(model.p), np.zeros((model.p, model.p))
    between = dict(priors.between)
    centre = {
        "E": priors.log_floor,
        "A": (np.log(max(np.exp(fit.target).mean() - np.exp(priors.log_floor[0]), 0.1)), priors.log_level_sd),
        "gamma": priors.log_exponent,
    }
    for parameter in model.law.parameters:
        slots = sorted(set(model.slots[parameter].values()))
        m, sd = centre[parameter]
        mean[slots] = m
        # covariance: sd^2 everywhere (the common part), and between^2 added for the arms after the first
        covariance = np.full((len(slots), len(slots)), sd**2)
        covariance[np.arange(1, len(slots)), np.arange(1, len(slots))] += between[parameter] ** 2
        precision[np.ix_(slots, slots)] = np.linalg.inv(covariance)
    return mean, precision


def _to_log(model, theta):
    return np.where(_log_exponent(model), np.log(np.maximum(theta, 1e-12)), theta)


def _log_joint(fit, q, mean, precision):
    """log p(loss | q) p(q) with the noise integrated out; q has exponents in logs."""
    model = fit.model
    theta = np.where(_log_exponent(model), np.exp(q), q)
    r = residuals(model, theta, fit.target, fit.objective_kind)
    n = fit.n
    likelihood = gammaln(n / 2) - 0.5 * n * np.log(np.pi * (r * r).sum(axis=1))
    d = q - mean
    prior = -0.5 * np.einsum("bi,ij,bj->b", d, precision, d) + 0.5 * np.linalg.slogdet(precision / (2 * np.pi))[1]
    return likelihood + prior


def _mode(fit, mean, precision):
    """Posterior mode and precision there by Gauss-Newton steps (the noise scale follows the residuals)."""
    model = fit.model
    q = _to_log(model, fit.theta)
    logs = _log_exponent(model)
    for _ in range(30):
        theta = np.where(logs, np.exp(q), q)
        f, gradient, _, upper = (
            part[0]
            for part in derivatives(model, theta[None], fit.target[None], np.ones((1, fit.n)), fit.objective_kind)
        )
        chain = np.where(logs, theta, 1.0)
        scale = fit.n / (2 * f)
        gradient = gradient * chain * scale + precision @ (q - mean)
        curvature = upper * np.outer(chain, chain) * scale + precision
        step = np.linalg.solve(curvature, gradient)
        q = q - step * min(1.0, 0.5 / max(np.abs(step).max(), 1e-12))
        if np.abs(step).max() < 1e-9:
            break
    return q, curvature


def exponent_or_constant(candidates):
    """What the comparison allows one to say: {"verdict", "sentence"}. Verdicts: constant, exponent, floor,
    undecided.
    """
    by_name = {c.name: c for c in candidates}
    constant = by_name.get("own constant (shared E and exponent)")
    exponent, floor = by_name.get("own exponent (shared E)"), by_name.get("own E (shared exponent)")
    if constant is None or exponent is None or floor is None:
        return {"verdict": "undecided", "sentence": "Not every model could be fitted; no verdict."}
    change = constant.bic - min(exponent.bic, floor.bic)
    split = exponent.bic - floor.bic
    if change < -SETTLED_CONSTANT:
        verdict = "constant"
        sentence = "the arms differ by a constant factor of compute; exponents of their own add nothing"
    elif change < DECISIVE:
        verdict, sentence = "undecided", "the runs cannot tell a constant gain from one that grows with compute"
    elif split > DECISIVE:
        verdict, sentence = "floor", "the arms differ in their irreducible loss rather than in their exponent"
    elif split < -DECISIVE:
        verdict, sentence = "exponent", "the arms differ in their exponent rather than in their irreducible loss"
    else:
        verdict = "undecided"
        sentence = (
            "a constant alone is ruled out, but the runs cannot tell whether the exponent or the irreducible loss "
            "differs; extrapolated multipliers depend on that choice"
        )
    numbers = (
        f" (BIC: own exponent {exponent.delta:+.1f}, own E {floor.delta:+.1f}, only a constant {constant.delta:+.1f}, "
        "against the best)"
    )
    return {"verdict": verdict, "sentence": sentence[0].upper() + sentence[1:] + numbers + "."}


def multiplier_by_model(candidates, baseline, variant, compute, *, index="baseline", draws=200, seed=0, level=0.95):
    """Law-based multiplier at `compute` under each candidate: [{"model", "weight", "multiplier", "low", "high"}].

    Intervals by residual bootstrap; the last row, "weighted by BIC", mixes the models' draws by their weights.
    """
    rows, mixture, shares = [], [], []
    tail = 50 * (1 - level)
    for candidate in candidates:
        fit = candidate.fit
        estimate = float(law_multiplier(fit.local(baseline), fit.local(variant), compute, index))
        refits = bootstrap(fit, "residual", draws=draws, seed=seed)
        sample = law_multiplier(refits.natural(baseline), refits.natural(variant), compute, index)
        low, high = (float(x) for x in np.percentile(sample, [tail, 100 - tail]))
        row = {"model": candidate.name, "weight": candidate.weight, "multiplier": estimate, "low": low, "high": high}
        rows.append(row)
        mixture.append(np.sort(sample))
        shares.append(np.full(len(sample), candidate.weight / len(sample)))
    draws_all, weights = np.concatenate(mixture), np.concatenate(shares)
    order = np.argsort(draws_all)
    cumulative = np.cumsum(weights[order]) / weights.sum()
    quantiles = (tail / 100, 0.5, 1 - tail / 100)
    low, middle, high = (float(draws_all[order][np.searchsorted(cumulative, q)]) for q in quantiles)
    rows.append({"model": "weighted by BIC", "weight": 1.0, "multiplier": middle, "low": low, "high": high})
    return rows


def leave_largest_out(law, columns, loss, *, size=None, count=1, arms=None, own=(), objective=None):
    """Fit without the `count` largest runs (by `size`, default the first column of the law) and forecast them.

    Returns a list of {"row", "size", "observed", "forecast", "error", "beyond"}; beyond: how many times the largest
    fitted size. Raises FitRefused when the rest does not support the fit.
    """
    loss = np.asarray(loss, float)
    size = np.asarray(next(iter(columns.values())) if size is None else size, float)
    order = np.argsort(size, kind="stable")
    kept, held = np.sort(order[:-count]), order[-count:]
    labels = None if arms is None else np.asarray(arms)
    fit = fit_law(
        law,
        {k: np.asarray(v, float)[kept] for k, v in columns.items()},
        loss[kept],
        arms=None if labels is None else labels[kept],
        own=own,
        objective=objective,
    )
    rows = []
    for i in held:
        point = {k: [np.asarray(v, float)[i]] for k, v in columns.items()}
        forecast = float(fit.predict(point, None if labels is None else labels[i])[0])
        rows.append(
            {
                "row": int(i),
                "size": float(size[i]),
                "observed": float(loss[i]),
                "forecast": forecast,
                "error": forecast - float(loss[i]),
                "beyond": float(size[i] / size[kept].max()),
            }
        )
    return rows
