"""Benchmarks: ``python -m benchmarks`` runs those of the CPU, ``python -m benchmarks.gpu`` those of a GPU."""
