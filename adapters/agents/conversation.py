"""The tool calls of an agent of any framework, read from its requests: each repeats the conversation so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.wire.messages_input import chat_messages
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.adapters.tracing.wire.responses_input import input_messages
from groundwire.tools.sql.syntax import is_query
from groundwire.tools.types import AgentStep

_MAX_CALLS = 1000


class ToolCalls:
    """The tool calls of one attempt, in the order in which the requests first show them."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[str, Any]] = {}
        self._results: dict[str, str] = {}

    def add(self, path: str, request: Mapping[str, Any]) -> None:
        """Read the tool calls and their results in a request to the API at ``path``."""
        for message in _messages(path, request):
            for call in _objects(message.get("tool_calls")):
                if len(self._calls) < _MAX_CALLS and isinstance(function := call.get("function"), Mapping):
                    named = str(function.get("name")), _parsed(function.get("arguments"))
                    self._calls.setdefault(str(call.get("id")), named)
            if message.get("role") == "tool" and len(self._results) < _MAX_CALLS:
                self._results.setdefault(str(message.get("tool_call_id")), _to_text(message.get("content")))

    def steps(self) -> list[AgentStep]:
        """The tool calls as steps: the input is the query if there is one, else the arguments."""
        return [
            AgentStep(
                agent=name,
                kind="tool",
                input=_query_argument(arguments) or _to_text(arguments),
                output=self._results.get(call_id, ""),
                ok=call_id in self._results,
            )
            for call_id, (name, arguments) in self._calls.items()
        ]


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _messages(path: str, request: Mapping[str, Any]) -> list[Any]:
    """The chat messages of a request; none if the proxy refuses it."""
    try:
        if path == "/responses":
            return input_messages(request.get("input") or [])
        return chat_messages(request) if path == "/messages" else _objects(request.get("messages"))
    except RefusedError:
        return []


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _query_argument(arguments: Any) -> str:
    values = arguments.values() if isinstance(arguments, Mapping) else [arguments]
    return next((value for value in values if isinstance(value, str) and is_query(value)), "")


def _to_text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, Mapping) and "text" in part for part in value):
        return "".join(str(part["text"]) for part in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
