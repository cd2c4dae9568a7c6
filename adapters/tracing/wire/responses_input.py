"""OpenAI's Responses API: from a request to a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.wire.request import (
    RefusedError,
    chat_tools,
    passed_on,
    read_content,
    reject_unserved,
    require_list,
    require_object,
    require_text,
    unserved_kind,
    warn_ignored,
)

_TRANSLATED = frozenset(
    {
        "input", "instructions", "previous_response_id", "tools", "tool_choice", "text", "reasoning", "stream",
        "max_output_tokens", "include", "store", "stream_options", "top_logprobs", "max_tool_calls",
    }
)  # fmt: skip
# Facts for OpenAI's servers that do not change a reply.
_WITHOUT_EFFECT = frozenset(
    {
        "background", "conversation", "context_management", "metadata", "moderation", "prompt",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "truncation", "user",
    }
)  # fmt: skip
_REFUSED = {
    "background": "a reply is sent on the connection of its request",
    "conversation": "send the conversation as input, or use previous_response_id",
    "prompt": "stored prompts are on OpenAI's servers: send the messages as input",
}
CUSTOM_INPUT = "input"
"""The one argument of a custom tool, which the policy sees as a function of a text."""
_CUSTOM_PARAMETERS = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request without its messages. Fields that the Responses API does not have are passed on.

    Raises :class:`RefusedError` for what only OpenAI's servers can do.
    """
    reject_unserved(request, _REFUSED)
    if request.get("truncation") not in (None, "disabled"):
        raise RefusedError(400, "truncation is not served: shorten the input", param="truncation")
    if request.get("max_tool_calls") is not None:
        warn_ignored("Responses", "max_tool_calls")
    chat = passed_on(request, _TRANSLATED | _WITHOUT_EFFECT) | chat_tools(request.get("tools"), _tool)
    if (limit := request.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = limit
    if (choice := request.get("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice)
    text = require_object(request.get("text") or {}, "text")
    if format_ := _response_format(require_object(text.get("format") or {}, "text.format")):
        chat["response_format"] = format_
    if verbosity := text.get("verbosity"):
        chat["verbosity"] = verbosity
    if effort := require_object(request.get("reasoning") or {}, "reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    if "message.output_text.logprobs" in require_list(request.get("include") or [], "include"):
        chat |= {"logprobs": True, "top_logprobs": request.get("top_logprobs") or 0}
    return chat


def input_messages(items: Any) -> list[dict[str, Any]]:
    """The chat messages of ``input``. The items that one reply consists of become one assistant's message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(require_list(items, "input")):
        name = f"input[{index}]"
        kind = require_object(item, name).get("type") or "message"
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "message" and item.get("role") == "assistant":
            content = _joined(item.get("content"), f"{name}.content")
            if last is not None and last.keys() <= {"role", "reasoning", "reasoning_content"}:
                last["content"] = content
            else:
                messages.append({"role": "assistant", "content": content})
        elif kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": read_content(item.get("content"), f"{name}.content", _part)})
        elif kind in ("function_call", "custom_tool_call"):
            if last is None:
                messages.append(last := {"role": "assistant"})
            last.setdefault("content", None)
            last.setdefault("tool_calls", []).append(_tool_call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = read_content(item.get("output"), f"{name}.output", _part)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            if text := _reasoning_text(item, name):  # servers read one of the two names
                messages.append({"role": "assistant", "reasoning": text, "reasoning_content": text})
        else:
            advice = "is not served: send messages, function calls with their outputs, and reasoning"
            raise unserved_kind(name, kind, advice, param="input")
    return [message for message in messages if "content" in message]


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({CUSTOM_INPUT: item.get("input")}, ensure_ascii=False)
    function = {"name": item.get("name"), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _reasoning_text(item: Mapping[str, Any], name: str) -> str:
    parts = require_list(item.get("content") or item.get("summary") or [], f"{name}.content")
    return "".join(require_text(require_object(part, name).get("text"), f"{name}.content.text") for part in parts)


def _joined(content: Any, name: str) -> str:
    parts = read_content(content, name, _part)
    return parts if isinstance(parts, str) else "".join(part.get("text") or "" for part in parts)


def _part(part: Any, name: str) -> dict[str, Any]:
    kind = require_object(part, name).get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": require_text(part.get("text"), f"{name}.text")}
    if kind == "refusal":
        return {"type": "text", "text": require_text(part.get("refusal"), f"{name}.refusal")}
    if kind == "input_image" and part.get("image_url"):
        image = {"url": part["image_url"], **({"detail": part["detail"]} if part.get("detail") else {})}
        return {"type": "image_url", "image_url": image}
    raise unserved_kind(name, kind, "is not served; send text, or an image's URL", param="input")


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    kind = tool.get("type")
    if kind == "custom":
        return {**tool, "parameters": _CUSTOM_PARAMETERS}
    if kind != "function":
        advice = "OpenAI runs on its own servers; offer function or custom tools, which the agent runs itself"
        raise unserved_kind(name, kind, advice, param="tools")
    return tool


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    kind = require_object(choice, "tool_choice").get("type")
    if kind in ("function", "custom"):
        return _named(choice)
    if kind == "allowed_tools":
        tools = [
            _named(require_object(tool, "tool_choice.tools"))
            for tool in require_list(choice.get("tools"), "tool_choice")
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise RefusedError(400, f"tool_choice of type {kind!r:.60} is not served; name a function", param="tool_choice")


def _named(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(format_: Mapping[str, Any]) -> dict[str, Any]:
    kind = format_.get("type", "text")
    if kind == "text":
        return {}
    if kind != "json_schema":
        return dict(format_)
    return {"type": kind, "json_schema": {key: value for key, value in format_.items() if key != "type"}}
