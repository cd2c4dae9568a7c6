"""Anthropic's Messages API: from a chat completion, whole or in chunks, to a message."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, WireCall, encode_event
from groundwire.adapters.tracing.wire.messages_input import MALFORMED, chat_messages, chat_options
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.tools.secrets import masked_values

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_SERVER_ERROR = 500


class MessagesCall(WireCall):
    """A message. A reply's reasoning, text and tool calls become a content block each."""

    api = "messages"
    name = "messages"

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        self.chat = {"messages": chat_messages(request), **chat_options(request)}
        self.reply_id, self._model = f"msg_{uuid.uuid4().hex}", request.get("model")
        self._blocks: list[dict[str, Any]] = []
        self._is_open = self._has_begun = False
        self._choice: Mapping[str, Any] = {}
        self._usage: Mapping[str, Any] = {}

    def reply(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole message."""
        self._note(completion)
        choice = completion["choices"][0]
        self._add(choice["message"], choice)
        self._close()
        return {**self._head(), "content": self._blocks, **self._stop(), "usage": self._counts()}

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of a chunk."""
        self._note(chunk)
        events = b""
        if not self._has_begun:
            self._has_begun = True
            counts = {**self._counts(), "input_tokens": len(chunk.get("prompt_token_ids") or ())}
            message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
            events = _event("message_start", message=message)
        for choice in chunk.get("choices") or ():
            events += self._add(choice.get("delta") or {}, choice)
        return events

    def end(self) -> bytes:
        """The end of the last block and of the message."""
        ends = self._close()
        return ends + _event("message_delta", delta=self._stop(), usage=self._counts()) + _event("message_stop")

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        """The error as Anthropic formats it."""
        default = "api_error" if refused.status >= _SERVER_ERROR else "invalid_request_error"
        return {"type": "error", "error": {"type": _ERRORS.get(refused.status, default), "message": str(refused)}}

    def error_event(self, refused: RefusedError) -> bytes:
        """The event ``error``."""
        return encode_event(masked_values(self.error(refused)), "error")

    def _note(self, reply: Mapping[str, Any]) -> None:
        self._model = reply.get("model") or self._model
        self._usage = reply.get("usage") or self._usage

    def _add(self, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> bytes:
        """Add a delta, or a whole message, to the blocks; returns its events."""
        events = b""
        if text := delta.get("reasoning") or delta.get("reasoning_content"):
            events += self._add_text("thinking", text, {"signature": ""})
        if text := delta.get("content"):
            events += self._add_text("text", text, {})
        for part in delta.get("tool_calls") or ():
            events += self._add_tool_call(part)
        if choice.get("finish_reason"):
            self._choice = choice
        return events

    def _add_text(self, kind: str, text: str, fields: dict[str, Any]) -> bytes:
        events = b""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            events = self._open({"type": kind, kind: "", **fields})
        self._blocks[-1][kind] += text
        return events + self._delta(f"{kind}_delta", kind, text)

    def _add_tool_call(self, part: Mapping[str, Any]) -> bytes:
        function, events = part.get("function") or {}, b""
        block = self._blocks[-1] if self._is_open else {}
        if block.get("type") != "tool_use" or part.get("id") not in (None, "", block["id"]):
            call_id = part.get("id") or f"toolu_{uuid.uuid4().hex}"
            events = self._open({"type": "tool_use", "id": call_id, "name": function.get("name") or "", "input": {}})
            self._arguments = ""
        self._arguments += function.get("arguments") or ""
        return events

    def _open(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._blocks.append(block)
        self._is_open = True
        return events + _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> bytes:
        """End the open block. A tool's input is sent whole: only then is it known to be JSON."""
        if not self._is_open:
            return b""
        self._is_open, block, events = False, self._blocks[-1], b""
        if block["type"] == "tool_use":
            block["input"] = _tool_input(self._arguments)
            events = self._delta("input_json_delta", "partial_json", json.dumps(block["input"], ensure_ascii=False))
        return events + _event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: text})

    def _head(self) -> dict[str, Any]:
        return {"id": self.reply_id, "type": "message", "role": "assistant", "model": self._model}

    def _stop(self) -> dict[str, Any]:
        reason, stop = self._choice.get("finish_reason") or "stop", self._choice.get("stop_reason")
        if reason in _STOP_REASONS:
            return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}
        if any(block["type"] == "tool_use" for block in self._blocks):  # a call that was required ends with "stop"
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _counts(self) -> dict[str, int]:
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {
            "input_tokens": (self._usage.get("prompt_tokens") or 0) - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._usage.get("completion_tokens") or 0,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


def _tool_input(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {MALFORMED: arguments}
