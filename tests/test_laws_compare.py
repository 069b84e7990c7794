"""Model comparison: known truths are found, ambiguous runs are called undecided, forecasts equal refits."""

from pathlib import Path

import numpy as np
import pytest

from modeling_looped.laws import Squares, fit_law, read_table
from modeling_looped.laws.compare import (
    bayes,
    bic,
    exponent_or_constant,
    leave_largest_out,
    model_set,
    multiplier_by_model,
)

ASSETS = Path(__file__).parent / "assets" / "laws"


def two_arms(second, noise=5e-4, n=14, seed=0):
    compute = np.tile(np.geomspace(1e17, 1e22, n), 2)
    laws = [{"E": 1.7, "A": 1.6, "gamma": 0.13}, second]
    clean = np.concatenate([q["E"] + q["A"] * (compute[:n] / 1e18) ** -q["gamma"] for q in laws])
    loss = clean + noise * np.random.default_rng(seed).standard_normal(2 * n)
    return compute, loss, np.array(["base"] * n + ["new"] * n)


@pytest.mark.parametrize(
    "second, verdict",
    [
        ({"E": 1.7, "A": 1.5, "gamma": 0.13}, "constant"),
        ({"E": 1.7, "A": 1.6, "gamma": 0.145}, "exponent"),
        ({"E": 1.6, "A": 1.6, "gamma": 0.13}, "floor"),
    ],
)
def test_truth_is_named(second, verdict):
    found = [exponent_or_constant(model_set(*two_arms(second, seed=seed)))["verdict"] for seed in range(8)]
    assert set(found) <= {verdict, "undecided"} and found.count(verdict) >= 5, found


def test_published_ladders_are_undecided_between_exponent_and_floor():
    table = read_table(ASSETS / "qlabs_fineweb_ladders.csv")
    found = {c.name: c for c in model_set(table["compute_flops"], table["loss"], table.arms())}
    assert found["own E (shared exponent)"].delta == 0
    assert found["own exponent (shared E)"].delta == pytest.approx(3.5, abs=0.1)
    assert found["own constant (shared E and exponent)"].delta == pytest.approx(36, abs=0.5)
    verdict = exponent_or_constant(list(found.values()))
    assert verdict["verdict"] == "undecided" and "constant alone is ruled out" in verdict["sentence"]


def test_bic_needs_a_likelihood():
    compute, loss, arms = two_arms({"E": 1.7, "A": 1.5, "gamma": 0.13})
    with pytest.raises(ValueError, match="BIC needs a likelihood"):
        bic(fit_law("compute", {"compute_flops": compute}, loss, arms=arms, own=("A",)))


def test_evidence_agrees_with_brute_force_on_one_curve():
    compute, loss, _ = two_arms({"E": 1.7, "A": 1.6, "gamma": 0.13}, noise=0.1, n=6)
    candidates = [c for c in model_set(compute, loss, ["a"] * 6 + ["b"] * 6) if c.name == "one curve"]
    result = bayes(candidates, draws=20000)["one curve"]
    again = bayes(candidates, draws=20000, seed=9)["one curve"]
    assert result["log_evidence"] == pytest.approx(again["log_evidence"], abs=0.15)
    assert result["effective_draws"] > 200
    # plain Monte Carlo over the same stated priors
    from modeling_looped.laws.compare import Priors, _log_joint, _prior

    fit = candidates[0].fit
    mean, precision = _prior(fit, Priors())
    rng = np.random.default_rng(1)
    sample = mean + rng.standard_normal((1_000_000, 3)) @ np.linalg.cholesky(np.linalg.inv(precision)).T
    prior = -0.5 * np.einsum("bi,ij,bj->b", sample - mean, precision, sample - mean)
    prior = prior + 0.5 * np.linalg.slogdet(precision / (2 * np.pi))[1]
    likelihood = np.concatenate([_log_joint(fit, q, mean, precision) for q in np.array_split(sample, 20)]) - prior
    top = likelihood.max()
    brute = top + np.log(np.exp(likelihood - top).mean())
    assert result["log_evidence"] == pytest.approx(brute, abs=0.2)


def test_evidence_prefers_the_truth():
    candidates = model_set(*two_arms({"E": 1.7, "A": 1.5, "gamma": 0.13}))
    found = bayes(candidates)
    assert max(found, key=lambda k: found[k]["probability"]) == "own constant (shared E and exponent)"


def test_multiplier_of_a_constant_gain_is_found_by_the_right_model():
    compute, loss, arms = two_arms({"E": 1.7, "A": 1.5, "gamma": 0.13})
    rows = {r["model"]: r for r in multiplier_by_model(model_set(compute, loss, arms), "base", "new", 1e25)}
    truth = (1.6 / 1.5) ** (1 / 0.13)
    mixed = rows["weighted by BIC"]
    assert mixed["low"] < truth < mixed["high"]
    constant = rows["own constant (shared E and exponent)"]
    assert constant["multiplier"] == pytest.approx(truth, rel=0.02)
    everything = rows["everything own"]
    assert everything["high"] - everything["low"] > constant["high"] - constant["low"]


def test_leave_largest_out_equals_a_fit_without_them():
    compute, loss, arms = two_arms({"E": 1.7, "A": 1.5, "gamma": 0.13})
    rows = leave_largest_out(
        "compute", {"compute_flops": compute}, loss, count=2, arms=arms, own=("A",), objective=Squares()
    )
    kept = np.setdiff1d(np.arange(loss.size), [r["row"] for r in rows])
    fit = fit_law(
        "compute", {"compute_flops": compute[kept]}, loss[kept], arms=arms[kept], own=("A",), objective=Squares()
    )
    for row in rows:
        expected = fit.predict({"compute_flops": [row["size"]]}, arms[row["row"]])[0]
        assert row["forecast"] == pytest.approx(expected, rel=1e-9)
        assert abs(row["error"]) < 3e-3 and row["beyond"] > 1
