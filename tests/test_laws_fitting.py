"""Fits: gradients against differences, the Chinchilla optimum, refusals, equality between two ways."""

import os
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares, minimize

from modeling_looped.laws import LAWS, Asymmetric, FitRefused, Huber, Squares, certify, fit_law, read_table
from modeling_looped.laws.minimise import derivatives, minimise
from modeling_looped.laws.models import bind

ASSETS = Path(__file__).parent / "assets" / "laws"
REFERENCE = Path(os.environ.get("LOOPED_REFERENCE_DIR", Path(__file__).parents[1] / ".." / "shared"))
TRUTH = {"E": 1.8, "A": 480.0, "B": 2100.0, "alpha": 0.35, "beta": 0.37}


def chinchilla_points():
    path = REFERENCE / "data" / "scaling" / "chinchilla_epoch.csv"
    if not path.exists():
        pytest.skip(f"reference data not found at {path}")
    table = read_table(path)
    return table.where(table["excluded_by_epoch"] == 0)


def design(table):
    return {"num_parameters": table["num_parameters"], "num_tokens": table["num_tokens"]}


def simulated(seed=0, noise=0.0, n=8):
    rng = np.random.default_rng(seed)
    size, tokens = (a.ravel() for a in np.meshgrid(np.geomspace(3e7, 1e10, n), np.geomspace(1e9, 5e11, n)))
    loss = TRUTH["E"] + TRUTH["A"] * size ** -TRUTH["alpha"] + TRUTH["B"] * tokens ** -TRUTH["beta"]
    return {"num_parameters": size, "num_tokens": tokens}, loss * np.exp(noise * rng.standard_normal(loss.size))


def columns_for(law, n, rng):
    ranges = {"num_loops": (1, 9), "loss": (2, 5), "context_position": (1, 1024), "compute_flops": (1e17, 1e21)}
    drawn = {c: np.exp(rng.uniform(*np.log(ranges.get(c, (1e7, 1e11))), n)) for c in law.columns}
    if "unique_tokens" in drawn:
        drawn["num_tokens"] = drawn["unique_tokens"] * rng.uniform(1, 30, n)
    return drawn


@pytest.mark.parametrize("objective", [Huber(0.05), Squares(), Squares(on="loss"), Asymmetric(0.8)], ids=str)
@pytest.mark.parametrize("name", LAWS)
def test_gradient_and_hessian_equal_differences(name, objective):
    law, rng = LAWS[name], np.random.default_rng(3)
    arms = np.array(["a", "b"] * 15)
    model = bind(law, columns_for(law, 30, rng), arms, own=law.parameters[-1:])
    theta = rng.uniform(0.2, 0.6, (2, model.p))
    target, weights = rng.uniform(0.5, 1.2, (2, 30)), rng.uniform(0.5, 2, (2, 30))
    _, gradient, hessian, _ = derivatives(model, theta, target, weights, objective)
    for j in range(model.p):
        step = np.zeros(model.p)
        step[j] = 1e-6
        up = derivatives(model, theta + step, target, weights, objective)
        down = derivatives(model, theta - step, target, weights, objective)
        np.testing.assert_allclose(gradient[:, j], (up[0] - down[0]) / 2e-6, rtol=2e-6, atol=2e-7)
        np.testing.assert_allclose(hessian[:, j], (up[1] - down[1]) / 2e-6, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("name", LAWS)
def test_natural_symbols_round_trip(name):
    law, rng = LAWS[name], np.random.default_rng(4)
    model = bind(law, columns_for(law, 30, rng), np.array(["a", "b", "c"] * 10), own=law.parameters)
    theta = rng.uniform(0.2, 0.6, model.p)
    np.testing.assert_allclose(model.from_natural(model.natural(theta)), theta, rtol=1e-9)


def test_noise_free_truth_is_recovered():
    columns, loss = simulated()
    fit = fit_law("chinchilla", columns, loss)
    for symbol, value in TRUTH.items():
        assert fit.parameters[symbol] == pytest.approx(value, rel=1e-6)
    predicted = fit.predict({"num_parameters": [5e10], "num_tokens": [1e12]})
    assert predicted == pytest.approx(1.8 + 480 * 5e10**-0.35 + 2100 * 1e12**-0.37, rel=1e-9)


def test_kaplan_and_recurrence_truths_are_recovered():
    columns, _ = simulated()
    n, d = columns["num_parameters"], columns["num_tokens"]
    loss = ((6.4e13 / n) ** (0.076 / 0.103) + 1.8e13 / d) ** 0.103
    found = fit_law("kaplan-nd", columns, loss).parameters
    assert found == pytest.approx({"Nc": 6.4e13, "alpha_N": 0.076, "Dc": 1.8e13, "alpha_D": 0.103}, rel=1e-5)
    loops = np.tile([1.0, 2.0, 4.0, 8.0], 16)
    once, recurrent = 0.3 * n, 0.7 * n / np.sqrt(loops)
    loss = 1.57 + 60 * (once + loops**0.46 * recurrent) ** -0.25 + 900 * d**-0.36
    given = {"once_parameters": once, "recurrent_parameters": recurrent, "num_loops": loops, "num_tokens": d}
    found = fit_law("recurrence", given, loss).parameters
    expected = {"E": 1.57, "A": 60, "B": 900, "alpha": 0.25, "beta": 0.36, "phi": 0.46}
    assert found == pytest.approx(expected, rel=1e-4)


def test_chinchilla_optimum():
    table = chinchilla_points()
    fit = fit_law("chinchilla", design(table), table["loss"])
    found = fit.parameters
    assert table.n == 240
    assert fit.objective <= 1.018275e-3
    assert found["alpha"] == pytest.approx(0.347311, abs=1e-4)
    assert found["beta"] == pytest.approx(0.367172, abs=1e-4)
    assert found["E"] == pytest.approx(1.817218, abs=1e-4)
    assert np.log(found["A"]) == pytest.approx(np.log(477.826), abs=1e-4)
    assert np.log(found["B"]) == pytest.approx(np.log(2143.415), abs=1e-4)
    assert fit.certificate["agreeing"] == fit.certificate["polished"]


@pytest.mark.parametrize("scale", [1 / 240, 1000.0])
def test_scale_of_the_objective_changes_nothing(scale):
    columns, loss = simulated(noise=0.01)
    plain = fit_law("chinchilla", columns, loss).parameters
    scaled = fit_law("chinchilla", columns, loss, weights=np.full(loss.size, scale)).parameters
    assert scaled == pytest.approx(plain, rel=1e-4)


def test_mean_scaled_huber_by_a_common_optimiser_is_not_an_optimum():
    columns, loss = simulated(noise=0.01)
    log_n, log_t, goal = np.log(columns["num_parameters"]), np.log(columns["num_tokens"]), np.log(loss)

    def mean_huber(q):
        terms = np.stack([np.full_like(goal, q[0]), q[1] - q[3] * log_n, q[2] - q[4] * log_t])
        return Huber()(np.log(np.exp(terms).sum(axis=0)) - goal)[0].mean()

    stopped = minimize(mean_huber, [0.5, 5.0, 5.0, 0.5, 0.5], method="L-BFGS-B").x
    claimed = dict(E=np.exp(stopped[0]), A=np.exp(stopped[1]), B=np.exp(stopped[2]), alpha=stopped[3], beta=stopped[4])
    verdict = certify("chinchilla", columns, loss, claimed)
    assert verdict["verdict"] == "not an optimum" and verdict["ratio"] > 1.01
    ours = fit_law("chinchilla", columns, loss).parameters
    assert certify("chinchilla", columns, loss, ours)["verdict"] == "optimum"


def test_initial_values_passed_off_as_a_fit_are_caught():
    columns, loss = simulated(noise=0.01)
    verdict = certify("chinchilla", columns, loss, {"E": 1.0, "A": 1.0, "B": 1.0, "alpha": 1.0, "beta": 1.0})
    assert verdict["verdict"] == "not an optimum"


def test_stopped_optimiser_is_refused():
    columns, loss = simulated(noise=0.01)
    with pytest.raises(FitRefused, match="not converged") as error:
        fit_law("chinchilla", columns, loss, max_iterations=2)
    assert error.value.reason == "not converged"


def test_six_points_on_one_line_are_refused():
    size = np.geomspace(1e8, 1e10, 6)
    loss = 1.8 + 480 * size**-0.35 + 2100 * (20 * size) ** -0.37
    with pytest.raises(FitRefused) as error:
        fit_law("chinchilla", {"num_parameters": size, "num_tokens": 20 * size}, loss)
    assert error.value.reason == "runs on one line"


def test_too_few_runs_and_no_spread_are_refused():
    columns, loss = simulated(n=2)
    with pytest.raises(FitRefused, match="too few runs"):
        fit_law("chinchilla", columns, loss)
    with pytest.raises(FitRefused, match="no spread"):
        fit_law("compute", {"compute_flops": np.linspace(1e18, 1.2e18, 9)}, np.linspace(3.0, 2.9, 9))


@pytest.mark.parametrize("bad", [np.nan, -1.0, 0.0])
def test_bad_losses_name_their_row(bad):
    columns, loss = simulated()
    loss[7] = bad
    with pytest.raises(ValueError, match="row 7"):
        fit_law("chinchilla", columns, loss)


def test_least_squares_equals_scipy():
    table = read_table(ASSETS / "qlabs_fineweb_ladders.csv")
    table = table.where(table.arms() == "vanilla")
    compute, loss = table["compute_flops"] / 1e18, table["loss"]
    found = fit_law(
        "compute", {"compute_flops": table["compute_flops"]}, loss, objective=Squares(on="loss")
    ).parameters
    start = [1.5, 1.8, 0.1]
    other = least_squares(lambda q: q[0] + q[1] * compute ** -q[2] - loss, start, xtol=1e-14, ftol=1e-14, gtol=1e-14).x
    assert [found["E"], found["A"], found["gamma"]] == pytest.approx(other, rel=1e-6)
    assert found["E"] == pytest.approx(1.70643, abs=1e-4)
    assert found["A"] == pytest.approx(1.63531, abs=1e-4)
    assert found["gamma"] == pytest.approx(0.111221, abs=1e-4)


def test_arms_with_nothing_shared_equal_separate_fits():
    table = read_table(ASSETS / "qlabs_fineweb_ladders.csv")
    arms = table.arms()
    objective = Squares(on="loss")
    columns = {"compute_flops": table["compute_flops"]}
    joint = fit_law("compute", columns, table["loss"], arms=arms, own=("E", "A", "gamma"), objective=objective)
    for arm in joint.arms:
        rows = arms == arm
        alone = fit_law(
            "compute", {"compute_flops": table["compute_flops"][rows]}, table["loss"][rows], objective=objective
        )
        assert joint.parameters[arm] == pytest.approx(alone.parameters, rel=1e-5)


def test_order_of_runs_changes_nothing():
    columns, loss = simulated(noise=0.01)
    order = np.random.default_rng(0).permutation(loss.size)
    plain = fit_law("chinchilla", columns, loss)
    mixed = fit_law("chinchilla", {k: v[order] for k, v in columns.items()}, loss[order])
    assert mixed.objective == pytest.approx(plain.objective, rel=1e-9)
    assert mixed.parameters == pytest.approx(plain.parameters, rel=1e-4)


def test_many_problems_at_once_equal_one_by_one():
    columns, loss = simulated(noise=0.01)
    model = bind(LAWS["chinchilla"], columns)
    start = fit_law("chinchilla", columns, loss).theta
    weights = np.random.default_rng(1).integers(0, 3, (5, loss.size)).astype(float)
    together = minimise(model, np.repeat(start[None], 5, 0), np.log(loss), weights, Huber())
    for i in range(5):
        alone = fit_law("chinchilla", columns, loss, weights=weights[i])
        assert together.converged[i]
        assert together.objective[i] == pytest.approx(alone.objective, rel=1e-8)


def test_asymmetric_fit_hugs_the_lower_envelope():
    compute = np.repeat(np.geomspace(1e17, 1e20, 12), 5)
    clean = 1.7 + 1.6 * (compute / 1e18) ** -0.11
    loss = clean * np.exp(np.abs(np.random.default_rng(5).normal(0, 0.02, compute.size)))
    middle = fit_law("compute", {"compute_flops": compute}, loss, objective=Squares())
    lower = fit_law("compute", {"compute_flops": compute}, loss, objective=Asymmetric(0.98))
    assert (middle.residuals < 0).mean() > 0.3
    assert (lower.residuals < 0).mean() < 0.2


def test_no_floor_in_the_runs_is_said():
    compute = np.geomspace(1e16, 1e21, 20)
    fit = fit_law("compute", {"compute_flops": compute}, 3.0 * (compute / 1e18) ** -0.05, objective=Squares())
    assert any("ran to zero" in w for w in fit.warnings)
