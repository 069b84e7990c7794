"""Learning-rate factor and Muon momentum as pure functions of the optimizer step.

No state and no scheduler object: a resumed or grown run asks for its step's factor again and gets the same number.
Steps count from 0 and mean optimizer steps. One factor multiplies every group's base learning rate; weight decay has
no schedule of its own. The shape is warmup-stable-decay with a second ramp after each growth (arXiv 2609.19107).
"""

from collections.abc import Sequence


def wsd_factor(step: int, num_steps: int, warmup_steps: int, warmdown_ratio: float) -> float:
    """Warmup-stable-decay factor in [0, 1] of optimizer step `step` (from 0) in a run of `num_steps`.

    (step + 1) / warmup_steps during warmup, then 1, then linear from exactly 1 at
    decay_start = max(warmup_steps, num_steps - round(warmdown_ratio * num_steps)) to exactly 0 at the last step.
    A warmup longer than the run is cut to the run; a decay that has only the last step to itself is 0 there.

    Raises:
        ValueError: `step` outside the run, or an argument out of its range.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; a run has at least 1 step")
    if not 0 <= step < num_steps:
        raise ValueError(f"step is {step}; a run of num_steps={num_steps} has steps 0 to {num_steps - 1}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}; use 0 for no warmup")
    if not 0.0 <= warmdown_ratio <= 1.0:
        raise ValueError(f"warmdown_ratio is {warmdown_ratio}; it is the share of the run that decays, 0 to 1")
    warmup_steps = min(warmup_steps, num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    last_step = num_steps - 1
    decay_start = max(warmup_steps, num_steps - round(warmdown_ratio * num_steps))
    if step < decay_start:
        return 1.0
    if step == last_step:
        return 0.0
    return 1.0 - (step - decay_start) / (last_step - decay_start)


def growth_ramp(step: int, growth_step: int | Sequence[int] | None = None, ramp_steps: int = 40) -> float:
    """Factor in [0, 1] that restarts the learning rate at a growth: 0 at that step, linear to 1 `ramp_steps` later.

    `growth_step` is one step, several, or None for a run that does not grow. With several the latest one reached
    decides. `ramp_steps=0` leaves the learning rate alone.

    Raises:
        ValueError: a negative growth step or `ramp_steps`.
    """
    if ramp_steps < 0:
        raise ValueError(f"ramp_steps is {ramp_steps}; use 0 for no ramp")
    if growth_step is None:
        growth_steps: Sequence[int] = ()
    elif isinstance(growth_step, int):
        growth_steps = (growth_step,)
    else:
        growth_steps = growth_step
    if any(growth < 0 for growth in growth_steps):
        raise ValueError(f"growth_step is {growth_step}; steps count from 0, None means no growth")
    reached = [growth for growth in growth_steps if growth <= step]
    if not reached or ramp_steps == 0:
        return 1.0
    return min(1.0, (step - max(reached)) / ramp_steps)


def lr_factor(
    step: int,
    *,
    num_steps: int,
    warmup_steps: int,
    warmdown_ratio: float,
    growth_step: int | Sequence[int] | None = None,
    ramp_steps: int = 40,
) -> float:
    """Factor on every group's base learning rate at `step`: `wsd_factor` times `growth_ramp`.

    Raises:
        ValueError: as the two functions do.
    """
    return wsd_factor(step, num_steps, warmup_steps, warmdown_ratio) * growth_ramp(step, growth_step, ramp_steps)


def muon_momentum(step: int, *, start: float = 0.85, end: float = 0.95, ramp_steps: int = 300) -> float:
    """Momentum of the Muon groups at `step`: linear from `start` to `end` over `ramp_steps`, then `end`."""
    fraction = min(step / ramp_steps, 1.0) if ramp_steps > 0 else 1.0
    return (1.0 - fraction) * start + fraction * end
