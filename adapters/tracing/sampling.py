"""The sampling parameters of a rollout belong to the trainer, which computes log-probabilities with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.open_attempts import OpenAttempt

__all__ = ["SamplingRule"]

_log = logging.getLogger(__name__)
_LIMITS = ("max_tokens", "max_completion_tokens")
_SEED_STEP = 0x9E3779B1
"""Between the seeds of equal requests; it leads to no seed of another rollout."""


class SamplingRule:
    """Replaces the sampling parameters of agents by the trainer's, and warns at the first one that differs."""

    def __init__(self) -> None:
        self._has_warned = False

    def apply(self, chat: Mapping[str, Any], attempt: OpenAttempt) -> dict[str, Any]:
        """The chat request with the sampling parameters of its rollout.

        ``max_tokens`` is the smaller of the two. ``top_p`` is 1 if the trainer names only a temperature. Parameters
        that the trainer does not name stay as they are.
        """
        sampling = attempt.sampling
        ours = {name: sampling[name] for name in ("temperature", "top_p") if sampling.get(name) is not None}
        if "temperature" in ours:
            ours.setdefault("top_p", 1.0)
        if not self._has_warned:
            self._warn({name: chat[name] for name in ours if chat.get(name) not in (None, ours[name])}, ours)
        limit, seed = sampling.get("max_tokens"), sampling.get("seed")
        if isinstance(limit, int):
            given = [name for name in _LIMITS if chat.get(name) is not None] or _LIMITS[:1]
            ours |= {name: limit for name in given if _is_above(chat.get(name), limit)}
        if isinstance(seed, int) and chat.get("seed") != seed:
            # An agent that asks several times wants several samples.
            ours["seed"] = seed + _SEED_STEP * attempt.count_request(to_json(chat.get("messages")))
        return {**chat, **ours}

    def _warn(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        if theirs:
            self._has_warned = True
            _log.warning(
                "an agent asks for %s; the run samples with %s, which training needs, whatever agents ask for. With "
                "fixed_sampling=false agents choose themselves",
                ", ".join(f"{name}={value!r:.40}" for name, value in theirs.items()),
                ", ".join(f"{name}={ours[name]!r:.40}" for name in theirs),
            )


def _is_above(value: Any, limit: int) -> bool:
    """Whether a limit is missing or larger. Other values are left to the policy, which refuses them."""
    return value is None or (isinstance(value, int) and value > limit)
