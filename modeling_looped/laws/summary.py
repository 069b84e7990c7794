"""All results for one run table as plain data: what the terminal prints and what the HTML report shows.

`summarise` chooses the laws that the table can carry (L(N, T) when sizes and tokens vary apart, L(C) with compute),
fits them, asks which parameters are identified, and compares arms with a baseline. A refusal is a result too.
"""

from dataclasses import dataclass, field

import numpy as np

from modeling_looped.laws.approaches import approach_1, approach_2, approach_3
from modeling_looped.laws.compare import (
    Priors,
    bayes,
    exponent_or_constant,
    leave_largest_out,
    model_set,
    multiplier_by_model,
)
from modeling_looped.laws.fitting import FitRefused, fit_law
from modeling_looped.laws.forms import LAWS
from modeling_looped.laws.intervals import bootstrap, identification, profiles
from modeling_looped.laws.lint import lint, usable
from modeling_looped.laws.multipliers import Ladder, interpolated
from modeling_looped.laws.objectives import Huber, Squares
from modeling_looped.laws.surfaces import Surface, cross_validate


@dataclass
class FitSummary:
    """One fitted (or refused) law of one arm or of all arms."""

    law: str
    arm: str
    fit: object = field(default=None, repr=False)
    refusal: str = ""
    verdicts: dict = field(default_factory=dict, repr=False)
    profiles: dict = field(default_factory=dict, repr=False)
    bootstrap_errors: dict = field(default_factory=dict)
    sensitivity: list = field(default_factory=list)
    forecast: list = field(default_factory=list)
    checks: list = field(default_factory=list)


@dataclass
class Summary:
    """Everything about a table. `comparison` is None without a baseline or with one arm."""

    table: object = field(repr=False)
    findings: list = field(default_factory=list)
    num_left_out: int = 0
    fits: list = field(default_factory=list)
    ladders: dict = field(default_factory=dict, repr=False)
    baseline: str | None = None
    comparison: dict | None = None


def clean(table):
    """(usable runs, findings, number left out)."""
    findings = lint(table)
    if "loss" not in table:
        return table, findings, 0
    mask = usable(table)
    return table.where(mask), findings, int((~mask).sum())


def laws_for(table):
    """Names of the laws that the table's columns can carry, the most telling first."""
    found = []
    for name, columns in (
        ("data-constrained", ("num_parameters", "num_tokens", "unique_tokens")),
        ("recurrence", LAWS["recurrence"].columns),
        ("chinchilla", ("num_parameters", "num_tokens")),
        ("compute", ("compute_flops",)),
    ):
        if all(c in table and np.isfinite(table[c]).all() for c in columns):
            found.append(name)
    if "compute" not in found and "chinchilla" not in found:
        found += [n for n in ("kaplan-n", "kaplan-d") if LAWS[n].columns[0] in table]
    return found


def law_columns(table, law):
    return {c: table[c] for c in LAWS[law].columns}


def summarise_fit(table, law, arm, *, objective=None, draws=0, seed=0, with_profiles=True):
    """Fit one law to the runs of one arm and ask every question about it."""
    mask = table.arms() == arm
    columns = {c: v[mask] for c, v in law_columns(table, law).items()}
    loss = table.loss_in_nats()[mask]
    objective = objective or default_objective(law)
    result = FitSummary(law, arm)
    try:
        result.fit = fit_law(law, columns, loss, objective=objective)
    except FitRefused as refused:
        result.refusal = str(refused)
        return result
    result.verdicts = identification(result.fit)
    if with_profiles:
        result.profiles = profiles(result.fit)
    if draws:
        try:
            result.bootstrap_errors = bootstrap(result.fit, "case", draws=draws, seed=seed).standard_errors()
        except FitRefused as refused:
            result.bootstrap_errors = {"refused": str(refused)}
    for other in (Huber(1e-4), Huber(1e-3), Huber(1e-2), Squares(), Squares(on="loss")):
        try:
            parameters = fit_law(law, columns, loss, objective=other).parameters
            result.sensitivity.append((other.describe(), parameters))
        except FitRefused as refused:
            result.sensitivity.append((other.describe(), str(refused)))
    if law == "chinchilla":
        result.checks = cross_checks(result.fit)
    try:
        size = np.sum([np.log(v) for v in columns.values()], axis=0)
        result.forecast = leave_largest_out(law, columns, loss, size=np.exp(size - size.max()), objective=objective)
    except (FitRefused, ValueError):
        result.forecast = []
    return result


def cross_checks(fit):
    """What other methods say about the runs of one L(N, T) fit: [(method, sentence)]; a refusal is a sentence too.

    Exponents are those of the optimal size, N ~ C^a with C = 6 N T.
    """
    size, tokens = fit.model.columns["num_parameters"], fit.model.columns["num_tokens"]
    loss, compute = np.exp(fit.target), 6 * size * tokens
    found = [("approach 3 (this fit)", f"a = {approach_3(fit)['size_exponent']:.3f}")]
    try:
        law = approach_1(compute, size, loss)["size"]
        found.append(
            ("approach 1 (envelope)", f"a = {law['slope']:.3f} +- {law['slope_se']:.3f} (se, {law['n']} runs)")
        )
    except FitRefused as refused:
        found.append(("approach 1 (envelope)", str(refused)))
    try:
        second = approach_2(compute, size, loss)
        law = second["size"]
        said = (
            "no two budgets"
            if law is None
            else f"a = {law['slope']:.3f} +- {law['slope_se']:.3f} (se, {law['n']} budgets)"
        )
        found.append(("approach 2 (isoFLOP)", said + f", {second['censored']} optima censored"))
    except FitRefused as refused:
        found.append(("approach 2 (isoFLOP)", str(refused)))

    def by_law(train, test):
        part = fit_law("chinchilla", {"num_parameters": size[train], "num_tokens": tokens[train]}, loss[train],
                       objective=fit.objective_kind)  # fmt: skip
        return part.predict({"num_parameters": size[test], "num_tokens": tokens[test]}), loss[test]

    def by_surface(train, test):
        return Surface(size[train], tokens[train], loss[train]).predict(size[test], tokens[test]), loss[test]

    try:
        ours, free = cross_validate(by_law, fit.n), cross_validate(by_surface, fit.n)
        said = f"10-fold error {free['rmse']:.4f} of log loss inside the hull ({free['scored']} runs), "
        said += f"the law {ours['rmse']:.4f}"
        budgets = np.geomspace(*np.percentile(compute, [10, 90]), 15)
        try:
            path = Surface(size, tokens, loss).frontier_exponent(budgets)
            said += f"; a = {path['slope']:.3f} +- {path['slope_se']:.3f} (se)"
        except FitRefused as refused:
            said += f"; {refused}"
        found.append(("surface without formula", said))
    except FitRefused as refused:
        found.append(("surface without formula", str(refused)))
    return found


def default_objective(law):
    """Least squares on the loss for L(C) ladders (as their paper does), Huber 1e-3 on log loss for the rest."""
    return Squares(on="loss") if law == "compute" else Huber()


def compare_arms(table, baseline, *, at=(1e25,), draws=200):
    """Multipliers against the baseline: interpolated under both indices, by model, and the exponent-or-constant
    verdict.
    """
    arms = list(dict.fromkeys(table.arms().tolist()))
    if baseline not in arms:
        raise ValueError(f"baseline {baseline!r} is not among the arms {arms}")
    loss, compute = table.loss_in_nats(), table["compute_flops"]
    ladders = {a: Ladder.of(compute[table.arms() == a], loss[table.arms() == a]) for a in arms}
    result = {"interpolated": {}, "models": [], "verdict": None, "by_model": {}, "bayes": {}, "refusal": ""}
    for arm in arms:
        if arm == baseline:
            continue
        result["interpolated"][arm] = {
            index: interpolated(ladders[baseline], ladders[arm], index=index) for index in ("baseline", "variant")
        }
    counted = [a for a in arms if len(ladders[a].compute) >= 4]
    if baseline in counted and len(counted) > 1:
        rows = np.isin(table.arms(), counted)
        try:
            candidates = model_set(compute[rows], loss[rows], table.arms()[rows])
            result["models"] = candidates
            result["verdict"] = exponent_or_constant(candidates)
            result["bayes"] = bayes(candidates)
            result["priors"] = Priors().describe()
            telling = [c for c in candidates if c.weight > 1e-4] or candidates[:1]
            for arm in counted:
                if arm != baseline:
                    result["by_model"][arm] = {
                        (flops, index): multiplier_by_model(telling, baseline, arm, flops, index=index, draws=draws)
                        for flops in at
                        for index in ("baseline", "variant")
                    }
        except FitRefused as refused:
            result["refusal"] = str(refused)
    return ladders, result


def summarise(table, *, laws=None, baseline=None, objective=None, draws=200, at=(1e25,), seed=0):
    """Everything about a table: findings, every law that fits its columns for every arm, the comparison of arms."""
    runs, findings, left_out = clean(table)
    result = Summary(runs, findings, left_out, baseline=baseline)
    arms = list(dict.fromkeys(runs.arms().tolist()))
    for law in laws or laws_for(runs):
        for arm in arms:
            if (runs.arms() == arm).sum() >= 3:
                result.fits.append(summarise_fit(runs, law, arm, objective=objective, draws=draws, seed=seed))
    if "compute_flops" in runs and len(arms) > 1 and baseline is not None:
        result.ladders, result.comparison = compare_arms(runs, baseline, at=at, draws=max(draws, 100))
    elif "compute_flops" in runs:
        loss = runs.loss_in_nats()
        result.ladders = {a: Ladder.of(runs["compute_flops"][runs.arms() == a], loss[runs.arms() == a]) for a in arms}
    return result
