"""Benchmarks and checks on GPUs: ``python -m benchmarks.gpu --help``."""
