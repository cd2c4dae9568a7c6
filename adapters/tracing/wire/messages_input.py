"""Anthropic's Messages API: from a request to a chat request."""

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

MALFORMED = "malformed_arguments"
"""The one entry of a tool's input if the model wrote no JSON object: what it wrote."""
_TRANSLATED = frozenset(
    {
        "max_tokens", "messages", "output_config", "output_format", "stop_sequences", "stream", "system", "tool_choice",
        "tools", "context_management", "thinking",
    }
)  # fmt: skip
# Facts for Anthropic's servers that do not change a reply.
_WITHOUT_EFFECT = frozenset({"cache_control", "inference_geo", "metadata", "service_tier"})
_IGNORED = ("context_management", "thinking")
_REFUSED = {
    "container": "code runs on Anthropic's servers only",
    "mcp_servers": "offer the servers' tools as tools, which the agent runs itself",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request without its messages. Fields that the Messages API does not have are passed on.

    Raises :class:`RefusedError` for what only Anthropic's servers can do.
    """
    reject_unserved(request, _REFUSED)
    for name in _IGNORED:
        if request.get(name) not in (None, {}, {"type": "disabled"}):
            warn_ignored("Messages", name)
    chat = passed_on(request, _TRANSLATED | _WITHOUT_EFFECT) | chat_tools(request.get("tools"), _tool)
    if (limit := request.get("max_tokens")) is not None:
        chat["max_tokens"] = limit
    if stop := request.get("stop_sequences"):
        chat["stop"] = stop
    if (choice := request.get("tool_choice")) is not None:
        chat |= _tool_choice(require_object(choice, "tool_choice"))
    output = require_object(request.get("output_config") or {}, "output_config")
    if format_ := output.get("format") or request.get("output_format"):
        schema = require_object(format_, "output_config.format").get("schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    if effort := output.get("effort"):
        chat["reasoning_effort"] = effort
    return chat


def chat_messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat messages of ``system`` and ``messages``. Each tool result becomes a message of its own."""
    messages: list[dict[str, Any]] = []
    if system := request.get("system"):
        messages.append({"role": "system", "content": read_content(system, "system", _part)})
    for index, message in enumerate(require_list(request.get("messages"), "messages")):
        name = f"messages[{index}]"
        role, content = require_object(message, name).get("role"), message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_assistant_message(content, f"{name}.content"))
        else:
            messages += _user_messages(role, content, f"{name}.content")
    if messages and messages[-1]["role"] == "assistant":
        raise RefusedError(
            400, "the last message is the assistant's: a reply whose beginning is given is not served", param="messages"
        )
    return messages


def _user_messages(role: Any, content: Any, name: str) -> list[dict[str, Any]]:
    messages, rest = [], []
    for index, block in enumerate(require_list(content, name)):
        if require_object(block, f"{name}[{index}]").get("type") == "tool_result":
            result = read_content(block.get("content") or "", f"{name}[{index}].content", _part)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            rest.append(block)
    return [*messages, {"role": role, "content": read_content(rest, name, _part)}] if rest else messages


def _assistant_message(blocks: Any, name: str) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for index, block in enumerate(require_list(blocks, name)):
        kind = require_object(block, f"{name}[{index}]").get("type")
        if kind == "text":
            texts.append(require_text(block.get("text"), f"{name}[{index}].text"))
        elif kind == "thinking":
            thoughts.append(require_text(block.get("thinking"), f"{name}[{index}].thinking"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": _arguments(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unknown_block(f"{name}[{index}]", kind)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thought := "".join(thoughts):  # servers read one of the two names
        message |= {"reasoning": thought, "reasoning_content": thought}
    return {**message, "tool_calls": calls} if calls else message


def _arguments(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {MALFORMED}:
        return str(value[MALFORMED])
    return json.dumps({} if value is None else value, ensure_ascii=False)


def _part(block: Any, name: str) -> dict[str, Any]:
    kind = require_object(block, name).get("type")
    if kind == "text":
        return {"type": "text", "text": require_text(block.get("text"), f"{name}.text")}
    if kind == "image":
        source = require_object(block.get("source"), f"{name}.source")
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise _unknown_block(name, kind)


def _unknown_block(name: str, kind: Any) -> RefusedError:
    return unserved_kind(name, kind, "is not served: send text, images, tool uses and tool results")


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if (kind := tool.get("type") or "custom") != "custom":
        advice = "Anthropic defines; offer tools with an input_schema, which the agent runs itself"
        raise unserved_kind(name, kind, advice, param="tools")
    return {**tool, "parameters": tool.get("input_schema")}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = require_text(choice.get("type"), "tool_choice.type")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **parallel}
    if kind not in _CHOICES:
        raise RefusedError(400, f"tool_choice.type must be auto, any, none or tool, not {kind!r:.60}")
    return {"tool_choice": _CHOICES[kind], **parallel}
