"""Anthropic's Messages API: from a request to a chat request, and from a chat completion or its chunks to a message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.wire.call import encode_event
from groundwire.adapters.tracing.wire.chat_request import (
    Part,
    call_part,
    chat_tools,
    chosen_tool,
    read_content,
    renamed,
    structured,
)
from groundwire.adapters.tracing.wire.parts import BlocksCall
from groundwire.adapters.tracing.wire.request import (
    RefusedError,
    optional,
    require,
    unserved_kind,
    warn_ignored,
    warn_unread,
)
from groundwire.tools.secrets import masked_values

_SIGNATURE = "unsigned"  # of thoughts, which clients do not send back without one


class MessagesCall(BlocksCall):
    """A message. A reply's reasoning, text and tool calls become a content block each."""

    path = "messages(?P<count>/count_tokens)?"
    name = "messages"
    title = "Messages"
    id_prefix = "msg_"
    fields = ("messages",)
    own = frozenset({
        "messages", "output_config", "output_format", "stop_sequences", "stream", "system", "tool_choice", "tools",
        "context_management", "thinking",
        # Facts for Anthropic's servers that do not change a reply:
        "cache_control", "inference_geo", "metadata", "service_tier",
    })  # fmt: skip
    ignored = ("context_management",)
    refused = {
        "container": "code runs on Anthropic's servers only",
        "mcp_servers": "offer the servers' tools as tools, which the agent runs itself",
    }
    stop_reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
    errors = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        529: "overloaded_error",
    }

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        return {"type": "error", "error": {"type": cls.error_name(refused.status), "message": str(refused)}}

    def error_event(self, refused: RefusedError) -> bytes:
        return encode_event(masked_values(self.error(refused)), "error")

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        content = [_block(part, part.text, part.input) for part in parts]
        return {**self._head(), "content": content, **self._stop(), "usage": self._counts()}

    def _head_event(self, chunk: Mapping[str, Any]) -> bytes:
        counts = {**self._counts(), "input_tokens": len(chunk.get("prompt_token_ids") or ())}
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
        return _event("message_start", message=message)

    def _begin_block(self, part: Part) -> bytes:
        return _event("content_block_start", index=self._index, content_block=_block(part, "", {}))

    def _add_to_block(self, part: Part) -> bytes:
        if part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(part.input, ensure_ascii=False)}
        else:
            delta = {"type": f"{part.kind}_delta", part.kind: part.text}
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> bytes:
        delta, events = {"type": "signature_delta", "signature": _SIGNATURE}, b""
        if self._block_kind == "thinking":
            events = _event("content_block_delta", index=self._index, delta=delta)
        return events + _event("content_block_stop", index=self._index) if self._block_kind else b""

    def _last_events(self) -> bytes:
        return _event("message_delta", delta=self._stop(), usage=self._counts()) + _event("message_stop")

    def _head(self) -> dict[str, Any]:
        return {"id": self.reply_id, "type": "message", "role": "assistant", "model": self._model}

    def _stop(self) -> dict[str, Any]:
        reason = self._stop_reason()
        sequence = self._last_choice["stop_reason"] if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _counts(self) -> dict[str, int]:
        prompt, cached, reply = self._token_counts()
        return {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": reply,
        }

    @classmethod
    def _part(cls, block: dict[str, Any], name: str) -> Part:
        kind = block.get("type")
        warn_unread(cls.title, kind, block)
        if kind in ("text", "thinking"):
            return Part(kind, require(str, block.get(kind), f"{name}.{kind}"))
        if kind == "image":
            source = require(dict, block.get("source"), f"{name}.source")
            return Part(kind, source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}")
        if kind == "tool_use":
            return call_part(block.get("id"), block.get("name"), block.get("input"))
        if kind == "tool_result":
            result = read_content(block.get("content") or "", f"{name}.content", cls._part)
            return Part("result", id=block.get("tool_use_id"), content=result)
        if kind == "redacted_thinking":
            return Part("thinking")
        raise unserved_kind(name, kind, "is not served: send text, images, tool uses and tool results")

    @classmethod
    def _options(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        if request.get("thinking") not in (None, {}, {"type": "disabled"}):
            warn_ignored(cls.title, "thinking")
        chat = chat_tools(request.get("tools"), _tool) | renamed(request, {"stop_sequences": "stop"})
        if choice := optional(dict, request, "tool_choice"):
            chat |= chosen_tool(choice.get("type"), choice.get("name"), "tool_choice.type")
            chat |= {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
        output = optional(dict, request, "output_config")
        if format_ := output.get("format") or request.get("output_format"):
            chat |= structured(require(dict, format_, "output_config.format").get("schema"))
        return chat | renamed(output, {"effort": "reasoning_effort"})


def _block(part: Part, text: str, tool_input: Mapping[str, Any]) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": tool_input}
    return {
        "type": part.kind,
        part.kind: text,
        **({"signature": text and _SIGNATURE} if part.kind == "thinking" else {}),
    }


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if (kind := tool.get("type") or "custom") != "custom":
        advice = "Anthropic defines; offer tools with an input_schema, which the agent runs itself"
        raise unserved_kind(name, kind, advice, param="tools")
    warn_unread(MessagesCall.title, "tool", tool)
    return {**tool, "parameters": tool.get("input_schema")}
