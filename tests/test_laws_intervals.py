"""Profiles, bootstraps and identification: exact cases, coverage of a known truth, refusals."""

import numpy as np
import pytest
from scipy.stats import t as student

from modeling_looped.laws import FitRefused, Huber, Squares, fit_law
from modeling_looped.laws.intervals import bootstrap, identification, profile, profiles, scale_of, stability
from tests.test_laws_fitting import TRUTH, chinchilla_points, design, simulated

LAW = {"E": 1.7, "A": 1.6, "gamma": 0.16}


def ladder(seed, n=16, noise=0.001, low=1e17, high=1e22):
    compute = np.geomspace(low, high, n)
    loss = LAW["E"] + LAW["A"] * (compute / 1e18) ** -LAW["gamma"]
    return {"compute_flops": compute}, loss * np.exp(noise * np.random.default_rng(seed).standard_normal(n))


def test_profile_of_a_linear_problem_is_the_t_interval():
    x = np.geomspace(1e7, 1e10, 25)
    y = 0.9 - 0.05 * np.log(x / 1e8) + 0.01 * np.random.default_rng(1).standard_normal(25)
    fit = fit_law("kaplan-n", {"num_parameters": x}, np.exp(y), objective=Squares())
    slope, cov = np.polyfit(np.log(x), y, 1, cov=True)
    half = student.ppf(0.975, 23) * np.sqrt(cov[0, 0])
    found = profile(fit, "alpha_N")
    assert found.estimate == pytest.approx(-slope[0], rel=1e-8)
    assert (found.low, found.high) == pytest.approx((-slope[0] - half, -slope[0] + half), rel=1e-5)


def test_profile_ends_lie_on_the_threshold():
    columns, loss = simulated(noise=0.005)
    fit = fit_law("chinchilla", columns, loss, objective=Squares())
    found = profile(fit, "beta")
    for end in (found.low, found.high):
        held = fit_law("chinchilla", columns, loss, objective=Squares(), fixed={"beta": end})
        assert 2 * (held.objective - fit.objective) / scale_of(fit) == pytest.approx(found.threshold, rel=1e-3)


@pytest.mark.parametrize("draws", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_intervals_cover_the_truth(draws):
    covered = dict.fromkeys(LAW, 0)
    for seed in range(draws):
        fit = fit_law("compute", *ladder(seed), objective=Squares())
        for parameter in ("E", "gamma"):
            found = profile(fit, parameter)
            covered[parameter] += found.low <= LAW[parameter] <= found.high
    # a right 95% interval misses these bounds once in some hundred draws of 40, once in a thousand of 200
    low, high = (35, 40) if draws == 40 else (180, 198)
    assert low <= covered["E"] <= high and low <= covered["gamma"] <= high, covered


def test_bootstrap_standard_errors_of_the_chinchilla_points():
    table = chinchilla_points()
    fit = fit_law("chinchilla", design(table), table["loss"])
    errors = bootstrap(fit, "case", draws=1000).standard_errors()
    published = {"A": 124.522, "B": 1293.284, "E": 0.02566, "alpha": 0.0154, "beta": 0.0206}
    assert errors == pytest.approx(published, rel=0.2)


def test_bootstraps_agree_with_the_spread_over_repeated_studies():
    truth = []
    for seed in range(40):
        columns, loss = simulated(seed=seed, noise=0.004)
        truth.append(fit_law("chinchilla", columns, loss, objective=Squares()).parameters["alpha"])
    columns, loss = simulated(seed=0, noise=0.004)
    fit = fit_law("chinchilla", columns, loss, objective=Squares())
    blocks = np.arange(loss.size) // 2
    for kind in ("case", "residual", "block"):
        given = blocks if kind == "block" else None
        found = bootstrap(fit, kind, draws=200, blocks=given).standard_errors()["alpha"]
        assert 0.6 < found / np.std(truth) < 1.6, kind


def test_bootstrap_is_deterministic_and_says_what_it_needs():
    columns, loss = simulated(noise=0.004)
    fit = fit_law("chinchilla", columns, loss)
    first, second = (bootstrap(fit, draws=20, seed=5).theta for _ in range(2))
    assert np.array_equal(first, second)
    with pytest.raises(ValueError, match="case, block, residual"):
        bootstrap(fit, "rows")
    with pytest.raises(ValueError, match="one label"):
        bootstrap(fit, "block")
    with pytest.raises(FitRefused, match="too few blocks"):
        bootstrap(fit, "block", blocks=np.zeros(loss.size))


def test_wide_study_identifies_and_narrow_one_does_not():
    columns, loss = simulated(noise=0.003)
    verdicts = identification(fit_law("chinchilla", columns, loss))
    assert all(v.identified for v in verdicts.values()), [str(v) for v in verdicts.values()]
    size, ratio = (a.ravel() for a in np.meshgrid(np.geomspace(1e8, 3e8, 5), np.geomspace(5, 60, 5)))
    narrow = {"num_parameters": size / np.sqrt(ratio / 20), "num_tokens": 20 * size * np.sqrt(ratio / 20)}
    loss = TRUTH["E"] + TRUTH["A"] * narrow["num_parameters"] ** -0.35 + TRUTH["B"] * narrow["num_tokens"] ** -0.37
    loss = loss * np.exp(0.003 * np.random.default_rng(0).standard_normal(25))
    try:
        verdicts = identification(fit_law("chinchilla", narrow, loss))
        assert not any(v.identified for v in verdicts.values())
    except FitRefused as refused:
        assert refused.reason in ("not identifiable", "not converged", "no minimum")


@pytest.mark.parametrize("draws", [15, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise, high, expected", [(0.0005, 1e22, True), (0.01, 3e18, False)])
def test_verdict_on_e_and_gamma_over_many_draws(noise, high, expected, draws):
    right = 0
    for seed in range(draws):
        try:
            fit = fit_law("compute", *ladder(seed, noise=noise, high=high), objective=Squares())
            found = [v.identified for v in identification(fit).values()]
        except FitRefused:
            found = [False]
        right += all(found) if expected else not any(found)
    assert right >= 0.95 * draws - 1e-9 if draws > 15 else right >= 14


def test_stability_finds_runs_that_follow_another_curve():
    columns, loss = ladder(0, n=40, noise=0.0005)
    steady = stability(fit_law("compute", columns, loss, objective=Squares()))
    assert all(abs(v["z"]) < 4 for v in steady.values())
    bent = loss.copy()
    bent[-12:] += np.linspace(0, 0.05, 12)
    unsteady = stability(fit_law("compute", columns, bent, objective=Squares()))
    assert max(abs(v["z"]) for v in unsteady.values()) > 4


def test_huber_profile_is_finite_and_holds_the_estimate():
    columns, loss = simulated(noise=0.005)
    for found in profiles(fit_law("chinchilla", columns, loss, objective=Huber())).values():
        assert found.low < found.estimate < found.high


def test_unknown_parameter_is_named():
    columns, loss = simulated()
    with pytest.raises(ValueError, match="no parameter 'gamma'"):
        profile(fit_law("chinchilla", columns, loss), "gamma")
