"""OpenAI's Responses API: from a chat completion, whole or in chunks, to a response."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, WireCall, encode_event
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.adapters.tracing.wire.responses_input import CUSTOM_INPUT, chat_options, input_messages

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


class ResponsesCall(WireCall):
    """A response. A reply's reasoning, text and tool calls become an output item each."""

    api = "responses"
    name = "responses"

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
        self._is_open = False
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._number = 0

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
        for part in delta.get("tool_calls") or ():
            events += self._add_tool_call(part)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return events

    def _add_text(self, kind: str, text: str, fields: dict[str, Any]) -> list[_Event]:
        events = [] if self._is_open and self._items[-1]["type"] == kind else self._open_text(kind)
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

    def _add_tool_call(self, part: Mapping[str, Any]) -> list[_Event]:
        function, events = part.get("function") or {}, list[_Event]()
        item = self._items[-1] if self._is_open else {}
        if "call_id" not in item or part.get("id") not in (None, "", item["call_id"]):
            name, self._arguments = function.get("name") or "", ""
            item = {"call_id": part.get("id") or _new_id("call"), "name": name}
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
        self._is_open = True
        return [*events, self._event("response.output_item.added", item=dict(item))]

    def _close(self) -> list[_Event]:
        if not self._is_open:
            return []
        item, self._is_open = self._items[-1], False
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
        return str(json.loads(arguments)[CUSTOM_INPUT])
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
