"""Metric modules for Hugging Face `evaluate`, loadable by path without network."""
