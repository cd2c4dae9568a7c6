"""Variants of a database: small ones with other rows, on which queries that are nearly right give other results.

One database often cannot tell a right query from a wrong one: if every singer is older than 20, ``WHERE age > 20`` may
be missing. Its variants have the same tables, types, keys and links, and other rows. They are chosen for the gold
queries: a few that together separate each gold from its near misses (:mod:`groundwire.tools.variants.mutations`).
The idea is that of test-suite accuracy (Zhong et al., EMNLP 2020).
"""

from __future__ import annotations

from groundwire.tools.variants.cache import NoVariantsError, variants_of

__all__ = ["NoVariantsError", "variants_of"]
