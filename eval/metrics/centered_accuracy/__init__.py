"""Centered accuracy: `evaluate.load("eval/metrics/centered_accuracy")`."""
