"""Calls of other APIs than chat completions: what their requests have in common, and replies as a sequence of parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar

from groundwire.adapters.tracing.wire.call import Conversation, WireCall
from groundwire.adapters.tracing.wire.chat_request import (
    Part,
    call_part,
    passed_on,
    read_content,
    read_message,
    refuse_beginning,
)
from groundwire.adapters.tracing.wire.exchange import FAILED, UNFINISHED, CallDeltas
from groundwire.adapters.tracing.wire.request import RefusedError, refuse_fields, require, warn_ignored, warn_unread


class PartsCall(WireCall):
    """A call whose request becomes a chat request, and whose reply is made of parts. In a stream, texts come in pieces,
    and tool calls at the end, as in a whole reply: only then is it known whether their arguments are JSON.

    An API implements the abstract methods.
    """

    title: ClassVar[str]
    """The API's name in messages."""
    own: ClassVar[Set[str]]
    """The fields that are not passed on."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Fields that only the provider's servers can honour, and what to do instead."""
    ignored: ClassVar[Sequence[str]] = ()
    """Fields that have no effect on the policy, which is said once."""
    context: ClassVar[Sequence[str]] = ()
    """Fields that give a prompt without messages."""
    stop_reasons: ClassVar[Mapping[str, str]] = {}
    """The API's names of :meth:`_finish_reason`, where they are others."""

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        request = self._prepared(request)
        refuse_fields(request, self.refused)
        for name in self.ignored:
            if request.get(name):
                warn_ignored(self.title, name)
        messages = self._messages(request)
        if not messages and not any(map(request.get, self.context)):
            raise RefusedError(400, f"{self.fields[0]} must not be empty", param=self.fields[0])
        self.chat = {"messages": messages, **passed_on(request, self.own), **self._options(request)}
        self._model = request.get("model")
        self._usage: Mapping[str, Any] = {}
        self._last_choice: Mapping[str, Any] = {}
        self._deltas = CallDeltas()

    @classmethod
    def messages(cls, request: Mapping[str, Any]) -> Any:
        return cls._messages(cls._prepared(request))

    @classmethod
    def _prepared(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request with what it has in other places, or by other names, as fields of a chat request."""
        return dict(request)

    @classmethod
    @abstractmethod
    def _messages(cls, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chat messages of a prepared request. Raises :class:`RefusedError`."""

    @classmethod
    @abstractmethod
    def _options(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the chat request for those of ``own``. Raises :class:`RefusedError`."""

    def reply(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        self._note(completion)
        choice = completion["choices"][0]
        self._deltas.calls = list(choice["message"].get("tool_calls") or ())
        return self._whole([*self._parts(choice["message"], choice), *self._call_parts()])

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        self._note(chunk)
        events = b""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            events += b"".join(map(self._event, self._parts(delta, choice)))
            for call_delta in delta.get("tool_calls") or ():
                self._deltas.add(call_delta)
        return events

    def end(self) -> bytes:
        return self._end(self._call_parts())

    def _note(self, reply: Mapping[str, Any]) -> None:
        self._model = reply.get("model") or self._model
        self._usage = reply.get("usage") or self._usage

    def _parts(self, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[Part]:
        """The reasoning and the text of a delta, or of a whole message."""
        if choice.get("finish_reason") == FAILED:
            raise RefusedError(502, UNFINISHED)
        if choice.get("finish_reason"):
            self._last_choice = choice
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            yield Part("thinking", thought)
        if text := delta.get("content"):
            yield Part("text", text, content=(choice.get("logprobs") or {}).get("content"))

    def _call_parts(self) -> list[Part]:
        functions = [(call.get("id"), call.get("function") or {}) for call in self._deltas.calls]
        return [
            call_part(
                call_id or f"call_{self.exchange.new_id(place)}",
                function.get("name") or "",
                function.get("arguments") or "",
            )
            for place, (call_id, function) in enumerate(functions)
        ]

    def _finish_reason(self) -> str:
        """``stop``, ``stop_sequence``, ``length``, ``tool_calls`` or ``content_filter``."""
        reason = self._last_choice.get("finish_reason")
        if reason in ("length", "content_filter", "tool_calls"):
            return str(reason)
        if self._deltas.calls:  # a call that was required ends with "stop"
            return "tool_calls"
        return "stop_sequence" if isinstance(self._last_choice.get("stop_reason"), str) else "stop"

    def _stop_reason(self) -> str:
        return self.stop_reasons.get(reason := self._finish_reason(), reason)

    def _token_counts(self) -> tuple[int, int, int]:
        """The numbers of tokens of the prompt, of its part that was in a cache, and of the reply."""
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return self._usage.get("prompt_tokens") or 0, cached, self._usage.get("completion_tokens") or 0

    def _nanoseconds(self) -> int:
        """How long the reply took."""
        origin = self.exchange.origin
        return max(0, int(1e9 * (origin.ended - origin.started)))

    @abstractmethod
    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        """The reply of ``parts``."""

    @abstractmethod
    def _event(self, part: Part) -> bytes:
        """The events of a part."""

    @abstractmethod
    def _end(self, parts: Sequence[Part]) -> bytes:
        """The events of the last parts, and those after them."""


class BlocksCall(PartsCall):
    """A call of an API whose messages have blocks. In a stream an event begins a block, others add to it, another ends
    it.
    """

    _has_begun = False
    _index, _block_kind = -1, ""

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        self._note(chunk)
        head = b"" if self._has_begun else self._head_event(chunk)
        self._has_begun = True
        return head + super().events(chunk)

    def _event(self, part: Part) -> bytes:
        events = b""
        if part.kind == "call" or part.kind != self._block_kind:
            events = self._end_block()
            self._index, self._block_kind = self._index + 1, part.kind
            events += self._begin_block(part)
        return events + self._add_to_block(part)

    def _end(self, parts: Sequence[Part]) -> bytes:
        return b"".join(map(self._event, parts)) + self._end_block() + self._last_events()

    @classmethod
    def _messages(cls, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        system = read_content(request.get("system") or [], "system", cls._part)
        messages = [] if system == [] else [{"role": "system", "content": system}]
        for index, message in enumerate(require(list, request.get("messages"), "messages")):
            name = f"messages[{index}]"
            role = require(dict, message, name).get("role")
            warn_unread(cls.title, "message", message)
            messages += read_message(role, message.get("content"), f"{name}.content", cls._part)
        refuse_beginning(messages, "messages")
        return messages

    @classmethod
    @abstractmethod
    def _part(cls, block: dict[str, Any], name: str) -> Part | None:
        """The part that a block of a request is, which has this name; None for what is no content.

        Raises :class:`RefusedError`.
        """

    @abstractmethod
    def _head_event(self, chunk: Mapping[str, Any]) -> bytes:
        """The first event, before those of the first ``chunk``."""

    @abstractmethod
    def _begin_block(self, part: Part) -> bytes: ...

    @abstractmethod
    def _add_to_block(self, part: Part) -> bytes: ...

    @abstractmethod
    def _end_block(self) -> bytes:
        """The end of the last block, if there is one."""

    @abstractmethod
    def _last_events(self) -> bytes:
        """The events after the last block."""
