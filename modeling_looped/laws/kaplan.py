"""Kaplan et al. (arXiv 2001.08361): its laws under NAMED constant sets, and which of its numbers follow from which.

The paper gives several constants for one symbol (alpha_D is .103 in Table 2 and .095 in Table 5), so every function
takes a set from CONSTANTS. Compute is in PF-days (8.64e19 FLOPs) as in the paper; N is non-embedding parameters; the
batch is in tokens. `kaplan_checks.py` holds the list of derived numbers with their verdicts.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize_scalar

PF_DAY = 1e15 * 24 * 3600  # FLOPs

CONSTANTS = {
    "table 2": {"alpha_N": 0.076, "alpha_D": 0.103, "Nc": 6.4e13, "Dc": 1.8e13},
    "table 3": {"alpha_N": 0.077, "alpha_S": 0.76, "Nc": 6.5e13, "Sc": 2.1e3},
    "table 5": {
        "alpha_N": 0.076,
        "Nc": 8.8e13,
        "alpha_D": 0.095,
        "Dc": 5.4e13,
        "alpha_C": 0.057,
        "Cc": 1.6e7,
        "alpha_C_min": 0.050,
        "Cc_min": 3.1e8,
        "alpha_B": 0.21,
        "B_star": 2.1e8,
        "alpha_S": 0.76,
        "Sc": 2.1e3,
    },
    "table 6": {"Ne": 1.3e9, "pN": 0.73, "Be": 2.0e6, "pB": 0.24, "Se": 5.4e3, "pS": 0.03, "De": 2e10, "pD": 0.27},
    "equation 6.7": {"Ne": 1.3e9, "pN": 0.73, "De": 4e10, "pD": 0.26},
}
# appendix B: the fit of L(N, S) with the critical batch
APPENDIX_B = CONSTANTS["table 3"] | {"alpha_B": 0.21, "B_star": 2.1e8}


def loss_nd(num_parameters, num_tokens, c):
    """[(Nc / N)^(alpha_N / alpha_D) + Dc / D]^alpha_D, eq. 1.5."""
    first = (c["Nc"] / np.asarray(num_parameters, float)) ** (c["alpha_N"] / c["alpha_D"])
    return (first + c["Dc"] / np.asarray(num_tokens, float)) ** c["alpha_D"]


def loss_ns(num_parameters, min_steps, c):
    """(Nc / N)^alpha_N + (Sc / Smin)^alpha_S, eq. 1.6."""
    return (c["Nc"] / np.asarray(num_parameters, float)) ** c["alpha_N"] + (
        c["Sc"] / np.asarray(min_steps, float)
    ) ** c["alpha_S"]


def loss_c_min(pf_days, c):
    """(Cc_min / Cmin)^alpha_C_min, eq. 1.3."""
    return (c["Cc_min"] / np.asarray(pf_days, float)) ** c["alpha_C_min"]


def loss_d(num_tokens, c):
    """(Dc / D)^alpha_D, eq. 1.2."""
    return (c["Dc"] / np.asarray(num_tokens, float)) ** c["alpha_D"]


def critical_batch(loss, c):
    """B_star / L^(1 / alpha_B) tokens, eq. 1.4."""
    return c["B_star"] / np.asarray(loss, float) ** (1 / c["alpha_B"])


def min_steps(steps, batch, loss, c):
    """S / (1 + B_crit / B), eq. 5.4: steps that a huge batch would need."""
    return steps / (1 + critical_batch(loss, c) / batch)


def min_compute(compute, batch, loss, c):
    """C / (1 + B / B_crit), eq. 5.5: compute that a tiny batch would need."""
    return compute / (1 + batch / critical_batch(loss, c))


def learning_rate(num_parameters):
    """0.003239 - 0.0001395 ln N, appendix D.6. The log is natural: the rule reaches zero at N = 1.21e10."""
    return 0.003239 - 0.0001395 * np.log(np.asarray(num_parameters, float))


def num_parameters_of(num_layers, width):
    """12 num_layers width^2, section 2.1 (attention width = width, MLP width = 4 width)."""
    return 12 * num_layers * width**2


def tokens_against_overfitting(num_parameters, c, *, excess=0.02):
    """Tokens for L(N, D) <= (1 + excess) L(N, infinity), section 4.2: Dc / ((1 + excess)^(1/alpha_D) - 1) (N /
    Nc)^(...).
    """
    factor = c["Dc"] / ((1 + excess) ** (1 / c["alpha_D"]) - 1)
    return factor * (np.asarray(num_parameters, float) / c["Nc"]) ** (c["alpha_N"] / c["alpha_D"])


def alpha_c_min(c):
    """1 / (1/alpha_S + 1/alpha_B + 1/alpha_N), eq. B.7."""
    return 1 / (1 / c["alpha_S"] + 1 / c["alpha_B"] + 1 / c["alpha_N"])


def efficient_frontier(c):
    """Closed form of appendix B: {"alpha_C", "Cc"} of L(C) = (Cc / C)^alpha_C, Cc in PF-days, eq. B.6 and B.7."""
    ratio = c["alpha_N"] / c["alpha_S"]
    flops = (
        6 * c["Nc"] * c["B_star"] * c["Sc"]
        * (1 + ratio) ** (1 / c["alpha_S"] + 1 / c["alpha_N"])
        * (1 / ratio) ** (1 / c["alpha_S"])
    )  # fmt: skip
    return {"alpha_C": alpha_c_min(c), "Cc": flops / PF_DAY}


def efficient_size(pf_days, c):
    """N(C) = Nc (C / Cc)^(alpha_C / alpha_N) (1 + alpha_N / alpha_S)^(1 / alpha_N), eq. B.9."""
    front = efficient_frontier(c)
    return (
        c["Nc"]
        * (np.asarray(pf_days, float) / front["Cc"]) ** (front["alpha_C"] / c["alpha_N"])
        * (1 + c["alpha_N"] / c["alpha_S"]) ** (1 / c["alpha_N"])
    )


def efficient_steps(pf_days, c):
    """S(C) = Cc / (6 Nc B_star) (1 + alpha_N / alpha_S)^(-1 / alpha_N) (C / Cc)^(alpha_C / alpha_S), eq. B.10."""
    front = efficient_frontier(c)
    return (
        front["Cc"] * PF_DAY / (6 * c["Nc"] * c["B_star"])
        * (1 + c["alpha_N"] / c["alpha_S"]) ** (-1 / c["alpha_N"])
        * (np.asarray(pf_days, float) / front["Cc"]) ** (front["alpha_C"] / c["alpha_S"])
    )  # fmt: skip


def loss_nc(num_parameters, pf_days, c):
    """The L that solves L = (Nc/N)^alpha_N + (6 B_star Sc N / (L^(1/alpha_B) C))^alpha_S, eq. B.3."""
    floor = (c["Nc"] / num_parameters) ** c["alpha_N"]
    factor = 6 * c["B_star"] * c["Sc"] * num_parameters / (pf_days * PF_DAY)

    def gap(log_loss):
        value = np.exp(log_loss)
        return value - floor - (factor * value ** (-1 / c["alpha_B"])) ** c["alpha_S"]

    return float(np.exp(brentq(gap, np.log(floor), np.log(floor) + 20, xtol=1e-15)))


def efficient_size_numeric(pf_days, c):
    """(N, L) minimising `loss_nc` numerically: the check of the closed form."""
    guess = np.log(efficient_size(pf_days, c))
    best = minimize_scalar(
        lambda x: loss_nc(np.exp(x), pf_days, c),
        bounds=(guess - 5, guess + 5),
        method="bounded",
        options={"xatol": 1e-12},
    )
    return float(np.exp(best.x)), float(best.fun)


def excess_compute(ratio, c):
    """C(N) / C(N_eff) at N = ratio N_eff, appendix B.4. Undefined (nan) at or below `smallest_ratio`."""
    x = np.asarray(ratio, float)
    return x * excess_steps(x, c)


def excess_steps(ratio, c):
    """S(N) / S(N_eff), appendix B.4."""
    x = np.asarray(ratio, float)
    inside = 1 + c["alpha_S"] / c["alpha_N"] * (1 - x ** -c["alpha_N"])
    return np.where(inside > 0, np.where(inside > 0, inside, 1.0) ** (-1 / c["alpha_S"]), np.nan)


def smallest_ratio(c):
    """N / N_eff below which the loss is out of reach: (1 + alpha_N / alpha_S)^(-1 / alpha_N)."""
    return (1 + c["alpha_N"] / c["alpha_S"]) ** (-1 / c["alpha_N"])


def tolerated_range(c, *, excess=0.2):
    """(smallest, largest) N / N_eff that cost at most 1 + excess."""
    low = brentq(lambda x: float(excess_compute(x, c)) - 1 - excess, smallest_ratio(c) * (1 + 1e-9), 1)
    return low, brentq(lambda x: float(excess_compute(x, c)) - 1 - excess, 1, 1e3)


def convergence_ratios(f, f_prime, c):
    """N, S and C of training to a loss (1 + f) above convergence, over (1 + f_prime), at equal loss; appendix B.3."""
    size = ((1 + f) / (1 + f_prime)) ** (1 / c["alpha_N"])
    steps = ((1 + 1 / f) / (1 + 1 / f_prime)) ** (1 / c["alpha_S"])
    return {"size": size, "steps": steps, "compute": size * steps}


@dataclass(frozen=True)
class Contradiction:
    """Where L(Cmin) meets L(D(Cmin)), section 6.3: PF-days, loss, parameters, tokens."""

    pf_days: float
    loss: float
    num_parameters: float
    num_tokens: float


def contradiction_point(trend, power, c=None):
    """C* solving (Cc_min / C)^alpha_C_min = (Dc / (trend C^power))^alpha_D. Very sensitive: pass several trends."""
    c = c or CONSTANTS["table 5"]
    slope = c["alpha_C_min"] - power * c["alpha_D"]
    if slope <= 0:
        raise ValueError(f"tokens grow as C^{power}: L(D) falls at least as fast as L(C), the two never cross")
    log_c = (c["alpha_C_min"] * np.log(c["Cc_min"]) - c["alpha_D"] * np.log(c["Dc"] / trend)) / slope
    pf_days = float(np.exp(log_c))
    table6 = CONSTANTS["table 6"]
    return Contradiction(
        pf_days, float(loss_c_min(pf_days, c)), table6["Ne"] * pf_days ** table6["pN"], trend * pf_days**power
    )


def contradiction_sensitivity():
    """The point under the three trends that the paper's own numbers allow: {label: Contradiction}."""
    exact = 2 * PF_DAY / (6 * CONSTANTS["table 6"]["Ne"])
    return {
        "Table 6 (2e10, 0.27)": contradiction_point(2e10, 0.27),
        "eq 6.7 (4e10, 0.26)": contradiction_point(4e10, 0.26),
        "exact 2.2e10, 0.27": contradiction_point(exact, 0.27),
    }
