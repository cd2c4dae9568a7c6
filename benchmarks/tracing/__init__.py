"""Benchmarks of the proxy and of spans."""
