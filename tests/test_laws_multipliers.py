"""Compute multipliers: the published figures, closed forms, no extrapolation."""

from pathlib import Path

import numpy as np
import pytest

from modeling_looped.laws import FitRefused, read_table
from modeling_looped.laws.multipliers import (
    Ladder,
    interpolated,
    iso_loss,
    law_compute,
    law_loss,
    law_multiplier,
    shared_floor_laws,
)

ASSETS = Path(__file__).parent / "assets" / "laws"
GAMMAS = {
    "vanilla": 0.1112,
    "deep_vanilla": 0.1114,
    "deep_vanilla_grow": 0.1138,
    "operator_1": 0.1143,
    "loop_2": 0.1141,
    "untied_2": 0.1141,
    "loop_grow": 0.1159,
    "untied_grow": 0.1168,
}
MULTIPLIERS = {"operator_1": 1.251, "loop_2": 1.256, "untied_2": 1.344, "loop_grow": 1.356, "untied_grow": 1.553}


def ladders(name):
    table = read_table(ASSETS / name)
    arms = table.arms()
    return table, {
        a: Ladder.of(table["compute_flops"][arms == a], table["loss"][arms == a]) for a in dict.fromkeys(arms)
    }


def test_published_exponents_to_four_digits():
    table, _ = ladders("qlabs_fineweb_ladders.csv")
    laws = shared_floor_laws(table["compute_flops"], table["loss"], table.arms(), "vanilla")
    assert laws["vanilla"]["E"] == pytest.approx(1.70643, abs=1e-5)
    assert {arm: round(law["gamma"], 4) for arm, law in laws.items()} == GAMMAS


@pytest.mark.parametrize("arm, published", MULTIPLIERS.items())
def test_published_multipliers_to_three_digits(arm, published):
    _, by_arm = ladders("qlabs_fineweb_ladders.csv")
    found = interpolated(by_arm["vanilla"], by_arm[arm])
    assert found["compute"][-1] == pytest.approx(1.006363e20)
    assert round(found["multiplier"][-1], 3) == published


def test_fineweb_edu_under_both_indices():
    table, _ = ladders("qlabs_fineweb_edu_ladders.csv")
    seen = table.where(table.arms() != "untied_grow_heldout")
    laws = shared_floor_laws(seen["compute_flops"], seen["loss"], seen.arms(), "vanilla")
    assert round(laws["vanilla"]["gamma"], 4) == 0.1095
    assert round(laws["untied_grow"]["gamma"], 4) == 0.1146
    base, grown = laws["vanilla"]["fitted"], laws["untied_grow"]
    at = [1e20, 1.225e21, 1e25]
    assert law_multiplier(base, grown, [1e20, 1.23e21, 1e25]) == pytest.approx([1.588, 1.778, 2.666], abs=6e-4)
    assert law_multiplier(base, grown, at, "variant") == pytest.approx([1.623, 1.826, 2.792], abs=6e-4)
    held = table.where(table.arms() == "untied_grow_heldout")
    assert law_loss(grown, held["compute_flops"])[0] - held["loss"][0] == pytest.approx(0.0289, abs=1e-4)


def test_laws_with_one_floor_and_exponent_have_a_constant_multiplier():
    base, variant = {"E": 1.7, "A": 1.6, "gamma": 0.11}, {"E": 1.7, "A": 1.5, "gamma": 0.11}
    expected = (1.6 / 1.5) ** (1 / 0.11)
    for index in ("baseline", "variant"):
        assert law_multiplier(base, variant, [1e18, 1e25], index) == pytest.approx([expected] * 2, rel=1e-9)
    assert law_compute(base, law_loss(base, 3e20)) == pytest.approx(3e20)
    assert np.isinf(law_compute(base, 1.7))


@pytest.mark.parametrize("method", ["linear", "pchip", "power"])
def test_interpolation_is_exact_between_curves_it_can_represent_and_never_extrapolates(method):
    compute = np.geomspace(1e17, 1e20, 200)
    base = Ladder.of(compute, 3.0 * (compute / 1e18) ** -0.05)
    variant = Ladder.of(compute, 3.0 * (1.5 * compute / 1e18) ** -0.05)
    found = interpolated(base, variant, method=method)
    known = np.isfinite(found["multiplier"])
    assert found["multiplier"][known] == pytest.approx(1.5, rel=1e-4)
    assert not known[base.loss > variant.loss[0]].any() and known.sum() > 150
    assert np.isnan(interpolated(base, variant, at=1e22)["multiplier"]).all()


def test_run_beaten_by_a_cheaper_one_is_left_out():
    ladder = Ladder.of([1e18, 2e18, 4e18, 8e18], [3.3, 3.4, 3.1, 3.0])
    assert ladder.dropped == 1 and ladder.compute.tolist() == [1e18, 4e18, 8e18]


def test_iso_loss_reads_back_the_runs():
    _, by_arm = ladders("qlabs_fineweb_ladders.csv")
    needed = iso_loss(by_arm, by_arm["vanilla"].loss)
    assert needed["vanilla"] == pytest.approx(by_arm["vanilla"].compute)
    assert np.nanmin(by_arm["vanilla"].compute / needed["untied_grow"]) > 1.29


def test_loss_below_the_shared_floor_is_refused():
    compute = np.tile(np.geomspace(1e18, 1e20, 6), 2)
    base = 1.7 + 1.6 * (compute[:6] / 1e18) ** -0.3
    loss = np.concatenate([base, np.linspace(1.9, 1.5, 6)])
    with pytest.raises(FitRefused, match="below the floor"):
        shared_floor_laws(compute, loss, ["a"] * 6 + ["b"] * 6, "a")


def test_unknown_baseline_is_named():
    with pytest.raises(ValueError, match="baseline 'plain'"):
        shared_floor_laws([1e18] * 4, [3.0] * 4, ["a"] * 4, "plain")
