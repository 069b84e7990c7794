"""How to spend a budget under a fitted L(N, T): compute-optimal, or limited by data, memory or inference.

Closed forms where they exist (`closed_form`), a bounded one-dimensional search elsewhere (`optimal`); both agree where
both apply. C = k N T with k FLOPs per parameter and token (6 for a plain transformer; executed / stored x 6 for a
loop).
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize_scalar


@dataclass(frozen=True)
class Allocation:
    """num_parameters, num_tokens, the loss the law expects, training and inference FLOPs, and what limited it."""

    num_parameters: float
    num_tokens: float
    loss: float
    training_flops: float
    inference_flops: float = 0.0
    limit: str = "compute"

    @property
    def tokens_per_parameter(self):
        return self.num_tokens / self.num_parameters


def chinchilla_loss(q, num_parameters, num_tokens):
    """E + A N^-alpha + B T^-beta."""
    n, t = np.asarray(num_parameters, float), np.asarray(num_tokens, float)
    return q["E"] + q["A"] * n ** -q["alpha"] + q["B"] * t ** -q["beta"]


def closed_form(q, flops, *, k=6.0):
    """N = G (C/k)^(beta/(alpha+beta)), T = (C/k) / N, G = (alpha A / (beta B))^(1/(alpha+beta)) (Hoffmann et al.,
    eq. 4).
    """
    a, b = q["alpha"], q["beta"]
    g = (a * q["A"] / (b * q["B"])) ** (1 / (a + b))
    size = g * (flops / k) ** (b / (a + b))
    tokens = flops / k / size
    return Allocation(float(size), float(tokens), float(chinchilla_loss(q, size, tokens)), float(flops))


def optimal(
    q, flops, *, k=6.0, max_tokens=None, max_parameters=None, inference_tokens=0.0, inference_k=2.0, loss=None
):
    """Best N and T for `flops` in all: training k N T plus inference inference_k N inference_tokens.

    max_tokens: unique data without repetition. max_parameters: stored parameters that fit memory. loss: a function
    (N, T) -> loss in place of L(N, T) (then q is not used). A token limit leaves compute unspent only when the
    parameter limit binds too. Raises ValueError when inference alone exceeds the budget at every size.
    """
    if not flops > 0:
        raise ValueError(f"flops is {flops}; a budget must be positive")
    loss = loss or (lambda n, t: chinchilla_loss(q, n, t))

    def tokens(n):
        return (flops - inference_k * n * inference_tokens) / (k * n)

    low, high = np.log(1e3), np.log(flops / k)
    if inference_tokens:
        high = min(high, np.log(flops / (inference_k * inference_tokens)) - 1e-9)
    limits = []
    if max_parameters is not None and np.log(max_parameters) < high:
        high = np.log(max_parameters)
        limits.append("parameters")
    if high <= low:
        raise ValueError(
            f"no size above 1,000 parameters fits {flops:.3g} FLOPs with {inference_tokens:.3g} tokens served"
        )

    def value(log_n):
        n = np.exp(log_n)
        t = tokens(n)
        if max_tokens is not None:
            t = min(t, max_tokens)
        return float(loss(n, t)) if t > 0 else np.inf

    grid = np.linspace(low, high, 400)
    start = int(np.argmin([value(x) for x in grid]))
    bounds = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    found = minimize_scalar(value, bounds=bounds, method="bounded", options={"xatol": 1e-12, "maxiter": 500})
    log_n = float(found.x) if found.fun <= value(grid[start]) else float(grid[start])
    n = float(np.exp(log_n))
    t = float(tokens(n))
    limit = "compute"
    if max_tokens is not None and t > max_tokens * (1 - 1e-6):
        t, limit = float(max_tokens), "data"
    if "parameters" in limits and n > max_parameters * (1 - 1e-6):
        n, limit = float(max_parameters), "parameters" if limit == "compute" else "data and parameters"
        t = min(float(tokens(n)), np.inf if max_tokens is None else max_tokens)
    return Allocation(n, t, float(loss(n, t)), k * n * t, inference_k * n * inference_tokens, limit)


def cheapest(q, target_loss, *, k=6.0, inference_tokens=0.0, inference_k=2.0):
    """Least total FLOPs (training + inference) that reach `target_loss` (Sardana et al., arXiv 2401.00448).

    Raises ValueError when the loss lies at or below E.
    """
    if target_loss <= q["E"]:
        raise ValueError(f"a loss of {target_loss} is not reachable: the law's irreducible loss is {q['E']:.4f}")

    def tokens(n):
        rest = target_loss - q["E"] - q["A"] * n ** -q["alpha"]
        return (rest / q["B"]) ** (-1 / q["beta"]) if rest > 0 else np.inf

    def cost(log_n):
        n = np.exp(log_n)
        return np.log(k * n * tokens(n) + inference_k * n * inference_tokens)

    smallest = np.log((q["A"] / (target_loss - q["E"])) ** (1 / q["alpha"]))
    grid = smallest + np.geomspace(1e-6, 30, 600)
    start = int(np.argmin([cost(x) for x in grid]))
    bounds = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    log_n = float(minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x)
    n = float(np.exp(log_n))
    t = float(tokens(n))
    return Allocation(n, t, float(target_loss), k * n * t, inference_k * n * inference_tokens)


def suboptimal_cost(q, ratio, flops, *, k=6.0):
    """Training FLOPs needed at `ratio` times the optimal size for the same loss, over `flops`. inf below the least
    size.
    """
    best = closed_form(q, flops, k=k)
    n = best.num_parameters * ratio
    rest = best.loss - q["E"] - q["A"] * n ** -q["alpha"]
    if rest <= 0:
        return float("inf")
    return float(k * n * (rest / q["B"]) ** (-1 / q["beta"]) / flops)


def tolerated_sizes(q, flops, excess=0.1, *, k=6.0):
    """Smallest and largest N / N_optimal whose cost stays within (1 + excess) of the optimum."""

    def over(log_ratio):
        return min(suboptimal_cost(q, np.exp(log_ratio), flops, k=k), 1e6) - 1 - excess

    return float(np.exp(brentq(over, -8, 0))), float(np.exp(brentq(over, 0, 12)))


def stacking_growth_tokens(num_parameters, flops):
    """Tokens after which to stack (G_stack): log10 d = 0.88 log10 N + 163.27 / log10 C - 5.74.

    Du et al., "Stacking Your Transformers", NeurIPS 2024; C = 6 N T of the whole training.
    """
    return 10 ** (0.88 * np.log10(num_parameters) + 163.27 / np.log10(flops) - 5.74)
