"""Centered accuracy, the formula that CORE averages (DCLM, arXiv:2406.11794, section 3.5)."""


def centered_accuracy(accuracy: float, chance: float) -> float:
    """(accuracy - chance) / (1 - chance): 0 for guessing, 1 for all correct, negative below guessing; not clipped.

    Both are fractions. Raises ValueError unless 0 <= chance < 1.
    """
    if not 0 <= chance < 1:
        raise ValueError(f"`chance` must be a fraction in [0, 1), got {chance}. Divide percentages by 100.")
    return (accuracy - chance) / (1.0 - chance)
