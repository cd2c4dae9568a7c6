"""OpenAI's Responses API: from a request to a chat request, and from a chat completion or its chunks to a response."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, WireCall, encode_event
from groundwire.adapters.tracing.wire.request import (
    RefusedError,
    chat_tools,
    passed_on,
    read_content,
    refuse_fields,
    require,
    unserved_kind,
    warn_ignored,
)

_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its response repeats, with their defaults."""
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_Event = dict[str, Any]
_OWN = {
    "input", "instructions", "previous_response_id", "tools", "tool_choice", "text", "reasoning", "stream",
    "max_output_tokens", "include", "store", "stream_options", "top_logprobs", "max_tool_calls",
    # Facts for OpenAI's servers that do not change a reply:
    "background", "conversation", "context_management", "metadata", "moderation", "prompt", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "truncation", "user",
}  # fmt: skip
"""The fields that are not passed on."""
_REFUSED = {
    "background": "a reply is sent on the connection of its request",
    "conversation": "send the conversation as input, or use previous_response_id",
    "prompt": "stored prompts are on OpenAI's servers: send the messages as input",
}
_CUSTOM_INPUT = "input"
"""The one argument of a custom tool, which the policy sees as a function of a text."""
_CUSTOM_PARAMETERS = {"type": "object", "properties": {_CUSTOM_INPUT: {"type": "string"}}, "required": [_CUSTOM_INPUT]}
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesCall(WireCall):
    """A response. A reply's reasoning, text and tool calls become an output item each."""

    path = "responses"
    name = "responses"
    fields = ("input", "previous_response_id", "prompt")

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        self._request, self._conversation = request, conversation
        self._messages = [
            *conversation.before(request.get("previous_response_id")),
            *input_messages(request.get("input")),
        ]
        instructions = request.get("instructions")
        first = [{"role": "system", "content": instructions}] if instructions else []
        self.chat = {"messages": [*first, *self._messages], **chat_options(request)}
        self.reply_id, self._created = _new_id("resp"), int(time.time())
        self._model = request.get("model")
        self._custom = {tool["name"] for tool in request.get("tools") or () if tool.get("type") == "custom"}
        self._items: list[dict[str, Any]] = []
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._number = 0

    @classmethod
    def messages(cls, request: Mapping[str, Any]) -> Any:
        """The chat messages of ``input``."""
        return input_messages(request.get("input") or [])

    def reply(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole response."""
        choice = completion["choices"][0]
        self._add(choice["message"], choice)
        self._note(completion)
        self._complete()
        return self._finished()

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of a chunk."""
        events: list[_Event] = []
        self._note(chunk)
        if not self._number:
            response = self._response("in_progress")
            events = [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        for choice in chunk.get("choices") or ():
            events += self._add(choice.get("delta") or {}, choice)
        return self._encoded(events)

    def end(self) -> bytes:
        """The end of the last item, and the whole response."""
        events = self._complete()
        response = self._finished()
        return self._encoded([*events, {"type": f"response.{response['status']}", "response": response}])

    def error_event(self, refused: RefusedError) -> bytes:
        """The event ``error``; OpenAI's client reads a nested one, the API's reference has a flat one."""
        error = self.error(refused)["error"]
        return self._encoded([{**error, "type": "error", "error": error}])

    def _note(self, reply: Mapping[str, Any]) -> None:
        self._model = reply.get("model") or self._model
        self._usage = reply.get("usage") or self._usage

    def _add(self, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> list[_Event]:
        """Add a delta, or a whole message, to the items; returns its events."""
        events: list[_Event] = []
        if text := delta.get("reasoning") or delta.get("reasoning_content"):
            events += self._add_text("reasoning", text, {})
        if text := delta.get("content"):
            logprobs = (choice.get("logprobs") or {}).get("content") if self.chat.get("logprobs") else None
            events += self._add_text("message", text, {"logprobs": logprobs or []})
        for call in delta.get("tool_calls") or ():
            events += self._add_tool_call(call)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return events

    def _add_text(self, kind: str, text: str, fields: dict[str, Any]) -> list[_Event]:
        events = [] if self._items and self._items[-1]["type"] == kind else self._open_text(kind)
        part = self._items[-1]["content"][0]
        part["text"] += text
        if fields.get("logprobs"):
            part["logprobs"] = part["logprobs"] + fields["logprobs"]
        return [*events, self._event(f"response.{part['type']}.delta", content_index=0, delta=text, **fields)]

    def _open_text(self, kind: str) -> list[_Event]:
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"id": _new_id("rs"), "type": kind, "summary": [], "content": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _new_id("msg"), "type": kind, "role": "assistant", "content": []}
        events = self._open(item)
        item["content"] = [part]
        return [*events, self._event("response.content_part.added", content_index=0, part=dict(part))]

    def _add_tool_call(self, call: Mapping[str, Any]) -> list[_Event]:
        function, events = call.get("function") or {}, list[_Event]()
        item = self._items[-1] if self._items else {}
        if "call_id" not in item or call.get("id") not in (None, "", item["call_id"]):
            name, self._arguments = function.get("name") or "", ""
            item = {"call_id": call.get("id") or _new_id("call"), "name": name}
            if name in self._custom:
                item |= {"id": _new_id("ctc"), "type": "custom_tool_call", "input": ""}
            else:
                item |= {"id": _new_id("fc"), "type": "function_call", "arguments": ""}
            events = self._open(item)
        text = function.get("arguments") or ""
        self._arguments += text
        if text and item["type"] == "function_call":
            item["arguments"] += text
            events.append(self._event("response.function_call_arguments.delta", delta=text))
        return events

    def _open(self, item: dict[str, Any]) -> list[_Event]:
        events = self._close()
        item["status"] = "in_progress"
        self._items.append(item)
        return [*events, self._event("response.output_item.added", item=dict(item))]

    def _close(self) -> list[_Event]:
        if not self._items:
            return []
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            events = [self._event("response.function_call_arguments.done", arguments=arguments, name=name)]
        elif item["type"] == "custom_tool_call":
            item["input"] = _custom_input(self._arguments)
            events = [
                self._event("response.custom_tool_call_input.delta", delta=item["input"]),
                self._event("response.custom_tool_call_input.done", input=item["input"]),
            ]
        else:
            part = item["content"][0]
            done = {key: part[key] for key in ("text", "logprobs") if key in part}
            events = [
                self._event(f"response.{part['type']}.done", content_index=0, **done),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._event("response.output_item.done", item=item)]

    def _complete(self) -> list[_Event]:
        """End the last item; a reply without any gets an empty message."""
        events = [] if self._items else self._open_text("message")
        return [*events, *self._close()]

    def _event(self, kind: str, **fields: Any) -> _Event:
        item = {} if "item" in fields else {"item_id": self._items[-1]["id"]}
        return {"type": kind, "output_index": len(self._items) - 1, **item, **fields}

    def _encoded(self, events: list[_Event]) -> bytes:
        encoded = b""
        for event in events:
            encoded += encode_event({**event, "sequence_number": self._number}, event["type"])
            self._number += 1
        return encoded

    def _finished(self) -> dict[str, Any]:
        """The whole response, which the next request can name."""
        if self._request.get("store") is not False:
            self._conversation.add(self.reply_id, [*self._messages, *input_messages(self._items)])
        reason = _INCOMPLETE.get(self._finish_reason or "")
        return self._response("incomplete" if reason else "completed", reason)

    def _response(self, status: str, incomplete_reason: str | None = None) -> dict[str, Any]:
        request = self._request
        repeated = {name: request.get(name, default) for name, default in _REPEATED.items()}
        return {
            "id": self.reply_id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": incomplete_reason} if incomplete_reason else None,
            "output": self._items if status != "in_progress" else [],
            "store": request.get("store") is not False,
            **repeated,
            "usage": _usage(self._usage) if self._usage else None,
        }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage.get("prompt_tokens") or 0,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.get("completion_tokens") or 0,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.get("total_tokens") or 0,
    }


def _custom_input(arguments: str) -> str:
    """The text that a custom tool gets: the policy's argument, or all it wrote if that is no JSON."""
    try:
        return str(json.loads(arguments)[_CUSTOM_INPUT])
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def chat_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request without its messages. Fields that the Responses API does not have are passed on.

    Raises :class:`RefusedError` for what only OpenAI's servers can do.
    """
    refuse_fields(request, _REFUSED)
    if request.get("truncation") not in (None, "disabled"):
        raise RefusedError(400, "truncation is not served: shorten the input", param="truncation")
    if request.get("max_tool_calls") is not None:
        warn_ignored("Responses", "max_tool_calls")
    chat = passed_on(request, _OWN) | chat_tools(request.get("tools"), _tool)
    if (limit := request.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = limit
    if (choice := request.get("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice)
    text = require(dict, request.get("text") or {}, "text")
    if format_ := _response_format(require(dict, text.get("format") or {}, "text.format")):
        chat["response_format"] = format_
    if verbosity := text.get("verbosity"):
        chat["verbosity"] = verbosity
    if effort := require(dict, request.get("reasoning") or {}, "reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    if "message.output_text.logprobs" in require(list, request.get("include") or [], "include"):
        chat |= {"logprobs": True, "top_logprobs": request.get("top_logprobs") or 0}
    return chat


def input_messages(items: Any) -> list[dict[str, Any]]:
    """The chat messages of ``input``. The items that one reply consists of become one assistant's message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(require(list, items, "input")):
        name = f"input[{index}]"
        kind = require(dict, item, name).get("type") or "message"
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
        arguments = json.dumps({_CUSTOM_INPUT: item.get("input")}, ensure_ascii=False)
    function = {"name": item.get("name"), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _reasoning_text(item: Mapping[str, Any], name: str) -> str:
    parts = require(list, item.get("content") or item.get("summary") or [], f"{name}.content")
    return "".join(require(str, require(dict, part, name).get("text"), f"{name}.content.text") for part in parts)


def _joined(content: Any, name: str) -> str:
    parts = read_content(content, name, _part)
    return parts if isinstance(parts, str) else "".join(part.get("text") or "" for part in parts)


def _part(part: Any, name: str) -> dict[str, Any]:
    kind = require(dict, part, name).get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": require(str, part.get("text"), f"{name}.text")}
    if kind == "refusal":
        return {"type": "text", "text": require(str, part.get("refusal"), f"{name}.refusal")}
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
    kind = require(dict, choice, "tool_choice").get("type")
    if kind in ("function", "custom"):
        return _named(choice)
    if kind == "allowed_tools":
        tools = [
            _named(require(dict, tool, "tool_choice.tools"))
            for tool in require(list, choice.get("tools"), "tool_choice")
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
