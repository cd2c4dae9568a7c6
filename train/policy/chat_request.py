"""What a chat completion may ask for, read by hand so that a refusal names the field and the value.

Fields that are not listed here are ignored, as servers do: clients send many, and each release adds some.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.policy.types import Sampling

__all__ = ["ChatRequest", "parse_request"]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CHOICES = 128


@dataclass(frozen=True)
class ChatRequest:
    """A request whose every field has been checked. ``messages`` are ready for a chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    samplings: list[Sampling]
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool

    @property
    def tool_names(self) -> frozenset[str]:
        """The tools that a reply may call."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


def parse_request(body: Any, *, served: str, session: str = "") -> ChatRequest:
    """Check ``body``, the decoded JSON of a chat completion request of ``session`` for the model ``served``.

    Raises:
        ChatRequestError: naming the field, its value, and what it may be.
    """
    if not isinstance(body, dict):
        raise ChatRequestError(f"the body must be a JSON object, not {_kind(body)}")
    model = _read(body, "model", str, "a string", None)
    if model is not None and model != served:
        message = f"the model {model!r} does not exist; this server has {served!r}"
        raise ChatRequestError(message, param="model", status=404, code="model_not_found")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ChatRequestError(
            f"messages must be a list with at least one message, not {_kind(messages)}", param="messages"
        )
    options = _read(body, "stream_options", dict, "an object", {})
    limit = _integer(body, "max_completion_tokens", None, 1) or _integer(body, "max_tokens", None, 1)
    sampling = Sampling(
        temperature=_number(body, "temperature", 1.0, lambda x: x >= 0, "a number that is 0 or more"),
        top_p=_number(body, "top_p", 1.0, lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
        max_tokens=limit,
        stop=_stop(body.get("stop")),
        session=session,
    )
    seed = _integer(body, "seed", None, None)
    count = _integer(body, "n", 1, 1) or 1
    if count > MOST_CHOICES:
        raise ChatRequestError(f"n is {count}; it may be up to {MOST_CHOICES}", param="n")
    _integer(body, "top_logprobs", None, 0)
    return ChatRequest(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=_tools(body),
        samplings=[replace(sampling, seed=None if seed is None else seed + i) for i in range(count)],
        stream=_read(body, "stream", bool, "true or false", False),
        include_usage=_read(options, "include_usage", bool, "true or false", False),
        logprobs=_read(body, "logprobs", bool, "true or false", False),
        return_token_ids=_read(body, "return_token_ids", bool, "true or false", False),
    )


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ChatRequestError(f"{where} must be an object with role and content, not {_kind(message)}", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise ChatRequestError(f"{where}.role is {role!r}; it may be {', '.join(ROLES)}", param=f"{where}.role")
    calls = message.get("tool_calls") or []
    content = _content(message.get("content"), f"{where}.content", optional=role == "assistant")
    # What was called "system" is "developer" for OpenAI's newer models; templates know the older name.
    made = {"role": "system" if role == "developer" else role, "content": content}
    if calls and role == "assistant":
        if not isinstance(calls, list):
            raise ChatRequestError(
                f"{where}.tool_calls must be a list, not {_kind(calls)}", param=f"{where}.tool_calls"
            )
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            made[key] = message[key]
    return made


def _content(content: Any, where: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else _kind(part)
                raise ChatRequestError(
                    f"{where}[{i}] is of type {kind!r}; this model reads only text parts", param=where
                )
        return "".join(part["text"] for part in content)
    raise ChatRequestError(f"{where} must be a string or a list of text parts, not {_kind(content)}", param=where)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatRequestError(f"{where} must have a function with a name", param=where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # Templates write arguments as JSON themselves, so they get the object, as with vLLM.
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ChatRequestError(f"{where}.function.arguments is not JSON: {arguments!r}", param=where) from None
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    tools = _read(body, "tools", list, "a list", [])
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"tools[{i}]"
            raise ChatRequestError(f"{where} must be of type 'function' and have a function with a name", param=where)
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise ChatRequestError(f"tool_choice is {choice!r}; this server knows 'none' and 'auto'", param="tool_choice")
    return [] if choice == "none" else tools


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise ChatRequestError(f"stop must be a string or a list of strings, none empty, not {stop!r}", param="stop")
    return tuple(stops)


def _read(body: dict[str, Any], name: str, kind: type, words: str, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ChatRequestError(f"{name} must be {words}, not {value!r}", param=name)
    return value


def _number(body: dict[str, Any], name: str, default: float, fits: Callable[[float], bool], words: str) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not fits(value):
        raise ChatRequestError(f"{name} must be {words}, not {value!r}", param=name)
    return float(value)


def _integer(body: dict[str, Any], name: str, default: int | None, least: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        limit = "" if least is None else f" of {least} or more"
        raise ChatRequestError(f"{name} must be a whole number{limit}, not {value!r}", param=name)
    return value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "nothing"}.get(type(value), repr(value))
