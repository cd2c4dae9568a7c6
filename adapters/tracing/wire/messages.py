"""Anthropic's Messages API: from a request to a chat request, and from a chat completion or its chunks to a message."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, encode_event
from groundwire.adapters.tracing.wire.parts import BlocksCall, Part, assistant_message, refuse_beginning, tool_call
from groundwire.adapters.tracing.wire.request import (
    RefusedError,
    chat_tools,
    passed_on,
    read_content,
    refuse_fields,
    require,
    unserved_kind,
    warn_ignored,
)
from groundwire.tools.secrets import masked_values

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_SERVER_ERROR = 500
_OWN = {
    "messages", "output_config", "output_format", "stop_sequences", "stream", "system", "tool_choice", "tools",
    "context_management", "thinking",
    # Facts for Anthropic's servers that do not change a reply:
    "cache_control", "inference_geo", "metadata", "service_tier",
}  # fmt: skip
"""The fields that are not passed on."""
_IGNORED = ("context_management", "thinking")
_REFUSED = {
    "container": "code runs on Anthropic's servers only",
    "mcp_servers": "offer the servers' tools as tools, which the agent runs itself",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesCall(BlocksCall):
    """A message. A reply's reasoning, text and tool calls become a content block each."""

    path = "messages(?P<count>/count_tokens)?"
    name = "messages"
    fields = ("messages",)

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        super().__init__(request)
        self.chat = {"messages": chat_messages(request), **chat_options(request)}
        self.reply_id = f"msg_{uuid.uuid4().hex}"
        self._has_begun = False

    @classmethod
    def messages(cls, request: Mapping[str, Any]) -> Any:
        """The chat messages of ``system`` and ``messages``."""
        return chat_messages(request)

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of a chunk."""
        start = b""
        if not self._has_begun:
            self._has_begun = True
            counts = {**self._counts(), "input_tokens": len(chunk.get("prompt_token_ids") or ())}
            message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
            start = _event("message_start", message=message)
        return start + super().events(chunk)

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        """The error as Anthropic formats it."""
        default = "api_error" if refused.status >= _SERVER_ERROR else "invalid_request_error"
        return {"type": "error", "error": {"type": _ERRORS.get(refused.status, default), "message": str(refused)}}

    def error_event(self, refused: RefusedError) -> bytes:
        """The event ``error``."""
        return encode_event(masked_values(self.error(refused)), "error")

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        content = [_block(part, part.text, part.input) for part in parts]
        return {**self._head(), "content": content, **self._stop(), "usage": self._counts()}

    def _end(self, parts: Sequence[Part]) -> bytes:
        last = b"".join(map(self._event, parts)) + self._end_block()
        return last + _event("message_delta", delta=self._stop(), usage=self._counts()) + _event("message_stop")

    def _begin_block(self, part: Part) -> bytes:
        return _event("content_block_start", index=self._index, content_block=_block(part, "", {}))

    def _add_to_block(self, part: Part) -> bytes:
        if part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(part.input, ensure_ascii=False)}
        else:
            delta = {"type": f"{part.kind}_delta", part.kind: part.text}
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> bytes:
        return _event("content_block_stop", index=self._index) if self._block_kind else b""

    def _head(self) -> dict[str, Any]:
        return {"id": self.reply_id, "type": "message", "role": "assistant", "model": self._model}

    def _stop(self) -> dict[str, Any]:
        reason = self._finish_reason()
        sequence = self._last_choice["stop_reason"] if reason == "stop_sequence" else None
        return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": sequence}

    def _counts(self) -> dict[str, int]:
        prompt, cached, reply = self._token_counts()
        return {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": reply,
        }


def _block(part: Part, text: str, tool_input: Mapping[str, Any]) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": tool_input}
    return {"type": part.kind, part.kind: text, **({"signature": ""} if part.kind == "thinking" else {})}


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


def chat_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request without its messages. Fields that the Messages API does not have are passed on.

    Raises :class:`RefusedError` for what only Anthropic's servers can do.
    """
    refuse_fields(request, _REFUSED)
    for name in _IGNORED:
        if request.get(name) not in (None, {}, {"type": "disabled"}):
            warn_ignored("Messages", name)
    chat = passed_on(request, _OWN) | chat_tools(request.get("tools"), _tool)
    if stop := request.get("stop_sequences"):
        chat["stop"] = stop
    if (choice := request.get("tool_choice")) is not None:
        chat |= _tool_choice(require(dict, choice, "tool_choice"))
    output = require(dict, request.get("output_config") or {}, "output_config")
    if format_ := output.get("format") or request.get("output_format"):
        schema = require(dict, format_, "output_config.format").get("schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    if effort := output.get("effort"):
        chat["reasoning_effort"] = effort
    return chat


def chat_messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat messages of ``system`` and ``messages``. Each tool result becomes a message of its own."""
    messages: list[dict[str, Any]] = []
    if system := request.get("system"):
        messages.append({"role": "system", "content": read_content(system, "system", _part)})
    for index, message in enumerate(require(list, request.get("messages"), "messages")):
        name = f"messages[{index}]"
        role, content = require(dict, message, name).get("role"), message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_assistant_message(content, f"{name}.content"))
        else:
            messages += _user_messages(role, content, f"{name}.content")
    refuse_beginning(messages, "messages")
    return messages


def _user_messages(role: Any, content: Any, name: str) -> list[dict[str, Any]]:
    messages, rest = [], []
    for index, block in enumerate(require(list, content, name)):
        if require(dict, block, f"{name}[{index}]").get("type") == "tool_result":
            result = read_content(block.get("content") or "", f"{name}[{index}].content", _part)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            rest.append(block)
    return [*messages, {"role": role, "content": read_content(rest, name, _part)}] if rest else messages


def _assistant_message(blocks: Any, name: str) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for index, block in enumerate(require(list, blocks, name)):
        kind = require(dict, block, f"{name}[{index}]").get("type")
        if kind == "text":
            texts.append(require(str, block.get("text"), f"{name}[{index}].text"))
        elif kind == "thinking":
            thoughts.append(require(str, block.get("thinking"), f"{name}[{index}].thinking"))
        elif kind == "tool_use":
            calls.append(tool_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind != "redacted_thinking":
            raise _unknown_block(f"{name}[{index}]", kind)
    return assistant_message(texts, thoughts, calls)


def _part(block: Any, name: str) -> dict[str, Any]:
    kind = require(dict, block, name).get("type")
    if kind == "text":
        return {"type": "text", "text": require(str, block.get("text"), f"{name}.text")}
    if kind == "image":
        source = require(dict, block.get("source"), f"{name}.source")
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise _unknown_block(name, kind)


def _unknown_block(name: str, kind: Any) -> RefusedError:
    return unserved_kind(name, kind, "is not served: send text, images, tool uses and tool results")


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if (kind := tool.get("type") or "custom") != "custom":
        advice = "Anthropic defines; offer tools with an input_schema, which the agent runs itself"
        raise unserved_kind(name, kind, advice, param="tools")
    return {**tool, "parameters": tool.get("input_schema")}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = require(str, choice.get("type"), "tool_choice.type")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **parallel}
    if kind not in _CHOICES:
        raise RefusedError(400, f"tool_choice.type must be auto, any, none or tool, not {kind!r:.60}")
    return {"tool_choice": _CHOICES[kind], **parallel}
