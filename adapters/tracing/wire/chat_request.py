"""What requests of all APIs become: a chat request. Content in parts, tools and structured output are read here."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing.wire.request import RefusedError, require
from groundwire.tools.files import shorten_repr

MALFORMED = "malformed_arguments"
"""The one entry of a tool's input if the model wrote no JSON object: what it wrote."""
_SHOWN = ("text", "image")


@dataclass(slots=True)
class Part:
    """A part of a message."""

    kind: str
    """``text``, ``thinking``, ``call``, ``image`` or ``result``."""
    text: str = ""
    """Of a call: the arguments, as the policy wrote them. Of an image: its URL."""
    id: Any = ""
    """Of a call, or of the call that has this result."""
    name: Any = ""
    """Of a call's function."""
    content: Any = ""
    """Of a result: as in a chat message. Of an image: its other fields in one. Of a reply's text: its logprobs."""

    @property
    def input(self) -> dict[str, Any]:
        """The arguments of a call."""
        try:
            value = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {MALFORMED: self.text}


ReadPart = Callable[[dict[str, Any], str], Part | None]
"""Reads a part of a request, which has this name; None for what is no content. Raises :class:`RefusedError`."""


def call_part(call_id: Any, name: Any, arguments: Any) -> Part:
    """A tool call, from its arguments as an object or as text."""
    if isinstance(arguments, str):
        return Part("call", arguments, call_id, name)
    if isinstance(arguments, dict) and arguments.keys() == {MALFORMED}:
        return Part("call", str(arguments[MALFORMED]), call_id, name)
    return Part("call", json.dumps({} if arguments is None else arguments, ensure_ascii=False), call_id, name)


def read_content(content: Any, name: str, read_part: ReadPart) -> Any:
    """The content of a chat message, of texts and images: text as text, other content as parts."""
    return content if isinstance(content, str) else chat_content(_read_parts(content, name, read_part, _SHOWN))


def read_message(role: Any, content: Any, name: str, read_part: ReadPart) -> list[dict[str, Any]]:
    """The chat messages of a message: each tool result is one of its own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [assistant_message(_read_parts(content, name, read_part, ("text", "thinking", "call")))]
    parts = _read_parts(content, name, read_part, (*_SHOWN, "result"))
    shown = [part for part in parts if part.kind != "result"]
    results = [
        {"role": "tool", "tool_call_id": part.id, "content": part.content} for part in parts if part.kind == "result"
    ]
    return [*results, {"role": role, "content": chat_content(shown)}] if shown else results


def assistant_message(parts: Sequence[Part]) -> dict[str, Any]:
    """The chat message of a reply that a request repeats."""
    texts = [part.text for part in parts if part.kind == "text"]
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
        for part in parts
        if part.kind == "call"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thought := "".join(part.text for part in parts if part.kind == "thinking"):  # servers read one of the two names
        message |= {"reasoning": thought, "reasoning_content": thought}
    return {**message, "tool_calls": calls} if calls else message


def _read_parts(content: Any, name: str, read_part: ReadPart, kinds: Collection[str]) -> list[Part]:
    parts = []
    for index, block in enumerate(require(list, content, name)):
        place = f"{name}[{index}]"
        if (part := read_part(require(dict, block, place), place)) is not None:
            if part.kind not in kinds:
                raise RefusedError(400, f"{place} is a {part.kind}, which does not belong there: {', '.join(kinds)} do")
            parts.append(part)
    return parts


def chat_content(parts: Sequence[Part]) -> Any:
    """The content of a chat message of texts and images."""
    if len(parts) == 1 and parts[0].kind == "text":
        return parts[0].text
    return [
        {"type": "text", "text": part.text}
        if part.kind == "text"
        else {"type": "image_url", "image_url": {"url": part.text, **(part.content or {})}}
        for part in parts
    ]


def refuse_beginning(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raise :class:`RefusedError` if the last message is the beginning of the reply."""
    if messages and messages[-1]["role"] == "assistant":
        raise RefusedError(
            400, "the last message is the assistant's: a reply whose beginning is given is not served", param=name
        )


class CallIds:
    """The ids of tool calls where they are optional: a result without one is that of its function's first open call."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []
        self._count = 0

    def of_call(self, call_id: Any, name: Any) -> Any:
        """The id of the next call."""
        call_id = call_id or f"call_{self._count}"
        self._count += 1
        self._open.append((call_id, name))
        return call_id

    def of_result(self, call_id: Any, name: Any) -> Any:
        """The id of the call that has this result."""
        for call in self._open:
            if call[0] == call_id if call_id else name in (None, "", call[1]):
                self._open.remove(call)
                return call[0]
        return call_id or f"call_{self._count}"


def passed_on(request: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The fields of a request to another API that are a chat request's as well: those that are not its ``own``."""
    if request.get("n") not in (None, 1):
        raise RefusedError(
            400, f"n is {shorten_repr(request['n'])}: only chat completions have several choices", param="n"
        )
    chat = {name: value for name, value in request.items() if name not in own and value is not None}
    if request.get("stream"):
        chat |= {"stream": request["stream"], "stream_options": {"include_usage": True}}
    return chat


def renamed(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The settings that are set, with their ``names`` in a chat request."""
    return {name: value for own, name in names.items() if (value := settings.get(own)) is not None}


def chat_tools(tools: Any, read_tool: Callable[[Mapping[str, Any], str], Mapping[str, Any] | None]) -> dict[str, Any]:
    """The field ``tools`` of a chat request, empty without any. ``read_tool`` gives each ``parameters``, or is None."""
    functions = []
    for index, value in enumerate(require(list, tools or [], "tools")):
        if (tool := read_tool(require(dict, value, f"tools[{index}]"), f"tools[{index}]")) is None:
            continue
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        if tool.get("strict"):  # false is the default; the prompt shall not depend on the API
            function["strict"] = True
        functions.append({"type": "function", "function": function})
    return {"tools": functions} if functions else {}


def named_tool(name: Any) -> dict[str, Any]:
    """The choice of one tool."""
    return {"type": "function", "function": {"name": name}}


def chosen_tool(kind: Any, name: Any, field: str) -> dict[str, Any]:
    """The choice of tools that a ``field`` of Anthropic or AWS names. Raises :class:`RefusedError`."""
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named_tool(name)}
    if require(str, kind, field) not in choices:
        raise RefusedError(400, f"{field} must be {', '.join(choices)}, not {kind!r:.60}", param=field)
    return {"tool_choice": choices[kind]}


def allowed_tools(mode: Any, names: Sequence[Any]) -> dict[str, Any]:
    """The choice among some tools."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(map(named_tool, names))}}


def structured(schema: Any, name: Any = "output") -> dict[str, Any]:
    """The field ``response_format`` of a chat request for replies of a JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}}
