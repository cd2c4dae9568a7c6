"""Tool calls in a reply's text, in the formats of several model families.

``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, and the starter). ``llama3_json``: the
reply is ``{"name": ..., "parameters": {...}}``, or several of them separated by semicolons (Llama 3.1 and 3.2).

A policy in training writes malformed calls. They stay in the content, where the agent and the trainer can see them, and
are never an error of the server.
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
    """``opening`` begins a call; ``parse(text, names)`` splits a text into its content and its calls of ``names``."""

    opening: str
    parse: Callable[[str, Collection[str]], Parsed]


def parse_tool_calls(text: str, names: Collection[str]) -> Parsed:
    """Split ``text`` into its content and its Hermes calls of the tools ``names``.

    Returns the content, None if ``text`` has only calls, and the calls in the OpenAI API's form. A call with complete
    JSON needs no closing tag. A call with malformed JSON, an unknown name, or arguments that are not an object stays in
    the content.
    """
    calls: list[dict[str, Any]] = []
    content: list[str] = []
    end = 0
    for match in _CALL.finditer(text):
        try:
            call = _openai_call(json.loads(match.group(1)), names)
        except (ValueError, RecursionError):
            continue
        if call is not None:
            calls.append(call)
            content.append(text[end : match.start()])
            end = match.end()
    if not calls:
        return text, []
    content.append(text[end:])
    return "".join(content).rstrip() or None, calls


def _parse_llama(text: str, names: Collection[str]) -> Parsed:
    """The whole reply is calls, or it is content."""
    decoder, calls = json.JSONDecoder(), []
    rest = text.strip().removeprefix(_LLAMA_TAG).lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        call = _openai_call(value, names)
        if call is None:
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip(" \n;")
    return (None, calls) if calls else (text, [])


def _openai_call(value: Any, names: Collection[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


FORMATS = {"hermes": ToolFormat("<tool_call>", parse_tool_calls), "llama3_json": ToolFormat("{", _parse_llama)}
"""By the names that vLLM and verl use."""
