"""The conversations behind ``previous_response_id``: agents send what is new, policies read all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groundwire.adapters.tracing.wire.errors import RefusedError, require_text

__all__ = ["Conversation", "Conversations"]

_MAX_BYTES = 256 << 20
Messages = Sequence[dict[str, Any]]


class Conversations:
    """The chat messages up to each response, for each rollout; the oldest rollouts are dropped beyond ``max_bytes``."""

    def __init__(self, *, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._of: dict[str, dict[str, tuple[Messages, int]]] = {}

    def of(self, rollout_id: str, size: int = 0) -> Conversation:
        """The conversation of a rollout, for a request of ``size`` bytes."""
        return Conversation(self, rollout_id, size)

    def get(self, rollout_id: str, response_id: str) -> Messages:
        """The messages up to a response, which they include. Raises :class:`RefusedError`."""
        found = self._of.get(rollout_id, {}).get(response_id)
        if found is None:
            raise RefusedError(
                400,
                f"previous_response_id {response_id!r:.100} is unknown: the responses of an attempt are kept until it "
                "ends, unless they are requested with store=false",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return found[0]

    def add(self, rollout_id: str, response_id: str, messages: Messages, size: int) -> None:
        """Keep the messages up to a response; ``size`` is that of the request that added the last ones."""
        self._of.setdefault(rollout_id, {})[response_id] = messages, size
        self._bytes += size
        while self._bytes > self._max_bytes and self._of:
            self.forget(next(iter(self._of)))

    def forget(self, rollout_id: str) -> None:
        """Drop the responses of a rollout that has ended."""
        self._bytes -= sum(size for _, size in self._of.pop(rollout_id, {}).values())


class Conversation:
    """The responses of one rollout, as one of its requests sees them."""

    def __init__(self, conversations: Conversations, rollout_id: str, size: int) -> None:
        self._conversations, self._rollout_id, self._size = conversations, rollout_id, size

    def before(self, response_id: str | None) -> Messages:
        """The messages up to ``response_id``; none without an id. Raises :class:`RefusedError` for an unknown one."""
        if response_id is None:
            return ()
        return self._conversations.get(self._rollout_id, require_text(response_id, "previous_response_id"))

    def add(self, response_id: str, messages: Messages) -> None:
        """Keep ``messages``, which end with the response."""
        self._conversations.add(self._rollout_id, response_id, messages, self._size)
