"""Centered accuracy as an `evaluate` metric; the formula is in formula.py, which eval.aggregate uses too."""

import datasets
import evaluate

from .formula import centered_accuracy

_DESCRIPTION = """
Accuracy rescaled so that guessing scores 0 and a perfect model 1: (accuracy - chance) / (1 - chance). Negative below
chance. The mean over 22 tasks is CORE.
"""

_INPUTS = """
Args:
    predictions (list of int): index of the chosen option, or 1 / 0 for correct / wrong against references of 1.
    references (list of int): index of the right option.
    chance (float): accuracy of guessing, a fraction in [0, 1).
Returns:
    accuracy (float) and centered_accuracy (float).
Example:
    >>> metric = evaluate.load("eval/metrics/centered_accuracy")
    >>> metric.compute(predictions=[0, 1, 2, 3], references=[0, 1, 2, 0], chance=0.25)["accuracy"]
    0.75
"""

_CITATION = """
@article{li2024datacomplm, title={DataComp-LM: In search of the next generation of training sets for language models},
author={Li, Jeffrey and others}, journal={arXiv:2406.11794}, year={2024}}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class CenteredAccuracy(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
            ),
        )

    def _compute(self, predictions, references, chance: float = 0.0):
        accuracy = sum(p == r for p, r in zip(predictions, references, strict=True)) / len(references)
        return {"accuracy": accuracy, "centered_accuracy": centered_accuracy(accuracy, chance)}
