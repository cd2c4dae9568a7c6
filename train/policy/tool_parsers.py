"""How models write tool calls, and how the calls come out of a reply's text.

``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, and the starter). ``llama3_json``: the
reply is ``{"name": ..., "parameters": {...}}``, or several of them with semicolons between (Llama 3.1 and 3.2).

A policy that is learning writes broken calls. One that does not parse stays in the content, where the agent and the
trainer can see it; it is never an error of the server.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

__all__ = ["FORMATS", "ToolFormat", "parse_tool_calls"]

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_LLAMA_TAG = "<|python_tag|>"

Parsed = tuple[str | None, list[dict[str, Any]]]


@dataclass(frozen=True)
class ToolFormat:
    """``opening`` is what a call begins with; ``parse(text, names)`` takes the calls of the tools ``names`` out."""

    opening: str
    parse: Callable[[str, Collection[str]], Parsed]


def parse_tool_calls(text: str, names: Collection[str]) -> Parsed:
    """Take the Hermes calls of the tools ``names`` out of ``text``.

    Returns the remaining content (None where only calls were written) and the calls as the OpenAI API has them.
    A call without its closing tag counts if its JSON is whole. One with broken JSON, an unknown name, or arguments that
    are not an object stays in the content.
    """
    calls: list[dict[str, Any]] = []
    kept: list[str] = []
    at = 0
    for match in _CALL.finditer(text):
        call = _read(match.group(1), names)
        if call is not None:
            calls.append(call)
            kept.append(text[at : match.start()])
            at = match.end()
    if not calls:
        return text, []
    kept.append(text[at:])
    return "".join(kept).rstrip() or None, calls


def _parse_llama(text: str, names: Collection[str]) -> Parsed:
    """A reply is calls and nothing else, or it is content."""
    decoder, calls = json.JSONDecoder(), []
    rest = text.strip().removeprefix(_LLAMA_TAG).lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        call = _call(value, names)
        if call is None:
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip(" \n;")
    return (None, calls) if calls else (text, [])


def _read(body: str, names: Collection[str]) -> dict[str, Any] | None:
    try:
        return _call(json.loads(body), names)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, names: Collection[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


FORMATS = {"hermes": ToolFormat("<tool_call>", parse_tool_calls), "llama3_json": ToolFormat("{", _parse_llama)}
"""By the names that vLLM and verl know them by."""
