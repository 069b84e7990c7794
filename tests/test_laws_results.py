"""Approaches 1 to 3, surfaces, allocation, repeated data, Kaplan, recurrence: closed forms against numeric, spot
values.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from modeling_looped.laws import FitRefused, data_constrained, fit_law, kaplan, read_table, recurrence
from modeling_looped.laws.allocate import (
    cheapest,
    chinchilla_loss,
    closed_form,
    optimal,
    stacking_growth_tokens,
    suboptimal_cost,
    tolerated_sizes,
)
from modeling_looped.laws.approaches import (
    approach_1,
    approach_2,
    approach_3,
    curve_optima,
    group_budgets,
    power_law,
    vertex,
)
from modeling_looped.laws.kaplan_checks import follows, kaplan_checks
from modeling_looped.laws.surfaces import Surface, cross_validate
from tests.test_laws_fitting import TRUTH, simulated

ASSETS = Path(__file__).parent / "assets" / "laws"
REFERENCE = Path(os.environ.get("LOOPED_REFERENCE_DIR", Path(__file__).parents[1] / ".." / "shared"))


def isoflop(budgets=(1e19, 1e20, 1e21), points=9, width=4.0):
    rows = []
    for budget in budgets:
        best = closed_form(TRUTH, budget).num_parameters
        for size in best * np.geomspace(1 / width, width, points):
            rows.append((budget, size, float(chinchilla_loss(TRUTH, size, budget / 6 / size))))
    return np.array(rows).T


def test_closed_form_equals_numeric_and_is_a_minimum():
    for flops in (1e18, 5.76e23):
        exact, found = closed_form(TRUTH, flops), optimal(TRUTH, flops)
        assert found.num_parameters == pytest.approx(exact.num_parameters, rel=1e-6)
        assert found.loss == pytest.approx(exact.loss, rel=1e-12)
        for ratio in (0.8, 1.25):
            n = exact.num_parameters * ratio
            assert chinchilla_loss(TRUTH, n, flops / 6 / n) > exact.loss


def test_limits_bind_and_are_named():
    free = optimal(TRUTH, 1e23)
    data = optimal(TRUTH, 1e23, max_tokens=free.num_tokens / 4)
    assert data.num_tokens == pytest.approx(free.num_tokens / 4, rel=1e-6)
    assert data.num_parameters > free.num_parameters
    memory = optimal(TRUTH, 1e23, max_parameters=free.num_parameters / 4)
    assert memory.limit == "parameters" and memory.num_parameters == pytest.approx(free.num_parameters / 4)
    assert memory.training_flops == pytest.approx(1e23)
    both = optimal(TRUTH, 1e23, max_parameters=free.num_parameters / 4, max_tokens=free.num_tokens)
    assert both.limit == "data and parameters" and both.training_flops < 0.3e23
    assert free.loss < data.loss and free.loss < memory.loss < both.loss
    slack = optimal(TRUTH, 1e23, max_parameters=1e15, max_tokens=1e20)
    assert slack.limit == "compute" and slack.loss == pytest.approx(free.loss)


def test_serving_makes_smaller_models_better():
    served = optimal(TRUTH, 1e23, inference_tokens=1e12)
    assert served.num_parameters < closed_form(TRUTH, 1e23).num_parameters
    assert served.training_flops + served.inference_flops == pytest.approx(1e23, rel=1e-9)
    target = closed_form(TRUTH, 1e22).loss
    assert cheapest(TRUTH, target).training_flops == pytest.approx(1e22, rel=1e-6)
    assert cheapest(TRUTH, target, inference_tokens=1e13).num_parameters < cheapest(TRUTH, target).num_parameters
    with pytest.raises(ValueError, match="not reachable"):
        cheapest(TRUTH, 1.8)
    with pytest.raises(ValueError, match="must be positive"):
        optimal(TRUTH, 0.0)


def test_cost_of_a_wrong_size_solves_the_law():
    ratio, flops = 2.0, 1e22
    best = closed_form(TRUTH, flops)
    cost = suboptimal_cost(TRUTH, ratio, flops)
    n = ratio * best.num_parameters
    assert chinchilla_loss(TRUTH, n, cost * flops / 6 / n) == pytest.approx(best.loss, rel=1e-12)
    low, high = tolerated_sizes(TRUTH, flops, 0.1)
    for edge in (low, high):
        assert suboptimal_cost(TRUTH, edge, flops) == pytest.approx(1.1, rel=1e-6)
    assert suboptimal_cost(TRUTH, 1e-4, flops) == np.inf


def test_three_approaches_find_the_exponent_of_the_truth():
    exact = TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])
    budget, size, loss = isoflop((1e19, 1e20, 1e21, 1e22), points=41, width=2.0)
    assert approach_2(budget, size, loss)["size"]["slope"] == pytest.approx(exact, abs=2e-3)
    assert approach_1(budget, size, loss)["size"]["slope"] == pytest.approx(exact, abs=0.02)
    columns, clean = simulated()
    assert approach_3(fit_law("chinchilla", columns, clean))["size_exponent"] == pytest.approx(exact, abs=1e-6)


def test_optimum_at_the_edge_of_a_sweep_is_censored():
    assert vertex([1, 2, 4, 8], [4.0, 3.0, 2.2, 1.6]).censored in ("high", "no minimum")
    assert vertex([1, 2, 4], [3.0, 3.5, 3.2]).censored == "no minimum"
    inside = vertex([1, 2, 4], [3.0, 2.0, 3.0])
    assert inside.censored == "" and inside.x == pytest.approx(2.0) and inside.value == pytest.approx(2.0)
    budget, size, loss = isoflop()
    keep = size > 0.999 * np.array([closed_form(TRUTH, b).num_parameters for b in budget]) * 1.3
    found = approach_2(budget[keep], size[keep], loss[keep])
    assert found["censored"] == 3 and found["size"] is None
    with pytest.raises(ValueError, match="at least 3"):
        vertex([1, 1, 2], [3.0, 3.0, 2.0])


def test_budgets_are_grouped_by_relative_distance():
    assert group_budgets([1e18, 1.02e18, 9.9e17, 2e18, 2.03e18]).tolist() == [0, 0, 0, 1, 1]


def test_power_law_of_exact_powers():
    found = power_law([1, 10, 100], [3, 30 * 10**-0.5, 3])
    assert found["slope"] == pytest.approx(0.0, abs=1e-12)
    assert power_law([1, 10, 100], [2.0, 20.0, 200.0])["k"] == pytest.approx(2.0)


def test_best_loop_counts_as_published():
    table = read_table(ASSETS / "qlabs_loop_grid_100Mx10.csv")
    table = table.where(table["weight_decay"] == 0.8)
    budgets = [8.4612e17, 1.419447e18, 2.381258e18, 3.994787e18, 6.701636e18]
    found = curve_optima(table["compute_flops"], table["num_loops"], table["loss"], budgets)
    assert [o.x for o in found] == pytest.approx([1.43, 2.31, 3.31, 4.44, 6.69], abs=0.005)
    assert not any(o.censored for o in found)


def test_loops_save_compute_as_published():
    table = read_table(ASSETS / "qlabs_loop_grid_100Mx10.csv")
    table = table.where(np.isin(table["weight_decay"], [0.05, 0.2, 0.4, 0.8, 1.2, 1.6]) & (table["depth"] >= 6))
    ones = table.where(table["num_loops"] == 1)
    ones = ones.where(recurrence.best_by([ones["depth"]], ones["loss"]))
    saved = recurrence.compute_saved(ones["compute_flops"], ones["loss"], table["compute_flops"], table["loss"])
    assert saved == pytest.approx([1.00, 1.02, 1.31, 1.39, 1.67, 2.04, 2.207], abs=0.005)


def test_convex_frontier_of_a_known_hull():
    compute, loss = np.exp([0.0, 1, 2, 3, 4, 2]), np.array([5.0, 4.6, 3.0, 2.9, 2.95, 4.0])
    assert recurrence.convex_frontier(compute, loss) == [0, 2, 3]


def test_recurrence_equivalence_at_its_ends():
    assert recurrence.equivalent_parameters(4, 8, 3, 0.0) == 12
    assert recurrence.equivalent_parameters(4, 8, 3, 1.0) == 28
    assert recurrence.block_worth(4, 0.46) == pytest.approx(1.892, abs=1e-3)
    assert recurrence.isodepth_size_ratio(4) == pytest.approx(0.40833, abs=1e-5)
    assert recurrence.isodepth_size_ratio(1) == 1.0


def test_isoflop_optima_as_published():
    table = read_table(ASSETS / "qlabs_isocompute_tpp.csv")
    published = {"vanilla": 5.33, "deep_vanilla": 5.66, "operator_1": 5.79, "loop_2": 6.39, "untied_2": 6.08}
    for arm, value in published.items():
        part = table.where(table.arms() == arm)
        found = [
            vertex(p["num_tokens"] / p["num_parameters"], p["loss"]).x
            for p in (part.where(part["budget_ref_depth"] == b) for b in np.unique(part["budget_ref_depth"]))
        ]
        assert np.mean(found) == pytest.approx(value, abs=0.01)


def test_surface_agrees_inside_and_is_silent_outside():
    columns, loss = simulated(n=12)
    surface = Surface(columns["num_parameters"], columns["num_tokens"], loss)
    inside = surface.predict([5e8, 2e9], [2e10, 1e11])
    assert inside == pytest.approx(chinchilla_loss(TRUTH, [5e8, 2e9], [2e10, 1e11]), rel=2e-3)
    assert np.isnan(surface.predict([1e12, 1e6], [1e13, 1e8])).all()
    exact = TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])
    assert surface.frontier_exponent(np.geomspace(1e19, 1e21, 9))["slope"] == pytest.approx(exact, abs=0.03)
    smooth = Surface(columns["num_parameters"], columns["num_tokens"], loss, kind="spline")
    assert smooth.predict([1e9], [3e10]) == pytest.approx(chinchilla_loss(TRUTH, 1e9, 3e10), rel=0.01)
    with pytest.raises(FitRefused, match="runs on one line"):
        Surface(np.geomspace(1e8, 1e10, 12), np.geomspace(1e9, 1e11, 12), np.linspace(4, 3, 12))


def test_cross_validation_scores_held_out_rows_only():
    columns, loss = simulated(noise=0.003)

    def law(train, test):
        assert not set(train) & set(test)
        fit = fit_law("chinchilla", {k: v[train] for k, v in columns.items()}, loss[train])
        return fit.predict({k: v[test] for k, v in columns.items()}), loss[test]

    found = cross_validate(law, loss.size)
    assert found["scored"] == loss.size and 0.002 < found["rmse"] < 0.005


def test_data_constrained_spot_values_and_fit():
    spots = {(6.34e9, 242e9): 2.2256440889984477, (8.67e9, 178e9): 2.2269634075087867}
    for (n, t), value in spots.items():
        assert data_constrained.loss(n, t, 25e9) == pytest.approx(value, abs=1e-12)
    tokens, size, _ = data_constrained.allocation(1e22, 25e9)
    assert (tokens, size) == pytest.approx((237336955477.55, 7022364735.88), rel=1e-3)
    table = read_table(ASSETS / "datablations_fit182.csv")
    columns = {k: table[k] for k in ("num_parameters", "num_tokens", "unique_tokens")}
    at = data_constrained.objective(columns, table["loss"], r_d=15.387756, r_n=5.309743)
    assert at == pytest.approx(0.015825936570763588, abs=2e-8)
    assert data_constrained.r_squared(columns, table["loss"]) == pytest.approx(0.7722046, abs=1e-6)
    assert data_constrained.r_squared(columns, table["loss"], r_d=None, r_n=None) == pytest.approx(0.4451684, abs=1e-6)
    assert data_constrained.fit(columns, table["loss"]).objective <= at


def test_repeated_data_law_has_its_limits():
    once = data_constrained.loss(1e9, 5e9, 25e9)
    assert once == pytest.approx(float(data_constrained.loss(1e9, 5e9, 5e9)))
    full = data_constrained.loss(1e9, 100e9, 25e9, r_d=1e9)
    assert full == pytest.approx(float(data_constrained.loss(1e9, 100e9, 100e9, r_n=None)), rel=1e-2)
    assert data_constrained.loss(1e9, 100e9, 25e9) > data_constrained.loss(1e9, 100e9, 100e9)


def test_r_d_is_not_identified_by_the_released_runs():
    table = read_table(ASSETS / "datablations_fit182.csv")
    columns = {k: table[k] for k in ("num_parameters", "num_tokens", "unique_tokens")}
    rows = data_constrained.profile_r_d(columns, table["loss"], [8, 15.4, 100, 1000])
    assert max(ratio for _, _, ratio in rows) < 1.0097
    from modeling_looped.laws.intervals import identification

    verdicts = identification(data_constrained.fit(columns, table["loss"]))
    assert not verdicts["R_D"].identified


def test_kaplan_closed_form_equals_numeric():
    c = kaplan.APPENDIX_B
    for pf_days in (1e-3, 1.0, 1e3):
        size, loss = kaplan.efficient_size_numeric(pf_days, c)
        front = kaplan.efficient_frontier(c)
        assert size == pytest.approx(float(kaplan.efficient_size(pf_days, c)), rel=1e-6)
        assert loss == pytest.approx((front["Cc"] / pf_days) ** front["alpha_C"], rel=1e-12)
        steps = float(kaplan.efficient_steps(pf_days, c))
        assert 6 * size * kaplan.critical_batch(loss, c) * steps == pytest.approx(pf_days * kaplan.PF_DAY, rel=1e-6)


def test_kaplan_verdicts():
    verdicts = {c.name: c.verdict for c in kaplan_checks()}
    broken = [
        "alpha_C^min (eq 6.4)", "N exponent from theory", "S exponent from theory", "D(Cmin) prefactor, C=2Cmin",
        "fewer updates (f=aN/aS)", "aN/aD with Table 5 pair", "D exponent in eq 6.7",
    ]  # fmt: skip
    assert all(verdicts[name] == "does not follow" for name in broken)
    assert verdicts["alpha_C^min (eq B.7)"] == verdicts["N_f/N_f' (f=aN/aS)"] == "follows"
    assert follows(0.1354, 0.13) and follows(2.183, 2.2) and not follows(0.052, 0.054)


def test_kaplan_rules():
    assert float(kaplan.learning_rate(1.2e10)) > 0 > float(kaplan.learning_rate(1.22e10))
    assert np.isnan(kaplan.excess_steps(0.28, kaplan.CONSTANTS["table 3"]))
    assert kaplan.tolerated_range(kaplan.CONSTANTS["table 3"]) == pytest.approx((0.577, 2.183), abs=1e-3)
    points = kaplan.contradiction_sensitivity()
    assert points["Table 6 (2e10, 0.27)"].pf_days == pytest.approx(1.1e4, rel=0.02)
    assert points["eq 6.7 (4e10, 0.26)"].loss == pytest.approx(1.49, abs=5e-3)
    with pytest.raises(ValueError, match="never cross"):
        kaplan.contradiction_point(2e10, 0.6)


def test_growth_timing_as_printed():
    assert stacking_growth_tokens(8e9, 6 * 8e9 * 15e12) == pytest.approx(6.58e9, rel=1e-3)


@pytest.mark.parametrize("index", range(19))
def test_reference_tables_are_reproduced(index):
    from modeling_looped.laws import reproduce_paper, reproduce_scaling
    from modeling_looped.laws.reproduce import Reference

    folder = REFERENCE / "data"
    if not folder.exists():
        pytest.skip(f"reference data not found at {folder}")
    checks = (*reproduce_scaling.CHECKS, *reproduce_paper.CHECKS)
    assert len(checks) == 19
    reference = Reference(folder)
    checks[index](reference)
    assert reference.rows and not reference.missing
    assert [str(row) for row in reference.rows if row.verdict == "DIFFERS"] == []
