"""Benchmarks and checks on GPUs: ``python -m dev.gpu --help``."""
