"""Neighbours of a database: small variants with other rows, on which queries that are nearly right give other results.

One database often cannot tell a right query from a wrong one: if every singer is older than 20, ``WHERE age > 20`` may
be missing. Its neighbours have the same tables, types, keys and links, and other rows. They are chosen for the gold
queries: a few that together separate each gold from its near misses (:mod:`groundwire.tools.neighbours.mutations`).
The idea is that of test-suite accuracy (Zhong et al., EMNLP 2020).
"""

from __future__ import annotations

from groundwire.tools.neighbours.build import Built, Job, build_neighbours
from groundwire.tools.neighbours.cache import NeighboursError, neighbours_of

__all__ = ["Built", "Job", "NeighboursError", "build_neighbours", "neighbours_of"]
