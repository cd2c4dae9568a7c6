"""The types of failed rollouts, and how each counts: as a reward of 0, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groundwire.tools.files import shorten_repr
from groundwire.train.config.errors import ConfigError

__all__ = ["FAILURE_TYPES", "POLICY_FAILURES", "failure_changes", "zero_failures"]

POLICY_FAILURES = ("agent", "malformed_output", "turn_limit", "prompt_too_long")
"""What the policy caused. By default these score 0 in training and in validation."""
FAILURE_TYPES = (
    *POLICY_FAILURES,
    *("tool", "endpoint", "timeout", "reward", "judge_abstained", "refused", "not_stored", "no_result"),
)
"""The others are failures of the infrastructure. By default they are dropped: retried, then left out and counted."""
_SCORES = ("zero", "drop")


def failure_changes(value: Any) -> str:
    """The setting ``failures`` as text, ``agent=drop,timeout=zero``; ``value`` may also be a table.

    Raises :class:`ConfigError` for an unknown type or another value than ``zero`` and ``drop``.
    """
    if isinstance(value, Mapping):
        pairs = [(str(kind), str(score)) for kind, score in value.items()]
    elif isinstance(value, str):
        pairs = [(kind.strip(), score.strip()) for kind, _, score in (pair.partition("=") for pair in _parts(value))]
    else:
        raise ConfigError(f"failures is {shorten_repr(value)}; it must be text such as agent=drop,timeout=zero")
    for kind, score in pairs:
        if kind not in FAILURE_TYPES:
            types = ", ".join(FAILURE_TYPES)
            raise ConfigError(f"failures has the unknown type {shorten_repr(kind)}; the types are {types}")
        if score not in _SCORES:
            raise ConfigError(f"failures has {kind}={shorten_repr(score)}; it must be {kind}=zero or {kind}=drop")
    return ",".join(f"{kind}={score}" for kind, score in dict(pairs).items())


def zero_failures(failures: str) -> frozenset[str]:
    """The types that score 0; ``failures`` is the setting, the changes of the defaults."""
    scores = dict.fromkeys(POLICY_FAILURES, "zero") | dict(pair.split("=") for pair in _parts(failures))
    return frozenset(kind for kind, score in scores.items() if score == "zero")


def _parts(failures: str) -> list[str]:
    return [part for part in failures.split(",") if part.strip()]
