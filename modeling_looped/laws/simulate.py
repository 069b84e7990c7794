"""Studies with a known truth: runs of a law with noise, and how often a fit's intervals hold that truth.

study = simulate("compute", {"E": 1.7, "A": 1.6, "gamma": 0.11}, {"compute_flops": C}, noise=0.002)
"""

from dataclasses import dataclass

import numpy as np

from modeling_looped.laws.fitting import FitRefused, fit_law
from modeling_looped.laws.forms import LAWS
from modeling_looped.laws.intervals import identification, profile
from modeling_looped.laws.models import bind
from modeling_looped.laws.objectives import Squares


@dataclass(frozen=True)
class Study:
    """Simulated runs: columns, loss with noise, the loss without it, the truth."""

    columns: dict
    loss: np.ndarray
    clean: np.ndarray
    truth: dict


def simulate(law, truth, columns, *, noise, seed=0, bad_share=0.0, bad_size=0.02, arms=None):
    """Runs of `law` with parameters `truth` ({symbol: value}, or per arm) at `columns`.

    noise: standard deviation of log loss. bad_share of the runs are badly tuned: their log loss is raised by an
    exponential amount of mean `bad_size`. Raises ValueError for missing symbols or columns.
    """
    if law not in LAWS:
        raise ValueError(f"no law {law!r}; there are {sorted(LAWS)}")
    if not noise >= 0:
        raise ValueError(f"noise is {noise}; a standard deviation of log loss is needed")
    by_arm = isinstance(next(iter(truth.values())), dict)
    needed = set(LAWS[law].parameters)
    for given in truth.values() if by_arm else (truth,):
        if set(given) != needed:
            raise ValueError(f"{law} has the symbols {sorted(needed)}; given are {sorted(given)}")
    model = bind(LAWS[law], columns, arms, own=LAWS[law].parameters if arms is not None else ())
    clean = model.values(model.from_natural(truth)[None])[0]
    rng = np.random.default_rng(seed)
    log_loss = clean + noise * rng.standard_normal(model.n)
    bad = rng.random(model.n) < bad_share
    log_loss = log_loss + np.where(bad, rng.exponential(bad_size, model.n), 0.0)
    return Study({k: np.asarray(v, float) for k, v in columns.items()}, np.exp(log_loss), np.exp(clean), truth)


def recovery(law, truth, columns, *, noise, draws=200, level=0.95, objective=None, seed=0, symbols=None):
    """Simulate and fit `draws` studies: how often do intervals hold the truth, and what does the tool call identified?

    Returns {"draws", "refused", symbol: {"covered", "identified", "median", "median_width"}}. identified: share of all
    draws, a refusal counting as not identified; covered: share of the fits.
    """
    objective = objective or Squares()
    symbols = symbols or [s for s in LAWS[law].parameters if s not in LAWS[law].terms or s == LAWS[law].floor]
    hits = {s: [] for s in symbols}
    named = dict.fromkeys(symbols, 0)
    estimates, widths, refused = {s: [] for s in symbols}, {s: [] for s in symbols}, 0
    for draw in range(draws):
        study = simulate(law, truth, columns, noise=noise, seed=seed + draw)
        try:
            fit = fit_law(law, study.columns, study.loss, objective=objective)
        except FitRefused:
            refused += 1
            continue
        verdicts = identification(fit, level)
        for s in symbols:
            found = verdicts[s].profile if s in verdicts else profile(fit, s, level)
            above = not found.closed[0] or found.low <= truth[s]
            hits[s].append(above and (not found.closed[1] or truth[s] <= found.high))
            named[s] += verdicts[s].identified if s in verdicts else found.identified
            estimates[s].append(found.estimate)
            widths[s].append(found.high - found.low)
    result = {"draws": draws, "refused": refused}
    for s in symbols:
        result[s] = {
            "covered": float(np.mean(hits[s])) if hits[s] else float("nan"),
            "identified": named[s] / draws,
            "median": float(np.median(estimates[s])) if estimates[s] else float("nan"),
            "median_width": float(np.median(widths[s])) if widths[s] else float("nan"),
        }
    return result
