"""What a fit minimises: a function of the residuals of log(loss) (or of loss, `on="loss"`), summed over runs.

Each objective gives, per residual r = prediction - observation (of the log): the value rho(r), its derivative, its
second derivative, and the weight psi(r)/r that makes a quadratic lie above rho (used to damp Newton steps).
All objectives are SUMS: a mean shrinks the numbers until common optimisers stop at their absolute tolerance, which
is how fits of the Chinchilla data have gone wrong (Besiroglu et al., arXiv 2404.10102).
"""

from dataclasses import dataclass

import numpy as np

_SCALE = {"log": "log loss", "loss": "loss"}


@dataclass(frozen=True)
class Huber:
    """r^2 / 2 within delta, delta (|r| - delta / 2) beyond. `delta` is in units of log loss."""

    delta: float = 1e-3
    on: str = "log"
    name: str = "huber"

    def __post_init__(self):
        if not self.delta > 0:
            raise ValueError(
                f"Huber delta is {self.delta}; it must be positive (1e-3 is the usual choice on log loss)"
            )

    def __call__(self, r):
        size = np.abs(r)
        inside = size <= self.delta
        rho = np.where(inside, 0.5 * r * r, self.delta * (size - 0.5 * self.delta))
        psi = np.clip(r, -self.delta, self.delta)
        majorant = self.delta / np.maximum(size, self.delta)
        return rho, psi, inside.astype(float), majorant

    def describe(self):
        return f"Huber on {_SCALE[self.on]}, delta {self.delta:g}"


@dataclass(frozen=True)
class Squares:
    """r^2 / 2: least squares on log loss, the maximum likelihood for Gaussian noise on log loss."""

    on: str = "log"
    name: str = "squares"

    def __call__(self, r):
        one = np.ones_like(r)
        return 0.5 * r * r, r, one, one

    def describe(self):
        return f"least squares on {_SCALE[self.on]}"


@dataclass(frozen=True)
class Asymmetric:
    """w r^2 / 2 with w = 2 (1 - tau) where the curve lies below the run and 2 tau where it lies above.

    tau near 1 makes the curve hug the LOWER envelope of the runs (the best run at each compute): a run above the
    curve may be badly tuned, a run below it disproves the curve. tau = 1/2 is least squares.
    """

    tau: float = 0.9
    on: str = "log"
    name: str = "asymmetric"

    def __post_init__(self):
        if not 0 < self.tau < 1:
            raise ValueError(f"asymmetric tau is {self.tau}; it must lie strictly between 0 and 1")

    def __call__(self, r):
        weight = np.where(r > 0, 2 * self.tau, 2 * (1 - self.tau))
        return 0.5 * weight * r * r, weight * r, weight, weight

    def describe(self):
        return f"asymmetric squares on {_SCALE[self.on]}, tau {self.tau:g} (lower envelope)"


OBJECTIVES = {"huber": Huber, "squares": Squares, "asymmetric": Asymmetric}
