"""What each wire API implements: the translation of one call to a chat completion and back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from groundwire.adapters.tracing.wire.conversations import Conversation
from groundwire.adapters.tracing.wire.errors import RefusedError
from groundwire.tools.secrets import masked_values

__all__ = ["ChatCall", "WireCall", "encode_event"]


class WireCall(ABC):
    """One call. Its attribute ``chat`` is the request to the policy.

    A whole reply goes through :meth:`reply`. The chunks of a stream go through :meth:`events`, and after the last one
    comes :meth:`end`.

    Raises:
        RefusedError: from the constructor, for a request that cannot be translated.
    """

    api: ClassVar[str]
    """The end of the API's path."""
    name: ClassVar[str]
    """The API's name in spans."""
    chat: dict[str, Any]
    reply_id: str = ""
    """The id of the reply that the agent gets; "" if it is that of the chat completion."""

    @abstractmethod
    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None: ...

    @abstractmethod
    def reply(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """The reply that the agent gets for a whole chat completion."""

    @abstractmethod
    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The server-sent events for one chat chunk; may be empty."""

    @abstractmethod
    def end(self) -> bytes:
        """The events after the last chunk."""

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        """The body of an error reply: here as OpenAI's APIs format it."""
        return refused.body()

    def error_event(self, refused: RefusedError) -> bytes:
        """The event that reports an error within a stream."""
        return encode_event(masked_values(self.error(refused)), "error")


class ChatCall(WireCall):
    """A chat completion: nothing is translated."""

    api = "chat/completions"
    name = "chat"

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        self.chat = request

    def reply(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """The completion."""
        return completion

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The chunk as an event."""
        return encode_event(chunk)

    def end(self) -> bytes:
        """OpenAI's mark for the end."""
        return b"data: [DONE]\n\n"

    def error_event(self, refused: RefusedError) -> bytes:
        """An event without a name, as of vLLM."""
        return encode_event(masked_values(self.error(refused)))


def encode_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
