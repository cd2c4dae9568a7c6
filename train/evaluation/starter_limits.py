"""What an agent asks of the starter policy that the starter was not made for, read from the agent's first calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from groundwire.adapters.tracing import LLMCall

__all__ = ["PROMPT_TOKENS", "TOOLS", "starter_limits"]

PROMPT_TOKENS = 2000
"""Tokens of the longest prompts that the starter was made for."""
TOOLS = 10
"""Tools of one request that the starter was made for."""


def starter_limits(calls: Iterable[LLMCall]) -> str:
    """A sentence that names the limits of the starter that ``calls`` exceed; empty if they exceed none."""
    calls = list(calls)
    tools = {call.tools_json: [tool.get("function", tool) for tool in call.tools] for call in calls}
    longest = max((len(call.prompt_ids) or call.prompt_tokens for call in calls), default=0)
    most = max(map(len, tools.values()), default=0)
    failed = sum("<tool_call>" in str(call.reply.get("content")) for call in calls if call.tools_json)
    found = []
    if longest > PROMPT_TOKENS:
        found.append(f"prompts of up to {longest:,} tokens (at most {PROMPT_TOKENS:,})")
    if most > TOOLS:
        found.append(f"{most} tools in one request (at most {TOOLS})")
    if most and not any(_takes_text(tool) for offered in tools.values() for tool in offered):
        found.append("tools of which none has a text argument, for a query")
    if failed > len(calls) / 10:  # a toy makes such mistakes now and then
        found.append(f"calls of tools that the agent does not have, in {failed} of {len(calls)} replies")
    if not found:
        return ""
    return f"beyond what the starter, a toy, was made for: {'; '.join(found)}. --model takes a larger model"


def _takes_text(tool: dict[str, Any]) -> bool:
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return any(isinstance(each, dict) and each.get("type", "string") == "string" for each in properties.values())
