"""Calls of other APIs than chat completions: what their requests have in common, and replies as a sequence of parts."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar

from groundwire.adapters.tracing.wire.call import Conversation, WireCall
from groundwire.adapters.tracing.wire.chat_request import Part, passed_on, read_content, read_message, refuse_beginning
from groundwire.adapters.tracing.wire.request import refuse_fields, require, warn_ignored


class PartsCall(WireCall):
    """A call whose request becomes a chat request, and whose reply is made of parts. In a stream, texts come in pieces,
    and a tool call when it is complete, because only then is it known whether its arguments are JSON.

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
    stop_reasons: ClassVar[Mapping[str, str]] = {}
    """The API's names of :meth:`_finish_reason`, where they are others."""

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        request = self._prepared(request)
        refuse_fields(request, self.refused)
        for name in self.ignored:
            if request.get(name):
                warn_ignored(self.title, name)
        self.chat = {"messages": self._messages(request), **passed_on(request, self.own), **self._options(request)}
        self._model = request.get("model")
        self._usage: Mapping[str, Any] = {}
        self._last_choice: Mapping[str, Any] = {}
        self._open_call: Part | None = None
        self._call_index, self._has_calls = 0, False

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
        return self._whole([*self._parts(choice["message"], choice), *self._end_call()])

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        self._note(chunk)
        choices = chunk.get("choices") or ()
        parts = [part for choice in choices for part in self._parts(choice.get("delta") or {}, choice)]
        return b"".join(map(self._event, parts))

    def end(self) -> bytes:
        return self._end(list(self._end_call()))

    def _note(self, reply: Mapping[str, Any]) -> None:
        self._model = reply.get("model") or self._model
        self._usage = reply.get("usage") or self._usage

    def _parts(self, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[Part]:
        """The parts that a delta, or a whole message, has or completes."""
        thought, text = delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content")
        if thought or text:
            yield from self._end_call()
        if thought:
            yield Part("thinking", thought)
        if text:
            yield Part("text", text, content=(choice.get("logprobs") or {}).get("content"))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            function, index, made = call.get("function") or {}, call.get("index", position), self._open_call
            if made is None or index != self._call_index or call.get("id") not in (None, "", made.id):
                yield from self._end_call()
                made = Part("call", id=call.get("id") or f"call_{uuid.uuid4().hex}", name=function.get("name") or "")
                self._open_call, self._call_index, self._has_calls = made, index, True
            made.text += function.get("arguments") or ""
        if choice.get("finish_reason"):
            self._last_choice = choice

    def _end_call(self) -> Iterator[Part]:
        if self._open_call is not None:
            yield self._open_call
            self._open_call = None

    def _finish_reason(self) -> str:
        """``stop``, ``stop_sequence``, ``length``, ``tool_calls`` or ``content_filter``."""
        reason = self._last_choice.get("finish_reason")
        if reason in ("length", "content_filter", "tool_calls"):
            return str(reason)
        if self._has_calls:  # a call that was required ends with "stop"
            return "tool_calls"
        return "stop_sequence" if isinstance(self._last_choice.get("stop_reason"), str) else "stop"

    def _stop_reason(self) -> str:
        return self.stop_reasons.get(reason := self._finish_reason(), reason)

    def _token_counts(self) -> tuple[int, int, int]:
        """The numbers of tokens of the prompt, of its part that was in a cache, and of the reply."""
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return self._usage.get("prompt_tokens") or 0, cached, self._usage.get("completion_tokens") or 0

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
