"""Ollama's chat: from a request to a chat request, and from a chat completion or its chunks to lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation
from groundwire.adapters.tracing.wire.parts import CallIds, Part, PartsCall, assistant_message, tool_call
from groundwire.adapters.tracing.wire.request import RefusedError, chat_tools, passed_on, require, warn_ignored
from groundwire.tools.secrets import masked_values

_OWN = {"messages", "tools", "format", "options", "think", "stream", "keep_alive"}
"""The fields that are not passed on."""
_RENAMED: dict[str, str] = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Options whose names in a chat request are others."""
_IGNORED_OPTIONS = ("num_ctx", "num_gpu", "num_thread", "num_keep", "num_batch", "mirostat", "tfs_z", "typical_p")


class OllamaCall(PartsCall):
    """A message, whose stream has a line of JSON for each part."""

    path = "api/chat"
    name = "ollama"
    fields = ("messages",)
    stream_type = "application/x-ndjson"

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        super().__init__(request)
        self.chat = {"messages": _messages(request), **_options(request)}
        self._started = time.monotonic_ns()

    @classmethod
    def messages(cls, request: Mapping[str, Any]) -> Any:
        """The messages, with ids of tool calls."""
        return _messages(request)

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        """The error as Ollama formats it."""
        return {"error": str(refused)}

    def error_event(self, refused: RefusedError) -> bytes:
        """A line with the error."""
        return _line(masked_values(self.error(refused)))

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        prompt, _, reply = self._token_counts()
        passed = time.monotonic_ns() - self._started
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
        calls = [part for part in parts if part.kind == "call"]
        if calls:
            message["tool_calls"] = [
                {"id": part.id, "function": {"name": part.name, "arguments": part.input}} for part in calls
            ]
        return {"model": self._model, "created_at": datetime.now(timezone.utc).isoformat(), "message": message}


def _joined(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    ids = CallIds()
    messages = require(list, request.get("messages"), "messages")
    return [_message(message, f"messages[{index}]", ids) for index, message in enumerate(messages)]


def _message(message: Any, name: str, ids: CallIds) -> dict[str, Any]:
    role = require(dict, message, name).get("role")
    text = require(str, message.get("content") or "", f"{name}.content")
    if role == "assistant":
        asked = require(list, message.get("tool_calls") or [], f"{name}.tool_calls")
        calls = [_tool_call(call, f"{name}.tool_calls[{index}]", ids) for index, call in enumerate(asked)]
        thought = require(str, message.get("thinking") or "", f"{name}.thinking")
        return assistant_message([text] if text else [], [thought], calls)
    if role == "tool":
        call_id = ids.of_result(message.get("tool_call_id"), message.get("tool_name") or message.get("name"))
        return {"role": role, "tool_call_id": call_id, "content": text}
    images = require(list, message.get("images") or [], f"{name}.images")
    if not images:
        return {"role": role, "content": text}
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
    return {"role": role, "content": [{"type": "text", "text": text}, *parts]}


def _tool_call(call: Any, name: str, ids: CallIds) -> dict[str, Any]:
    function = require(dict, require(dict, call, name).get("function"), f"{name}.function")
    return tool_call(ids.of_call(call.get("id"), function.get("name")), function.get("name"), function.get("arguments"))


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request without its messages. Options are fields of it."""
    options = require(dict, request.get("options") or {}, "options")
    for name in _IGNORED_OPTIONS:
        if options.get(name):
            warn_ignored("Ollama", f"options.{name}")
    named: dict[str, Any] = {
        _RENAMED.get(str(name), str(name)): value for name, value in options.items() if name not in _IGNORED_OPTIONS
    }
    if isinstance(limit := named.get("max_tokens"), int) and limit < 0:  # no limit
        del named["max_tokens"]
    stream = request.get("stream")
    rest = {name: value for name, value in request.items() if name not in _OWN}
    chat = passed_on({**named, **rest, "stream": stream is not False}, set()) | chat_tools(request.get("tools"), _tool)
    if isinstance(effort := request.get("think"), str):
        chat["reasoning_effort"] = effort
    elif effort:
        warn_ignored("Ollama", "think")
    if isinstance(form := request.get("format"), dict):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": form}}
    elif form == "json":
        chat["response_format"] = {"type": "json_object"}
    elif form:
        raise RefusedError(400, f"format must be 'json' or a JSON schema, not {form!r:.60}", param="format")
    return chat


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return require(dict, tool.get("function"), f"{name}.function")
