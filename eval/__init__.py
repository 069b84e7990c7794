"""Evaluation, run from a checkout: `python -m eval.core`, `eval.bpb`, `eval.loops`, `eval.bundle`."""
