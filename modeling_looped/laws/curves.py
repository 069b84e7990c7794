"""Laws that are not a plain sum of power terms: value and analytic gradient in fitting coordinates.

Fitting coordinates are chosen so that they stay nearly uncorrelated: a level is the log of the term at the centre of
the data (`pivots`), an exponent is itself. `to_natural` and `from_natural` translate from and to the published
symbols.
"""

import numpy as np


def _log_add(z1, z2):
    total = np.logaddexp(z1, z2)
    return total, np.exp(z1 - total), np.exp(z2 - total)


class KaplanND:
    """log L = alpha_D log[exp((n - alpha_N x) / alpha_D) + exp(d / alpha_D - y)], x = log N/N_pivot, y = log
    D/D_pivot.

    n and d are the logs of L(N_pivot, infinity) and of L(infinity, D_pivot).
    """

    parameters = ("Nc", "alpha_N", "Dc", "alpha_D")
    positive_exponents = ("alpha_N", "alpha_D")

    def __init__(self, columns, pivots):
        self.pivots = pivots
        self.x = np.log(columns["num_parameters"] / pivots["num_parameters"])
        self.y = np.log(columns["num_tokens"] / pivots["num_tokens"])

    def value_and_gradient(self, q):
        n, a_n, d, a_d = q
        z1 = (n - a_n * self.x) / a_d
        z2 = d / a_d - self.y
        total, s1, s2 = _log_add(z1, z2)
        return a_d * total, (s1, -s1 * self.x, s2, total - s1 * z1 - s2 * d / a_d)

    def to_natural(self, q):
        n, a_n, d, a_d = q
        return {
            "Nc": self.pivots["num_parameters"] * np.exp(n / a_n),
            "alpha_N": a_n,
            "Dc": self.pivots["num_tokens"] * np.exp(d / a_d),
            "alpha_D": a_d,
        }

    def from_natural(self, natural):
        n = natural["alpha_N"] * np.log(natural["Nc"] / self.pivots["num_parameters"])
        d = natural["alpha_D"] * np.log(natural["Dc"] / self.pivots["num_tokens"])
        return np.array([n, natural["alpha_N"], d, natural["alpha_D"]])

    def starts(self, target):
        """For each exponent pair L^(1/alpha_D) is linear in (Nc^(alpha_N/alpha_D), Dc): non-negative least squares."""
        from scipy.optimize import nnls

        found = []
        for a_n in np.geomspace(0.03, 0.6, 14):
            for a_d in np.geomspace(0.03, 0.6, 14):
                goal = target ** (1 / a_d)
                design = np.stack([np.exp(-a_n / a_d * self.x), np.exp(-self.y)], axis=1) / goal[:, None]
                levels, _ = nnls(design, np.ones_like(goal))
                n, d = a_d * np.log(np.maximum(levels, 1e-9 * goal.min()))
                found.append([n, a_n, d, a_d])
        return np.array(found)


class Recurrence:
    """log L = log[exp(e) + exp(a - alpha z) + exp(b - beta y)], z = log((N_once + K^phi N_rec) / N_pivot)."""

    parameters = ("E", "A", "B", "alpha", "beta", "phi")
    positive_exponents = ("alpha", "beta")

    def __init__(self, columns, pivots):
        self.pivots = pivots
        self.once = np.asarray(columns["once_parameters"], float)
        self.recurrent = np.asarray(columns["recurrent_parameters"], float)
        self.log_loops = np.log(columns["num_loops"])
        self.y = np.log(columns["num_tokens"] / pivots["num_tokens"])

    @property
    def _pivot(self):
        return self.pivots["once_parameters"] + self.pivots["recurrent_parameters"]

    def value_and_gradient(self, q):
        e, a, b, alpha, beta, phi = q
        worth = np.exp(phi * self.log_loops) * self.recurrent
        z = np.log((self.once + worth) / self._pivot)
        terms = np.stack(np.broadcast_arrays(e, a - alpha * z, b - beta * self.y))
        top = terms.max(axis=0)
        total = top + np.log(np.exp(terms - top).sum(axis=0))
        s_e, s_a, s_b = np.exp(terms - total)
        return total, (
            s_e,
            s_a,
            s_b,
            -s_a * z,
            -s_b * self.y,
            -s_a * alpha * worth * self.log_loops / (self.once + worth),
        )

    def to_natural(self, q):
        e, a, b, alpha, beta, phi = q
        return {
            "E": np.exp(e),
            "A": np.exp(a + alpha * np.log(self._pivot)),
            "B": np.exp(b + beta * np.log(self.pivots["num_tokens"])),
            "alpha": alpha,
            "beta": beta,
            "phi": phi,
        }

    def from_natural(self, natural):
        alpha, beta = natural["alpha"], natural["beta"]
        a = np.log(natural["A"]) - alpha * np.log(self._pivot)
        b = np.log(natural["B"]) - beta * np.log(self.pivots["num_tokens"])
        return np.array([np.log(natural["E"]), a, b, alpha, beta, natural["phi"]])

    def starts(self, target):
        """Non-negative least squares for (E, A, B) on a grid of (phi, alpha, beta)."""
        from scipy.optimize import nnls

        found = []
        grid = np.geomspace(0.06, 1.2, 10)
        for phi in np.linspace(-0.25, 1.25, 7):
            z = np.log((self.once + np.exp(phi * self.log_loops) * self.recurrent) / self._pivot)
            for alpha in grid:
                for beta in grid:
                    design = np.stack([np.ones_like(z), np.exp(-alpha * z), np.exp(-beta * self.y)], axis=1)
                    levels, _ = nnls(design / target[:, None], np.ones_like(target))
                    found.append([*np.log(np.maximum(levels, 1e-3 * target.min())), alpha, beta, phi])
        return np.array(found)


class DataConstrained:
    """The data-constrained law with its five base constants held fixed; free are log R_D and log R_N.

    U_D = min(T, unique); R = T / U_D - 1; That = U_D (1 + R_D (1 - exp(-R / R_D))). The parameters have the same form
    with U_N = min(N, N_optimal(U_D)), where N_optimal is the compute-optimal size for U_D tokens under the base law.
    """

    parameters = ("R_D", "R_N")
    positive_exponents = ()
    # Muennighoff et al., section 5 and their released notebook: the C4 fit; alpha = beta by construction
    base = {
        "A": np.exp(6.255414),
        "B": np.exp(7.3049974),
        "E": np.exp(0.6254804),
        "alpha": 0.3526596,
        "beta": 0.3526596,
    }

    def __init__(self, columns, pivots):
        self.pivots = pivots
        base = self.base
        num_parameters = np.asarray(columns["num_parameters"], float)
        num_tokens = np.asarray(columns["num_tokens"], float)
        self.unique = np.minimum(num_tokens, columns["unique_tokens"])
        self.repeats = num_tokens / self.unique - 1
        optimal = optimal_parameters(self.unique, base)
        self.useful = np.minimum(num_parameters, optimal)
        self.surplus = num_parameters / self.useful - 1
        self.shape = (base["E"], base["A"], base["alpha"], base["B"], base["beta"])

    def value_and_gradient(self, q):
        log_rd, log_rn = q
        e, a, alpha, b, beta = self.shape
        tokens, d_tokens = _decayed(self.unique, self.repeats, log_rd)
        size, d_size = _decayed(self.useful, self.surplus, log_rn)
        data_term, size_term = b * tokens**-beta, a * size**-alpha
        total = e + data_term + size_term
        return np.log(total), (-beta * data_term * d_tokens / total, -alpha * size_term * d_size / total)

    def to_natural(self, q):
        return {"R_D": np.exp(q[0]), "R_N": np.exp(q[1])}

    def from_natural(self, natural):
        return np.log([natural["R_D"], natural["R_N"]])

    def starts(self, target):
        grid = np.log(np.geomspace(0.2, 2000, 25))
        return np.array([[d, n] for d in grid for n in grid])


def _decayed(unit, repeats, log_scale):
    """unit (1 + R (1 - exp(-repeats / R))) and the derivative of its log by log R."""
    scale = np.exp(log_scale)
    gone = np.exp(-repeats / scale)
    gain = -np.expm1(-repeats / scale)
    worth = 1 + scale * gain
    return unit * worth, (scale * gain - repeats * gone) / worth


def optimal_parameters(unique_tokens, base):
    """Compute-optimal N for `unique_tokens` under L = E + A N^-alpha + B T^-beta with C = 6 N T.

    The minimum on 6 N T = C has alpha A N^-alpha = beta B T^-beta, hence N = (alpha A / (beta B))^(1/alpha)
    T^(beta/alpha).
    """
    ratio = base["alpha"] * base["A"] / (base["beta"] * base["B"])
    return ratio ** (1 / base["alpha"]) * np.asarray(unique_tokens, float) ** (base["beta"] / base["alpha"])
