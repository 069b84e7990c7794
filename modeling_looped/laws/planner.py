"""Which runs to buy: given FLOPs for a study, the ladder that pins an exponent best, and the interval to expect.

The expected interval comes from the curvature of the law at the assumed truth (Fisher information); `check` simulates
the chosen study and reports the intervals that came out. Assumed: noise of a known size, runs tuned equally well.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from modeling_looped.laws.forms import LAWS
from modeling_looped.laws.models import bind
from modeling_looped.laws.simulate import recovery


@dataclass(frozen=True)
class Plan:
    """Runs (columns), their total FLOPs, and the expected 95% half-width of each symbol."""

    columns: dict
    total_flops: float
    half_width: dict
    name: str

    @property
    def num_runs(self):
        return len(next(iter(self.columns.values())))


def expected_half_widths(law, truth, columns, *, noise, level=0.95):
    """{symbol: half-width} of the intervals a least-squares fit should have; inf where the runs do not fix a symbol.

    Exponents as they are; levels in units of the loss, at the centre of the runs (the irreducible loss at itself).
    """
    model = bind(LAWS[law], columns)
    theta = model.from_natural(truth)
    slope = model.evaluate(theta[None])[1][0]
    freedom = model.n - model.p
    if freedom < 1:
        return dict.fromkeys(LAWS[law].parameters, float("inf"))
    information = slope.T @ slope
    scale = np.sqrt(np.maximum(np.diag(information), 1e-300))
    value, vector = np.linalg.eigh(information / np.outer(scale, scale))
    if value[0] < 1e-12 * value[-1]:
        return dict.fromkeys(LAWS[law].parameters, float("inf"))
    covariance = (vector / value) @ vector.T / np.outer(scale, scale)
    half = student.ppf(0.5 + level / 2, freedom) * noise * np.sqrt(np.diag(covariance))
    found = {}
    for symbol, at, width in zip(model.law.parameters, theta, half, strict=True):
        found[symbol] = float(np.exp(at) * width) if symbol in model.law.terms else float(width)
    return found


def plan_ladder(truth, budget, *, noise, smallest, symbol="gamma", max_runs=16, largest_share=0.7):
    """The L(C) ladder for `budget` FLOPs in all with the narrowest expected interval for `symbol`.

    Candidates: geometric ladders from `smallest` FLOPs to the most that the budget allows, 5 to `max_runs` rungs,
    with 1 to 4 seeds on the smaller rungs. largest_share: most of the budget that one run may take. Returns [Plan],
    best first. Raises ValueError when the budget does not buy five runs.
    """
    if budget < 5 * smallest:
        raise ValueError(f"{budget:.3g} FLOPs do not buy five runs of {smallest:.3g}; a ladder needs at least five")
    plans = []
    for num_rungs in range(5, max_runs + 1):
        for seeds in (1, 2, 3, 4):
            ladder = _widest_ladder(budget, smallest, num_rungs, seeds, largest_share)
            if ladder is None or len(ladder) > 4 * max_runs:
                continue
            widths = expected_half_widths("compute", truth, {"compute_flops": ladder}, noise=noise)
            name = f"{num_rungs} rungs x {ladder.max() / ladder.min():.3g} in compute"
            name += f", {seeds} seeds on the lower half" if seeds > 1 else ""
            plans.append(Plan({"compute_flops": ladder}, float(ladder.sum()), widths, name))
    if not plans:
        raise ValueError(f"no ladder of at least five rungs from {smallest:.3g} FLOPs fits {budget:.3g} FLOPs")
    return sorted(plans, key=lambda p: p.half_width[symbol])


def _widest_ladder(budget, smallest, num_rungs, seeds, largest_share):
    """Geometric rungs from `smallest` with `seeds` runs on the lower half, the widest whose sum fits the budget."""
    repeats = np.where(np.arange(num_rungs) < num_rungs // 2, seeds, 1)

    def runs(log_span):
        return np.repeat(smallest * np.exp(np.linspace(0, log_span, num_rungs)), repeats)

    low, high = np.log(1.5), np.log(budget / smallest)
    if runs(low).sum() > budget:
        return None
    for _ in range(60):
        middle = 0.5 * (low + high)
        ladder = runs(middle)
        fits = ladder.sum() <= budget and ladder.max() <= largest_share * budget
        low, high = (middle, high) if fits else (low, middle)
    return runs(low)


def plan_grid(truth, budget, *, noise, smallest, symbol="alpha", ratios=(5.0, 10.0, 20.0, 40.0, 80.0), max_sizes=9):
    """The L(N, T) grid for `budget` FLOPs: sizes x tokens-per-parameter ratios, narrowest interval for `symbol`.

    smallest: parameters of the smallest model. Returns [Plan], best first.
    """
    plans = []
    for num_sizes in range(3, max_sizes + 1):
        for count in range(2, len(ratios) + 1):
            chosen = np.geomspace(ratios[0], ratios[-1], count)
            cost = 6 * chosen.sum()
            low, high = np.log(1.5), np.log(1e6)

            def sizes(span, n=num_sizes):
                return smallest * np.exp(np.linspace(0, span, n))

            if (sizes(low) ** 2).sum() * cost > budget:
                continue
            for _ in range(60):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if (sizes(middle) ** 2).sum() * cost <= budget else (low, middle)
            n, r = (a.ravel() for a in np.meshgrid(sizes(low), chosen))
            columns = {"num_parameters": n, "num_tokens": n * r}
            widths = expected_half_widths("chinchilla", truth, columns, noise=noise)
            name = f"{num_sizes} sizes x {count} ratios, {np.exp(low):.3g}x in size"
            plans.append(Plan(columns, float((6 * n * n * r).sum()), widths, name))
    if not plans:
        raise ValueError(f"no grid of at least 3 sizes from {smallest:.3g} parameters fits {budget:.3g} FLOPs")
    return sorted(plans, key=lambda p: p.half_width[symbol])


def plan_comparison(base, variant, budget, *, noise, smallest, max_runs=16):
    """Two equal ladders, half the budget each: the smallest difference of exponents that they would show.

    Exponents with E shared: returns (Plan of one arm, detectable difference at 95%, difference asked for).
    """
    best = plan_ladder(base, budget / 2, noise=noise, smallest=smallest, max_runs=max_runs)[0]
    columns = best.columns["compute_flops"]
    both = {"compute_flops": np.tile(columns, 2)}
    arms = ["base"] * len(columns) + ["variant"] * len(columns)
    model = bind(LAWS["compute"], both, arms, own=("A", "gamma"))
    theta = model.from_natural({"base": base, "variant": variant | {"E": base["E"]}})
    slope = model.evaluate(theta[None])[1][0]
    covariance = np.linalg.pinv(slope.T @ slope, hermitian=True) * noise**2
    contrast = np.zeros(model.p)
    contrast[model.slots["gamma"]["variant"]], contrast[model.slots["gamma"]["base"]] = 1, -1
    width = student.ppf(0.975, max(model.n - model.p, 1)) * np.sqrt(contrast @ covariance @ contrast)
    return best, float(width), abs(variant["gamma"] - base["gamma"])


def check(law, truth, plan, *, noise, draws=50, seed=0):
    """Simulate the plan: `recovery` of its runs, to set against the expected half-widths."""
    return recovery(law, truth, plan.columns, noise=noise, draws=draws, seed=seed)
