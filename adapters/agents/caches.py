"""Caches of replies, which frameworks keep: switched off in rollouts.

A reply of earlier weights, or of another rollout, would be an action that the policy did not take.
"""

from __future__ import annotations

from collections.abc import Callable

from groundwire.adapters.agents.changes import skip

_LOOKUPS = (
    ("dspy.clients.cache", "Cache.get"),
    ("litellm.caching.caching", "Cache.get_cache"),
    ("litellm.caching.caching", "Cache.async_get_cache"),
    ("langchain_core.caches", "InMemoryCache.lookup"),
    ("langchain_community.cache", "SQLAlchemyCache.lookup"),
)
"""Module and method that looks for a reply, and returns None if there is none."""


def switch_off_caches(in_attempt: Callable[[], object]) -> None:
    """From now on, no cache has a reply where ``in_attempt`` is true."""
    skip(_LOOKUPS, lambda _: in_attempt())
