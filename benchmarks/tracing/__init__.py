"""Benchmarks of the proxy and of reading spans."""
