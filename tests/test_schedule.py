import json
from pathlib import Path

import pytest

from training.schedule import growth_ramp, lr_factor, muon_momentum, wsd_factor

REFERENCE = json.loads((Path(__file__).parent / "assets" / "schedule" / "schedule.json").read_text())


def exactly(value):
    return pytest.approx(value, abs=1e-12, rel=0)


@pytest.mark.parametrize("ladder", REFERENCE["ladders"], ids=lambda run: f"{run['variant']}-d{run['depth']}")
def test_paper_schedule_at_every_recorded_step(ladder):
    run = {"num_steps": ladder["steps"], "warmup_steps": ladder["warmup"], "warmdown_ratio": ladder["warmdown_ratio"]}
    for step, wsd, ramp, product, momentum in ladder["points"]:
        assert wsd_factor(step, **run) == exactly(wsd), step
        assert growth_ramp(step, ladder["growth_step"]) == exactly(ramp), step
        assert lr_factor(step, **run, growth_step=ladder["growth_step"]) == exactly(product), step
        assert muon_momentum(step) == exactly(momentum), step


@pytest.mark.parametrize(
    "case", REFERENCE["edge_cases"], ids=lambda c: f"{c['steps']}-{c['warmup']}-{c['warmdown_ratio']}"
)
def test_paper_schedule_edge_cases(case):
    run = {"num_steps": case["steps"], "warmup_steps": case["warmup"], "warmdown_ratio": case["warmdown_ratio"]}
    assert [wsd_factor(step, **run) for step in range(case["steps"])] == exactly(case["factors"])


def test_paper_momentum_points():
    for step, momentum in REFERENCE["muon_momentum"].items():
        assert muon_momentum(int(step)) == exactly(momentum), step


@pytest.mark.parametrize(
    ("num_steps", "warmup_steps", "warmdown_ratio"), [(16, 5, 0.8), (100, 0, 0.6), (2355, 0, 0.8), (51, 40, 0.2)]
)
def test_ends_are_exact(num_steps, warmup_steps, warmdown_ratio):
    run = {"num_steps": num_steps, "warmup_steps": warmup_steps, "warmdown_ratio": warmdown_ratio}
    decay_start = max(warmup_steps, num_steps - round(warmdown_ratio * num_steps))
    assert wsd_factor(decay_start, **run) == 1.0
    assert 0.0 < wsd_factor(decay_start + 1, **run) < 1.0
    assert wsd_factor(num_steps - 1, **run) == 0.0


def test_several_growth_steps_follow_the_latest():
    both = [growth_ramp(step, [10, 30], ramp_steps=40) for step in range(80)]
    assert both[:10] == [1.0] * 10
    assert both[10:30] == [growth_ramp(step, 10, ramp_steps=40) for step in range(10, 30)]
    assert both[30:] == [growth_ramp(step, 30, ramp_steps=40) for step in range(30, 80)]
    assert both[10] == both[30] == 0.0
    assert both[70] == 1.0


def test_off_is_none_or_zero():
    assert growth_ramp(5) == growth_ramp(5, []) == growth_ramp(5, 5, ramp_steps=0) == 1.0
    assert muon_momentum(0, start=0.9, end=0.95, ramp_steps=0) == 0.95
    assert muon_momentum(5, start=0.9, end=1.0, ramp_steps=10) == exactly(0.95)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((10, 10, 0, 0.5), "step is 10"),
        ((-1, 10, 0, 0.5), "step is -1"),
        ((0, 0, 0, 0.5), "num_steps is 0"),
        ((0, 10, -1, 0.5), "warmup_steps is -1"),
        ((0, 10, 0, 1.5), "warmdown_ratio is 1.5"),
    ],
)
def test_wsd_errors_name_the_field(arguments, field):
    with pytest.raises(ValueError, match=field):
        wsd_factor(*arguments)


def test_growth_errors_name_the_field():
    with pytest.raises(ValueError, match="ramp_steps is -1"):
        growth_ramp(0, 5, ramp_steps=-1)
    with pytest.raises(ValueError, match=r"growth_step is \[5, -1\]"):
        growth_ramp(0, [5, -1])
