"""The types of failed rollouts, and how each counts: as the least reward, as a number, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groundwire.tools.files import shorten_repr
from groundwire.tools.numbers import MAX_REWARD
from groundwire.train.config.errors import ConfigError

POLICY_FAILURES = ("agent", "malformed_output", "turn_limit", "trace_limit", "prompt_too_long", "unreadable_answer")
"""What the policy caused. By default these score as the worst answer, in training and in validation."""
FAILURE_TYPES = (
    *POLICY_FAILURES,
    *("setup", "tool", "endpoint", "timeout", "reward", "judge_abstained", "refused", "not_stored", "no_result"),
)
"""The others are failures of the infrastructure. By default they are dropped: retried, then left out and counted."""


def failure_changes(value: Any) -> str:
    """The setting ``failures`` as text, ``agent=drop,timeout=-1``; ``value`` may also be a table.

    Raises :class:`ConfigError` for an unknown type or another value than ``zero``, ``drop`` and a number.
    """
    text = ",".join(f"{kind}={score}" for kind, score in value.items()) if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise ConfigError(f"failures is {shorten_repr(value)}; it must be text such as agent=drop,timeout=zero")
    pairs = [(kind.strip(), score.strip()) for kind, _, score in (pair.partition("=") for pair in _pairs(text))]
    for kind, score in pairs:
        if kind not in FAILURE_TYPES:
            types = ", ".join(FAILURE_TYPES)
            raise ConfigError(f"failures has the unknown type {shorten_repr(kind)}; the types are {types}")
        if score not in ("zero", "drop") and not _is_number(score):
            raise ConfigError(
                f"failures has {kind}={shorten_repr(score)}; it must be {kind}=zero, {kind}=drop or a number such as "
                f"{kind}=-1"
            )
    return ",".join(f"{kind}={score}" for kind, score in dict(pairs).items())


def failure_scores(failures: str) -> dict[str, float | None]:
    """The reward of each type that scores, None for the least of the run; ``failures`` is the setting, the changes of
    the defaults.
    """
    scores = dict.fromkeys(POLICY_FAILURES, "zero") | dict(pair.split("=") for pair in _pairs(failures))
    return {kind: None if score == "zero" else float(score) for kind, score in scores.items() if score != "drop"}


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= MAX_REWARD
    except ValueError:
        return False


def _pairs(failures: str) -> list[str]:
    return [pair for pair in failures.split(",") if pair.strip()]
