"""Ollama's chat: from a request to a chat request, and from a chat completion or its chunks to lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from groundwire.adapters.tracing.wire.chat_request import (
    CallIds,
    Part,
    assistant_message,
    call_part,
    chat_content,
    chat_tools,
    structured,
)
from groundwire.adapters.tracing.wire.parts import PartsCall
from groundwire.adapters.tracing.wire.request import RefusedError, optional, require, warn_ignored, warn_unread
from groundwire.tools.secrets import masked_values

_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Options whose names in a chat request are others."""
_IGNORED_OPTIONS = ("num_ctx", "num_gpu", "num_thread", "num_keep", "num_batch", "mirostat", "tfs_z", "typical_p")


class OllamaCall(PartsCall):
    """A message, whose stream has a line of JSON for each part."""

    path = "api/chat"
    name = "ollama"
    title = "Ollama"
    fields = ("messages",)
    stream_type = "application/x-ndjson"
    own = frozenset({"messages", "tools", "format", "options", "think", "keep_alive", *_IGNORED_OPTIONS})

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        return {"error": str(refused)}

    def error_event(self, refused: RefusedError) -> bytes:
        return _line(masked_values(self.error(refused)))

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        prompt, _, reply = self._token_counts()
        passed = self._nanoseconds()
        return {
            **self._message(parts),
            "done": True,
            "done_reason": "length" if self._finish_reason() == "length" else "stop",
            "total_duration": passed,
            "load_duration": 0,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": 0,
            "eval_count": reply,
            "eval_duration": passed,
        }

    def _event(self, part: Part) -> bytes:
        return _line({**self._message([part]), "done": False})

    def _end(self, parts: Sequence[Part]) -> bytes:
        return b"".join(map(self._event, parts)) + _line(self._whole([]))

    def _message(self, parts: Sequence[Part]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _joined(parts, "text")}
        if thought := _joined(parts, "thinking"):
            message["thinking"] = thought
        if calls := [part for part in parts if part.kind == "call"]:
            message["tool_calls"] = [
                {"id": part.id, "function": {"name": part.name, "arguments": part.input}} for part in calls
            ]
        created = datetime.fromtimestamp(self.exchange.origin.started, timezone.utc)
        return {"model": self._model, "created_at": created.isoformat(), "message": message}

    @classmethod
    def _prepared(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        asked: dict[str, Any] = optional(dict, request, "options")
        options = {_RENAMED.get(name, name): value for name, value in asked.items()}
        if isinstance(limit := options.get("max_tokens"), int) and limit < 0:  # no limit
            del options["max_tokens"]
        return {**options, **request, "stream": request.get("stream") is not False}

    @classmethod
    def _messages(cls, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        ids = CallIds()
        messages = require(list, request.get("messages"), "messages")
        return [_message(message, f"messages[{index}]", ids) for index, message in enumerate(messages)]

    @classmethod
    def _options(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        for name in _IGNORED_OPTIONS:
            if request.get(name):
                warn_ignored(cls.title, f"options.{name}")
        chat = chat_tools(
            request.get("tools"), lambda tool, name: require(dict, tool.get("function"), f"{name}.function")
        )
        if isinstance(effort := request.get("think"), str):
            chat["reasoning_effort"] = effort
        elif effort:
            warn_ignored(cls.title, "think")
        form = request.get("format")
        if form == "json":
            chat["response_format"] = {"type": "json_object"}
        elif isinstance(form, dict):
            chat |= structured(form)
        elif form:
            raise RefusedError(400, f"format must be 'json' or a JSON schema, not {form!r:.60}", param="format")
        return chat


def _joined(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _message(message: Any, name: str, ids: CallIds) -> dict[str, Any]:
    role = require(dict, message, name).get("role")
    warn_unread(OllamaCall.title, "message", message)
    text = optional(str, message, "content", name)
    if role == "tool":
        call_id = ids.of_result(message.get("tool_call_id"), message.get("tool_name") or message.get("name"))
        return {"role": role, "tool_call_id": call_id, "content": text}
    if role != "assistant":
        images = [f"data:image/png;base64,{image}" for image in optional(list, message, "images", name)]
        return {"role": role, "content": chat_content([Part("text", text), *(Part("image", url) for url in images)])}
    parts = [Part("thinking", optional(str, message, "thinking", name)), *([Part("text", text)] if text else [])]
    for index, call in enumerate(optional(list, message, "tool_calls", name)):
        place = f"{name}.tool_calls[{index}]"
        function = require(dict, require(dict, call, place).get("function"), f"{place}.function")
        for kind, fields in ("tool_call", call), ("function", function):
            warn_unread(OllamaCall.title, kind, fields)
        call_id = ids.of_call(call.get("id"), function.get("name"))
        parts.append(call_part(call_id, function.get("name"), function.get("arguments")))
    return assistant_message(parts)
