"""Anthropic's Messages API: from a request to a chat request, and from a chat completion or its chunks to a message."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, WireCall, encode_event
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
_MALFORMED = "malformed_arguments"
"""The one entry of a tool's input if the model wrote no JSON object: what it wrote."""
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


class MessagesCall(WireCall):
    """A message. A reply's reasoning, text and tool calls become a content block each."""

    api = "messages"
    name = "messages"

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        self.chat = {"messages": chat_messages(request), **chat_options(request)}
        self.reply_id, self._model = f"msg_{uuid.uuid4().hex}", request.get("model")
        self._blocks: list[dict[str, Any]] = []
        self._has_begun = False
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
        for call in delta.get("tool_calls") or ():
            events += self._add_tool_call(call)
        if choice.get("finish_reason"):
            self._choice = choice
        return events

    def _add_text(self, kind: str, text: str, fields: dict[str, Any]) -> bytes:
        events = b""
        if not self._blocks or self._blocks[-1]["type"] != kind:
            events = self._open({"type": kind, kind: "", **fields})
        self._blocks[-1][kind] += text
        return events + self._delta(f"{kind}_delta", kind, text)

    def _add_tool_call(self, call: Mapping[str, Any]) -> bytes:
        function, events = call.get("function") or {}, b""
        block = self._blocks[-1] if self._blocks else {}
        if block.get("type") != "tool_use" or call.get("id") not in (None, "", block["id"]):
            call_id = call.get("id") or f"toolu_{uuid.uuid4().hex}"
            events = self._open({"type": "tool_use", "id": call_id, "name": function.get("name") or "", "input": {}})
            self._arguments = ""
        self._arguments += function.get("arguments") or ""
        return events

    def _open(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._blocks.append(block)
        return events + _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> bytes:
        """End the last block. A tool's input is sent whole: only then is it known to be JSON."""
        if not self._blocks:
            return b""
        block, events = self._blocks[-1], b""
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
    return value if isinstance(value, dict) else {_MALFORMED: arguments}


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
    if messages and messages[-1]["role"] == "assistant":
        raise RefusedError(
            400, "the last message is the assistant's: a reply whose beginning is given is not served", param="messages"
        )
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
            function = {"name": block.get("name"), "arguments": _arguments(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unknown_block(f"{name}[{index}]", kind)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thought := "".join(thoughts):  # servers read one of the two names
        message |= {"reasoning": thought, "reasoning_content": thought}
    return {**message, "tool_calls": calls} if calls else message


def _arguments(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {_MALFORMED}:
        return str(value[_MALFORMED])
    return json.dumps({} if value is None else value, ensure_ascii=False)


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
