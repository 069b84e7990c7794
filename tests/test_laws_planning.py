"""Simulator and planner: the noise is what was asked, intervals hold the truth, predicted widths come true."""

import numpy as np
import pytest

from modeling_looped.laws import Asymmetric, Squares, fit_law
from modeling_looped.laws.planner import check, expected_half_widths, plan_comparison, plan_grid, plan_ladder
from modeling_looped.laws.simulate import recovery, simulate

LAW = {"E": 1.7, "A": 1.6, "gamma": 0.11}
GRID = {"E": 1.8, "A": 480.0, "B": 2100.0, "alpha": 0.35, "beta": 0.37}


def test_simulated_runs_have_the_law_and_the_noise():
    compute = np.geomspace(1e17, 1e21, 4000)
    study = simulate("compute", LAW, {"compute_flops": compute}, noise=0.01, seed=3)
    np.testing.assert_allclose(study.clean, 1.7 + 1.6 * (compute / 1e18) ** -0.11, rtol=1e-12)
    assert np.std(np.log(study.loss / study.clean)) == pytest.approx(0.01, rel=0.05)
    same = simulate("compute", LAW, {"compute_flops": compute}, noise=0.01, seed=3)
    assert np.array_equal(study.loss, same.loss)
    worse = simulate("compute", LAW, {"compute_flops": compute}, noise=0.0, bad_share=0.3, bad_size=0.05)
    raised = worse.loss > worse.clean * (1 + 1e-12)
    assert raised.mean() == pytest.approx(0.3, abs=0.03) and (worse.loss >= worse.clean * (1 - 1e-12)).all()


def test_arms_have_their_own_truth():
    compute = np.tile(np.geomspace(1e17, 1e21, 5), 2)
    truth = {"a": LAW, "b": LAW | {"gamma": 0.12}}
    study = simulate("compute", truth, {"compute_flops": compute}, noise=0.0, arms=["a"] * 5 + ["b"] * 5)
    np.testing.assert_allclose(study.loss[5:], 1.7 + 1.6 * (compute[5:] / 1e18) ** -0.12)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="no law 'computes'"):
        simulate("computes", LAW, {}, noise=0.1)
    with pytest.raises(ValueError, match="the symbols"):
        simulate("compute", {"E": 1.0}, {"compute_flops": [1e18]}, noise=0.1)
    with pytest.raises(ValueError, match="noise is -1"):
        simulate("compute", LAW, {"compute_flops": [1e18]}, noise=-1)


@pytest.mark.parametrize("draws", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_two_variable_law_is_recovered(draws):
    size, ratio = (a.ravel() for a in np.meshgrid(np.geomspace(3e7, 3e10, 6), np.geomspace(4, 100, 6)))
    found = recovery(
        "chinchilla", GRID, {"num_parameters": size, "num_tokens": size * ratio}, noise=0.003, draws=draws
    )
    low, high = (0.83, 1.0) if draws == 30 else (0.90, 0.99)
    for symbol in ("E", "alpha", "beta"):
        assert low <= found[symbol]["covered"] <= high, found
        assert found[symbol]["identified"] >= 0.95
        assert found[symbol]["median"] == pytest.approx(GRID[symbol], rel=0.03)


@pytest.mark.parametrize("draws", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_narrow_isoflop_study_is_called_unidentified(draws):
    budget, shift = (a.ravel() for a in np.meshgrid(np.geomspace(1.3e18, 8.7e18, 5), np.geomspace(0.55, 1.8, 5)))
    size = 0.5 * np.sqrt(budget) * shift
    found = recovery(
        "chinchilla", GRID, {"num_parameters": size, "num_tokens": budget / 6 / size}, noise=0.0024, draws=draws
    )
    assert all(found[s]["identified"] <= 0.05 for s in ("E", "alpha", "beta")), found


def test_bad_runs_bias_least_squares_more_than_the_lower_envelope():
    compute = np.repeat(np.geomspace(1e17, 1e21, 12), 6)
    study = simulate("compute", LAW, {"compute_flops": compute}, noise=0.001, bad_share=0.5, bad_size=0.02, seed=2)
    errors = {}
    for objective in (Squares(), Asymmetric(0.97)):
        fit = fit_law("compute", study.columns, study.loss, objective=objective)
        errors[objective.name] = abs(np.log(fit.predict(study.columns) / study.clean)).mean()
    assert errors["asymmetric"] < 0.5 * errors["squares"]


def test_expected_width_comes_true():
    columns = {"compute_flops": np.geomspace(1e16, 1e21, 14)}
    expected = expected_half_widths("compute", LAW, columns, noise=5e-4)
    found = recovery("compute", LAW, columns, noise=5e-4, draws=20)
    for symbol in ("E", "gamma"):
        assert found[symbol]["median_width"] / 2 == pytest.approx(expected[symbol], rel=0.25)
    few = expected_half_widths("compute", LAW, {"compute_flops": np.geomspace(1e18, 1e19, 3)}, noise=1e-3)
    assert few["gamma"] == np.inf


def test_planned_ladder_fits_the_budget_and_beats_the_others():
    plans = plan_ladder(LAW, 1e21, noise=1e-3, smallest=1e17)
    assert all(p.total_flops <= 1e21 * (1 + 1e-9) for p in plans)
    assert plans[0].half_width["gamma"] <= min(p.half_width["gamma"] for p in plans)
    assert plans[0].columns["compute_flops"].max() <= 0.7e21
    dearer = plan_ladder(LAW, 1e22, noise=1e-3, smallest=1e17)
    assert dearer[0].half_width["gamma"] < plans[0].half_width["gamma"]
    found = check("compute", LAW, plans[0], noise=1e-3, draws=15)
    assert found["gamma"]["median_width"] / 2 == pytest.approx(plans[0].half_width["gamma"], rel=0.35)
    with pytest.raises(ValueError, match="do not buy five runs"):
        plan_ladder(LAW, 1e18, noise=1e-3, smallest=1e18)


def test_planned_grid_and_comparison():
    grid = plan_grid(GRID, 1e21, noise=2e-3, smallest=2e7)
    assert grid[0].total_flops <= 1e21 * (1 + 1e-9)
    assert grid[0].half_width["alpha"] < grid[-1].half_width["alpha"]
    plan, detectable, asked = plan_comparison(LAW, LAW | {"gamma": 0.117}, 1e21, noise=1e-3, smallest=1e17)
    assert 2 * plan.total_flops <= 1e21 * (1 + 1e-9) and asked == pytest.approx(0.007)
    _, finer, _ = plan_comparison(LAW, LAW | {"gamma": 0.117}, 1e21, noise=1e-4, smallest=1e17)
    assert finer == pytest.approx(detectable / 10, rel=1e-6)
