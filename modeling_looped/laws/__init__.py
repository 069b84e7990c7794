"""Scaling laws on any table of (compute, loss): fits, intervals, compute multipliers, allocation, planning.

Needs numpy and scipy, and matplotlib for plots only; imports nothing else of this project. Command: `looped laws`.
"""

from modeling_looped.laws.fitting import Fit, FitRefused, certify, fit_law
from modeling_looped.laws.forms import LAWS, Law
from modeling_looped.laws.objectives import OBJECTIVES, Asymmetric, Huber, Squares
from modeling_looped.laws.tables import RunTable, read_table

__all__ = [
    "LAWS",
    "OBJECTIVES",
    "Asymmetric",
    "Fit",
    "FitRefused",
    "Huber",
    "Law",
    "RunTable",
    "Squares",
    "certify",
    "fit_law",
    "read_table",
]
