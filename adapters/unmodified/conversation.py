"""The tool calls of an agent, read from its requests: each request repeats the conversation so far.

It reads the formats of chat completions, Responses and Messages. So the steps are known for any framework.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.tools.types import AgentStep

__all__ = ["Conversation", "is_query"]

_QUERY = re.compile(r"\s*(--[^\n]*\n\s*)*(select|with)\b", re.IGNORECASE)
_MAX_CALLS = 1000


def is_query(text: str) -> bool:
    """Whether ``text`` begins like an SQL query."""
    return _QUERY.match(text) is not None


class Conversation:
    """The tool calls of one attempt, in the order in which the requests first show them."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[str, Any]] = {}
        self._results: dict[str, str] = {}

    def add(self, request: Mapping[str, Any]) -> None:
        """Read the tool calls and their results in a request. Parts in another format are left out."""
        for item in _items(request):
            if (call := _call(item)) is not None and len(self._calls) < _MAX_CALLS:
                self._calls.setdefault(call[0], call[1:])
            elif (result := _result(item)) is not None and len(self._results) < _MAX_CALLS:
                self._results.setdefault(*result)

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

    def last_query(self) -> str:
        """The last SQL query among the arguments of tool calls; empty if there is none."""
        queries = (_query_argument(arguments) for _, arguments in reversed(self._calls.values()))
        return next(filter(None, queries), "")


def _items(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Messages, the tool calls in them, and their content blocks."""
    messages = request.get("messages") or request.get("input")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            continue
        yield message
        for part in ("tool_calls", "content"):
            found = message.get(part)
            yield from (each for each in found if isinstance(each, Mapping)) if isinstance(found, list) else ()


def _call(item: Mapping[str, Any]) -> tuple[str, str, Any] | None:
    """Id, name and arguments of a tool call."""
    kind, function = item.get("type"), item.get("function")
    if kind == "function" and isinstance(function, Mapping):
        return str(item.get("id")), str(function.get("name")), _parsed(function.get("arguments"))
    if kind == "function_call":
        return str(item.get("call_id")), str(item.get("name")), _parsed(item.get("arguments"))
    if kind == "tool_use":
        return str(item.get("id")), str(item.get("name")), item.get("input")
    return None


def _result(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """Id and text of a tool call's result."""
    if item.get("role") == "tool":
        return str(item.get("tool_call_id")), _to_text(item.get("content"))
    if item.get("type") == "function_call_output":
        return str(item.get("call_id")), _to_text(item.get("output"))
    if item.get("type") == "tool_result":
        return str(item.get("tool_use_id")), _to_text(item.get("content"))
    return None


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
