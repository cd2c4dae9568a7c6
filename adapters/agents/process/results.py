"""Answers and failures of a rollout as JSON, which a child tells the runner: never a pickle that an agent made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.adapters._types import Answer, BackendError, EndpointError

MAX_RESULT = 16 << 20
"""Bytes of a result."""


def _kinds(kind: type[BackendError] = BackendError) -> Iterator[type[BackendError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


def failure_to(error: BackendError) -> dict[str, Any]:
    """A failure as JSON."""
    return {
        "kind": error.kind,
        "message": str(error),
        "steps": list(error.steps),
        "input": error.input,
        "resources": list(error.resources),
        "status": getattr(error, "status", None),
    }


def failure_from(message: Mapping[str, Any], output: str) -> BackendError:
    """The failure that :func:`failure_to` wrote, with what the agent printed last."""
    kind = next((kind for kind in _kinds() if kind.kind == message["kind"]), BackendError)
    text = f"{message['message']}{output}"
    error = kind(text, status=message["status"]) if issubclass(kind, EndpointError) else kind(text)
    error.steps, error.input, error.resources = message["steps"], message["input"], message["resources"]
    return error


def answer_to(answer: Answer) -> dict[str, Any]:
    """An answer as JSON."""
    return dict(vars(answer))


def answer_from(message: Mapping[str, Any]) -> Answer:
    """The answer that :func:`answer_to` wrote."""
    return Answer(**message)
