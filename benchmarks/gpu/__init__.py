"""Benchmarks on a GPU."""
