"""Replies as a sequence of parts, for APIs in which a tool call's arguments are an object: they are sent when they are
complete, because only then is it known whether they are JSON.
"""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing.wire.call import WireCall
from groundwire.adapters.tracing.wire.request import RefusedError

_MALFORMED = "malformed_arguments"
"""The one entry of a tool's input if the model wrote no JSON object: what it wrote."""


@dataclass(slots=True)
class Part:
    """A whole tool call, or a text or a thought, of which a stream has several pieces."""

    kind: str
    """``text``, ``thinking`` or ``call``."""
    text: str = ""
    """Of a call: the arguments, as the policy wrote them."""
    id: str = ""
    name: str = ""

    @property
    def input(self) -> dict[str, Any]:
        """The arguments of a call."""
        try:
            value = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {_MALFORMED: self.text}


class PartsCall(WireCall):
    """A call whose reply is made of parts. An API implements the methods at the end of this class."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._model = request.get("model")
        self._usage: Mapping[str, Any] = {}
        self._last_choice: Mapping[str, Any] = {}
        self._open_call: Part | None = None
        self._has_calls = False

    def reply(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole reply."""
        self._note(completion)
        choice = completion["choices"][0]
        return self._whole([*self._parts(choice["message"], choice), *self._end_call()])

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of a chunk."""
        self._note(chunk)
        parts = [
            part for choice in chunk.get("choices") or () for part in self._parts(choice.get("delta") or {}, choice)
        ]
        return b"".join(map(self._event, parts))

    def end(self) -> bytes:
        """The last tool call and the end of the reply."""
        return self._end(list(self._end_call()))

    def _note(self, reply: Mapping[str, Any]) -> None:
        self._model = reply.get("model") or self._model
        self._usage = reply.get("usage") or self._usage

    def _parts(self, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[Part]:
        """The parts that a delta, or a whole message, has or completes."""
        for kind, text in (
            ("thinking", delta.get("reasoning") or delta.get("reasoning_content")),
            ("text", delta.get("content")),
        ):
            if text:
                yield from self._end_call()
                yield Part(kind, text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if self._open_call is None or call.get("id") not in (None, "", self._open_call.id):
                yield from self._end_call()
                call_id = call.get("id") or f"call_{uuid.uuid4().hex}"
                self._open_call = Part("call", id=call_id, name=function.get("name") or "")
                self._has_calls = True
            self._open_call.text += function.get("arguments") or ""
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
    """A stream of numbered blocks: an event begins a block, others add to it, another ends it."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__(request)
        self._index, self._block_kind = -1, ""

    def _event(self, part: Part) -> bytes:
        events = b""
        if part.kind == "call" or part.kind != self._block_kind:
            events = self._end_block()
            self._index, self._block_kind = self._index + 1, part.kind
            events += self._begin_block(part)
        return events + self._add_to_block(part)

    @abstractmethod
    def _begin_block(self, part: Part) -> bytes: ...

    @abstractmethod
    def _add_to_block(self, part: Part) -> bytes: ...

    @abstractmethod
    def _end_block(self) -> bytes:
        """The end of the last block, if there is one."""


def tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """The tool call of a chat message, from its arguments as an object."""
    if isinstance(arguments, dict) and arguments.keys() == {_MALFORMED}:
        text = str(arguments[_MALFORMED])
    else:
        text = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def assistant_message(texts: Sequence[str], thoughts: Sequence[str], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The chat message of a reply that a request repeats."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thought := "".join(thoughts):  # servers read one of the two names
        message |= {"reasoning": thought, "reasoning_content": thought}
    return {**message, "tool_calls": list(calls)} if calls else message


def refuse_beginning(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raise :class:`RefusedError` if the last message is the beginning of the reply."""
    if messages and messages[-1]["role"] == "assistant":
        raise RefusedError(
            400, "the last message is the assistant's: a reply whose beginning is given is not served", param=name
        )


class CallIds:
    """The ids of tool calls where they are optional: a result without one is that of its function's first open call."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []
        self._count = 0

    def of_call(self, call_id: Any, name: Any) -> Any:
        """The id of the next call."""
        call_id = call_id or f"call_{self._count}"
        self._count += 1
        self._open.append((call_id, name))
        return call_id

    def of_result(self, call_id: Any, name: Any) -> Any:
        """The id of the call that has this result."""
        for call in self._open:
            if call[0] == call_id if call_id else name in (None, "", call[1]):
                self._open.remove(call)
                return call[0]
        return call_id or f"call_{self._count}"
