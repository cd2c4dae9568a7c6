"""What each wire API implements: the translation of one call to a chat completion, and of the reply back.

``previous_response_id`` needs the conversations: agents send what is new, while policies read all of it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from groundwire.adapters.tracing.wire.exchange import HttpExchange
from groundwire.adapters.tracing.wire.request import RefusedError, require
from groundwire.tools.secrets import masked_values

_MAX_BYTES = 256 << 20
Messages = Sequence[dict[str, Any]]


class Conversations:
    """What is kept of the calls of each rollout: for an API's own ids of responses, the chat messages up to each one.

    Beyond ``max_bytes`` those rollouts are dropped that have called least recently.
    """

    def __init__(self, *, max_bytes: int = _MAX_BYTES) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self.kept = OrderedDict[str, dict[Any, tuple[Any, int]]]()

    def of(self, rollout_id: str, size: int = 0) -> Conversation:
        """The conversation of a rollout, for a request of ``size`` bytes."""
        return Conversation(self, rollout_id, size)

    def forget(self, rollout_id: str) -> None:
        """Drop the responses of a rollout that has ended."""
        self.bytes -= sum(size for _, size in self.kept.pop(rollout_id, {}).values())


class Conversation:
    """The responses of one rollout, as one of its requests sees them."""

    def __init__(self, conversations: Conversations, rollout_id: str, size: int) -> None:
        self._all, self._rollout_id, self._size = conversations, rollout_id, size

    def before(self, response_id: str | None) -> Messages:
        """The messages up to a response, which they include; none without an id. Raises :class:`RefusedError`."""
        if response_id is None:
            return ()
        responses = self._all.kept.get(self._rollout_id, {})
        if require(str, response_id, "previous_response_id") not in responses:
            raise RefusedError(
                400,
                f"previous_response_id {response_id!r:.100} is unknown: the responses of an attempt are kept until it "
                "ends, unless they are requested with store=false",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        messages: Messages = responses[response_id][0]
        return messages

    def add(self, key: Any, value: Any) -> None:
        """Keep ``value``: for a response's id the messages that end with it, of which the request added the last."""
        kept = self._all.kept.setdefault(self._rollout_id, {})
        self._all.kept.move_to_end(self._rollout_id)
        self._all.bytes += self._size - kept.get(key, (None, 0))[1]
        kept[key] = value, self._size
        while self._all.bytes > self._all.max_bytes and self._all.kept:
            self._all.forget(next(iter(self._all.kept)))


class WireCall:
    """One call. Its attribute ``chat`` is the request to the policy. The defaults are those of a chat completion, of
    which nothing is translated.

    A whole reply goes through :meth:`reply`. The chunks of a stream go through :meth:`events`, and after the last one
    comes :meth:`end`.

    Raises:
        RefusedError: from the constructor, for a request that cannot be translated.
    """

    path: ClassVar[str]
    """A regular expression for the end of the API's path. Its groups are the ``model``, and ``stream`` and ``count``
    where the path asks for a stream or only for the length of the prompt.
    """
    name: ClassVar[str]
    """The API's name in spans."""
    fields: ClassVar[tuple[str, ...]]
    """Every request has one of these fields."""
    count_field: ClassVar[str] = "input_tokens"
    """The field of a reply with the length of a prompt."""
    stream_type: str = "text/event-stream"
    """The content type of a stream."""
    exchange: HttpExchange
    """The request and its reply in the record; whoever answers the call sets it."""
    id_prefix: ClassVar[str | None] = None
    """What the id of a reply begins with; None if it is that of the chat completion."""
    errors: ClassVar[Mapping[int, str]] = {}
    """The names of errors by their status; others are named as 400 or as 500."""

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        self.chat = request

    @property
    def reply_id(self) -> str:
        """The id of the reply that the agent gets; "" if it is that of the chat completion."""
        return "" if self.id_prefix is None else f"{self.id_prefix}{self.exchange.origin.reply_key}"

    @classmethod
    def messages(cls, request: Mapping[str, Any]) -> Any:
        """The chat messages of a request, as far as it has them. Raises :class:`RefusedError`."""
        return request.get("messages")

    def reply(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """The reply that the agent gets for a whole chat completion."""
        return completion

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The events for one chat chunk; may be empty."""
        return encode_event(chunk)

    def end(self) -> bytes:
        """The events after the last chunk: here OpenAI's mark."""
        return b"data: [DONE]\n\n"

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        """The body of an error reply: here as OpenAI's APIs format it."""
        return refused.body()

    @classmethod
    def error_name(cls, status: int) -> str:
        """The name of an error with this status."""
        return cls.errors.get(status) or cls.errors[400 if status < 500 else 500]

    def error_event(self, refused: RefusedError) -> bytes:
        """The event that reports an error within a stream: here without a name, as of vLLM."""
        return encode_event(masked_values(self.error(refused)))


class ChatCall(WireCall):
    """A chat completion."""

    path = "chat/completions"
    name = "chat"
    fields = ("messages",)


def encode_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
