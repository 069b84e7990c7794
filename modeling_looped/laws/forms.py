"""The laws: each an entry of LAWS with its formula, its symbols, its source and how it is fitted.

A law of positive terms, L = sum_k level_k * prod_j x_j^-exponent_kj, is written as its table of `terms`; its log is a
log-sum-exp of functions linear in (log level, exponent), so value, gradient and Hessian are exact and cheap
(`models.TermModel`). A law of another shape gives a `curve` (`curves.py`) with its analytic gradient.
Any parameter may be shared by all arms (architectures) or be each arm's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from modeling_looped.laws import curves


@dataclass(frozen=True)
class Law:
    """One law. `terms` maps each level to {exponent: column}; `curve` replaces it for laws of another shape.

    `units` are the values of the columns at which a printed level is quoted (1 unless stated): the paper of looped
    and growing models quotes A at C = 1e18 FLOPs. `target` is the column that the law predicts.
    """

    formula: str
    symbols: Mapping[str, str]
    source: str
    columns: tuple[str, ...]
    terms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    curve: Callable | None = None
    units: Mapping[str, float] = field(default_factory=dict)
    target: str = "loss"

    @property
    def parameters(self):
        """Names in fitting order: levels, then exponents; a curve states its own."""
        if self.curve is not None:
            return tuple(self.curve.parameters)
        exponents = [name for powers in self.terms.values() for name in powers]
        return tuple(self.terms) + tuple(dict.fromkeys(exponents))

    @property
    def floor(self):
        """The level without powers (the irreducible loss), or None."""
        return next((level for level, powers in self.terms.items() if not powers), None)


_KAPLAN = "Kaplan et al., arXiv 2001.08361"

LAWS = {
    "compute": Law(
        formula="L(C) = E + A (C / 1e18)^-gamma",
        symbols={
            "C": "training FLOPs",
            "E": "irreducible loss",
            "A": "reducible loss at 1e18 FLOPs",
            "gamma": "exponent",
        },
        source="Chen, Vegesna, Dahal, Wilson, arXiv 2609.19107",
        columns=("compute_flops",),
        terms={"E": {}, "A": {"gamma": "compute_flops"}},
        units={"compute_flops": 1e18},
    ),
    "chinchilla": Law(
        formula="L(N, T) = E + A N^-alpha + B T^-beta = E + (N / N0)^-alpha + (T / T0)^-beta",
        symbols={
            "N": "parameters (convention of the table)",
            "T": "training tokens",
            "E": "irreducible loss",
            "A, B": "N0^alpha and T0^beta: reported at the centre of the data, where they are not tied to the "
            "exponents",
        },
        source="Hoffmann et al., arXiv 2203.15556, approach 3",
        columns=("num_parameters", "num_tokens"),
        terms={"E": {}, "A": {"alpha": "num_parameters"}, "B": {"beta": "num_tokens"}},
    ),
    "kaplan-n": Law(
        formula="L(N) = (Nc / N)^alpha_N",
        symbols={"N": "non-embedding parameters, trained to convergence on ample data", "A": "Nc^alpha_N"},
        source=f"{_KAPLAN}, eq. 1.1",
        columns=("num_parameters",),
        terms={"A": {"alpha_N": "num_parameters"}},
    ),
    "kaplan-d": Law(
        formula="L(D) = (Dc / D)^alpha_D",
        symbols={"D": "tokens of the data set, early stopping", "A": "Dc^alpha_D"},
        source=f"{_KAPLAN}, eq. 1.2",
        columns=("num_tokens",),
        terms={"A": {"alpha_D": "num_tokens"}},
    ),
    "kaplan-c": Law(
        formula="L(C) = (Cc / C)^alpha_C",
        symbols={"C": "training FLOPs at a fixed batch size", "A": "Cc^alpha_C"},
        source=f"{_KAPLAN}, eq. 3.3",
        columns=("compute_flops",),
        terms={"A": {"alpha_C": "compute_flops"}},
    ),
    "kaplan-cmin": Law(
        formula="L(Cmin) = (Cc_min / Cmin)^alpha_C_min",
        symbols={"Cmin": "FLOPs below the critical batch size: C / (1 + B / B_crit)", "A": "Cc_min^alpha_C_min"},
        source=f"{_KAPLAN}, eq. 1.3",
        columns=("min_compute_flops",),
        terms={"A": {"alpha_C_min": "min_compute_flops"}},
    ),
    "kaplan-nd": Law(
        formula="L(N, D) = [(Nc / N)^(alpha_N / alpha_D) + Dc / D]^alpha_D",
        symbols={"N": "non-embedding parameters", "D": "tokens of the data set"},
        source=f"{_KAPLAN}, eq. 1.5",
        columns=("num_parameters", "num_tokens"),
        curve=curves.KaplanND,
    ),
    "kaplan-ns": Law(
        formula="L(N, S) = (Nc / N)^alpha_N + (Sc / Smin)^alpha_S",
        symbols={
            "Smin": "steps at a batch far above critical: S / (1 + B_crit / B)",
            "A, B": "Nc^alpha_N, Sc^alpha_S",
        },
        source=f"{_KAPLAN}, eq. 1.6",
        columns=("num_parameters", "min_steps"),
        terms={"A": {"alpha_N": "num_parameters"}, "B": {"alpha_S": "min_steps"}},
    ),
    "critical-batch": Law(
        formula="B_crit(L) = B_star / L^(1 / alpha_B)",
        symbols={"L": "loss in nats", "B_star": "tokens at one nat", "inverse_alpha_B": "1 / alpha_B"},
        source=f"{_KAPLAN}, eq. 1.4",
        columns=("loss",),
        terms={"B_star": {"inverse_alpha_B": "loss"}},
        target="critical_batch_tokens",
    ),
    "data-constrained": Law(
        formula="L = E + A Nhat^-alpha + B That^-beta, That = U + U R_D (1 - exp(-(T/U - 1) / R_D)), Nhat alike",
        symbols={
            "U": "unique tokens",
            "R_D": "repetitions at which the value of repeated data has decayed to 1/e",
            "R_N": "the same for parameters above the optimum for U",
            "E, A, B, alpha, beta": "fixed: fitted beforehand on runs without repetition",
        },
        source="Muennighoff et al., arXiv 2305.16264",
        columns=("num_parameters", "num_tokens", "unique_tokens"),
        curve=curves.DataConstrained,
    ),
    "recurrence": Law(
        formula="L = E + A (N_once + K^phi N_rec)^-alpha + B T^-beta",
        symbols={
            "N_once": "parameters used once per token",
            "N_rec": "parameters of the core, used K times",
            "K": "num_loops",
            "phi": "recurrence equivalence: 0 = a pass is worth nothing, 1 = as much as untied blocks",
        },
        source="Schwethelm, Rueckert, Kaissis, arXiv 2604.21106",
        columns=("once_parameters", "recurrent_parameters", "num_loops", "num_tokens"),
        curve=curves.Recurrence,
    ),
    "context": Law(
        formula="L(t) = E + A t^-a",
        symbols={
            "t": "position in the context, from 1",
            "E": "loss at an endless context",
            "A": "excess at position 1",
        },
        source=f"{_KAPLAN}, appendix D.5",
        columns=("context_position",),
        terms={"E": {}, "A": {"a": "context_position"}},
    ),
}
