"""Hermes tool calls: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` in a reply's text.

A policy that is learning writes broken calls. One that does not parse stays in the content, where the agent and the
trainer can see it; it is never an error of the server.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

__all__ = ["OPENING", "parse_tool_calls"]

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def parse_tool_calls(text: str, names: Collection[str]) -> tuple[str | None, list[dict[str, Any]]]:
    """Take the calls of the tools ``names`` out of ``text``.

    Returns the remaining content (None where only calls were written) and the calls as the OpenAI API has them.
    A call without its closing tag counts if its JSON is whole. One with broken JSON, an unknown name, or arguments that
    are not an object stays in the content.
    """
    calls: list[dict[str, Any]] = []
    kept: list[str] = []
    at = 0
    for match in _CALL.finditer(text):
        call = _parse(match.group(1), names)
        if call is not None:
            calls.append(call)
            kept.append(text[at : match.start()])
            at = match.end()
    if not calls:
        return text, []
    kept.append(text[at:])
    return "".join(kept).rstrip() or None, calls


def _parse(body: str, names: Collection[str]) -> dict[str, Any] | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in names:
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
