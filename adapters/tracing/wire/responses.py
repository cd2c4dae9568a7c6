"""OpenAI's Responses API: from a request to a chat request, and from a chat completion or its chunks to a response."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, encode_event
from groundwire.adapters.tracing.wire.chat_request import (
    Part,
    allowed_tools,
    assistant_message,
    call_part,
    chat_tools,
    named_tool,
    read_content,
    renamed,
)
from groundwire.adapters.tracing.wire.parts import BlocksCall
from groundwire.adapters.tracing.wire.request import (
    RefusedError,
    optional,
    require,
    unserved_kind,
    unserved_tool,
    warn_ignored,
    warn_unread,
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
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
"""How the ids of output items begin."""
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_CUSTOM_INPUT = "input"  # the one argument of a custom tool, which the policy sees as a function of a text
_CUSTOM_PARAMETERS = {"type": "object", "properties": {_CUSTOM_INPUT: {"type": "string"}}, "required": [_CUSTOM_INPUT]}
_ORDER = ("thinking", "text", "call")  # of the parts of a reply, which has one text
_ENCRYPTED = "reasoning.encrypted_content"
_ENCODED = "vllm-reasoning-v1."
"""How reasoning begins that is encoded for clients which keep nothing else of it, as by vLLM: nothing is secret."""
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesCall(BlocksCall):
    """A response. A reply's reasoning, text and tool calls become an output item each."""

    path = "responses"
    name = "responses"
    title = "Responses"
    id_prefix = "resp_"
    fields = ("input", "previous_response_id", "prompt")
    own = frozenset({
        "input", "instructions", "previous_response_id", "tools", "tool_choice", "text", "reasoning", "stream",
        "max_output_tokens", "include", "store", "stream_options", "top_logprobs", "max_tool_calls",
        # Facts for OpenAI's servers that do not change a reply:
        "background", "conversation", "context_management", "metadata", "moderation", "prompt", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "truncation", "user",
    })  # fmt: skip
    refused = {
        "background": "a reply is sent on the connection of its request",
        "conversation": "send the conversation as input, or use previous_response_id",
        "prompt": "stored prompts are on OpenAI's servers: send the messages as input",
    }
    ignored = ("max_tool_calls",)
    context = ("instructions", "previous_response_id")

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        super().__init__(request, conversation)
        self._request, self._conversation = request, conversation
        before = conversation.before(request.get("previous_response_id"))
        self._all_messages = [*before, *self.chat["messages"]]
        instructions = request.get("instructions")
        first = [{"role": "system", "content": instructions}] if instructions else []
        self.chat["messages"] = [*first, *self._all_messages]
        self._offered = _offered_tools(request)
        self._items: list[dict[str, Any]] = []
        self._number = 0

    def error_event(self, refused: RefusedError) -> bytes:
        # OpenAI's client reads a nested one, the API's reference has a flat one.
        error = self.error(refused)["error"]
        return self._encoded("error", **{**error, "error": error})

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        self._end(parts)
        return self._response(ended=True)

    def _head_event(self, chunk: Mapping[str, Any]) -> bytes:
        return b"".join(
            self._encoded(f"response.{name}", response=self._response()) for name in ("created", "in_progress")
        )

    def _begin_block(self, part: Part) -> bytes:
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if part.kind == "call":
            tool = self._offered.get(part.name) or {"name": part.name}
            is_custom = tool.get("type") == "custom"
            kind, text = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
            names = {name: tool[name] for name in ("name", "namespace") if tool.get(name)}
            fields = {"call_id": part.id, **names, text: ""}
        elif part.kind == "text":
            kind, fields = "message", {"role": "assistant", "content": []}
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            kind, fields = "reasoning", {"summary": [], "content": []}
        item_id = f"{_PREFIXES[kind]}_{self.exchange.new_id(len(self._items))}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        events = self._item_event("output_item.added", item=item)
        if "content" in item:
            item["content"] = [content]
            events += self._item_event("content_part.added", content_index=0, part=content)
        return events

    def _add_to_block(self, part: Part) -> bytes:
        item = self._items[-1]
        if item["type"] == "custom_tool_call":
            item["input"] = _custom_input(part.text)
            return self._item_event("custom_tool_call_input.delta", delta=item["input"])
        if not part.text:
            return b""
        if part.kind == "call":
            item["arguments"] = part.text
            return self._item_event("function_call_arguments.delta", delta=part.text)
        [content] = item["content"]
        content["text"] += part.text
        fields = {}
        if part.kind == "text":
            fields["logprobs"] = part.content or [] if self.chat.get("logprobs") else []
            content["logprobs"] += fields["logprobs"]
        return self._item_event(f"{content['type']}.delta", content_index=0, delta=part.text, **fields)

    def _end_block(self) -> bytes:
        if not self._items:
            return b""
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            events = self._item_event("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        elif item["type"] == "custom_tool_call":
            events = self._item_event("custom_tool_call_input.done", input=item["input"])
        else:
            [content] = item["content"]
            if item["type"] == "reasoning" and _ENCRYPTED in (self._request.get("include") or ()):
                packed = zlib.compress(content["text"].encode("utf-8", "replace"))
                item["encrypted_content"] = _ENCODED + base64.urlsafe_b64encode(packed).decode()
            done = {key: content[key] for key in ("text", "logprobs") if key in content}
            events = self._item_event(f"{content['type']}.done", content_index=0, **done)
            events += self._item_event("content_part.done", content_index=0, part=content)
        return events + self._item_event("output_item.done", item=item)

    def _end(self, parts: Sequence[Part]) -> bytes:
        return super()._end(parts if parts or self._items else [Part("text")])

    def _last_events(self) -> bytes:
        """The whole response, which the next request can name."""
        if self._request.get("store") is not False:
            self._conversation.add(self.reply_id, [*self._all_messages, *_input_messages(self._items)])
        response = self._response(ended=True)
        return self._encoded(f"response.{response['status']}", response=response)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        item = {} if "item" in fields else {"item_id": self._items[-1]["id"]}
        return self._encoded(f"response.{kind}", output_index=self._index, **item, **fields)

    def _encoded(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return encode_event({**fields, "type": kind, "sequence_number": self._number - 1}, kind)

    def _response(self, *, ended: bool = False) -> dict[str, Any]:
        request, reason = self._request, _INCOMPLETE.get(self._finish_reason())
        return {
            "id": self.reply_id,
            "object": "response",
            "created_at": int(self.exchange.origin.started),
            "model": self._model,
            "status": "in_progress" if not ended else "incomplete" if reason else "completed",
            "error": None,
            "incomplete_details": {"reason": reason} if ended and reason else None,
            "output": self._items if ended else [],
            "store": request.get("store") is not False,
            **{name: request.get(name, default) for name, default in _REPEATED.items()},
            "usage": _usage(self._usage) if self._usage else None,
        }

    @classmethod
    def _options(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        if request.get("truncation") not in (None, "disabled"):
            raise RefusedError(400, "truncation is not served: shorten the input", param="truncation")
        chat = chat_tools(list(_offered_tools(request).values()), _tool)
        chat |= renamed(request, {"max_output_tokens": "max_completion_tokens"})
        if (choice := request.get("tool_choice")) is not None:
            chat["tool_choice"] = _tool_choice(choice)
        text = optional(dict, request, "text")
        if format_ := _response_format(optional(dict, text, "format", "text")):
            chat["response_format"] = format_
        chat |= renamed(text, {"verbosity": "verbosity"})
        chat |= renamed(optional(dict, request, "reasoning"), {"effort": "reasoning_effort"})
        if "message.output_text.logprobs" in optional(list, request, "include"):
            chat |= {"logprobs": True, "top_logprobs": request.get("top_logprobs") or 0}
        return chat

    @classmethod
    def _messages(cls, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        return _input_messages(request.get("input"))


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


def _input_messages(items: Any) -> list[dict[str, Any]]:
    """The chat messages of ``input``. The items that one reply consists of become one assistant's message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    reply: list[Part] = []

    def end_reply() -> None:
        if reply:
            messages.append(assistant_message(reply))
            reply.clear()

    for index, item in enumerate(require(list, items, "input")):
        name = f"input[{index}]"
        kind = require(dict, item, name).get("type") or "message"
        warn_unread(ResponsesCall.title, kind, item)
        if (part := _reply_part(kind, item, name)) is not None:
            last = reply[-1].kind if reply else _ORDER[0]
            if _ORDER.index(part.kind) < _ORDER.index(last) or part.kind == last == "text":
                end_reply()
            reply += [part] if part.text or part.kind != "thinking" else []
            continue
        end_reply()
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": read_content(item.get("content"), f"{name}.content", _part)})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = read_content(item.get("output"), f"{name}.output", _part)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "additional_tools":
            advice = "is not served: send messages, function calls with their outputs, and reasoning"
            raise unserved_kind(name, kind, advice, param="input")
    end_reply()
    return messages


def _reply_part(kind: Any, item: Mapping[str, Any], name: str) -> Part | None:
    """The part of a reply that an item repeats; None for other items."""
    if kind == "message" and item.get("role") == "assistant":
        return Part("text", _joined(item.get("content"), f"{name}.content"))
    if kind == "reasoning":
        return Part("thinking", _reasoning_text(item, name))
    if kind == "function_call":
        return call_part(item.get("call_id"), _flat_name(item), item.get("arguments"))
    if kind == "custom_tool_call":
        return call_part(item.get("call_id"), _flat_name(item), {_CUSTOM_INPUT: item.get("input")})
    return None


def _reasoning_text(item: Mapping[str, Any], name: str) -> str:
    encrypted = item.get("encrypted_content")
    if not item.get("content") and isinstance(encrypted, str):
        if encrypted.startswith(_ENCODED):
            with suppress(ValueError, zlib.error):
                return zlib.decompress(base64.urlsafe_b64decode(encrypted.removeprefix(_ENCODED))).decode()
        warn_ignored(ResponsesCall.title, "reasoning.encrypted_content")
    parts = require(list, item.get("content") or item.get("summary") or [], f"{name}.content")
    return "".join(require(str, require(dict, part, name).get("text"), f"{name}.content.text") for part in parts)


def _flat_name(tool: Mapping[str, Any]) -> Any:
    """The name of a function for the policy, in a namespace as with vLLM."""
    return f"{tool['namespace']}__{tool.get('name')}" if tool.get("namespace") else tool.get("name")


def _offered_tools(request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tools of a request and those that its input adds, by the policy's names for them."""
    offered: dict[str, dict[str, Any]] = {}

    def add(tools: Any, place: str, **namespace: Any) -> None:
        for index, tool in enumerate(require(list, tools, place)):
            warn_unread(ResponsesCall.title, require(dict, tool, f"{place}[{index}]").get("type"), tool)
            if tool.get("type") == "namespace" and not namespace:
                add(tool.get("tools"), f"{place}[{index}].tools", namespace=tool.get("name"))
            else:
                own = {**tool, **namespace}
                offered[str(_flat_name(own))] = own

    add(request.get("tools") or [], "tools")
    for index, item in enumerate(items if isinstance(items := request.get("input"), list) else ()):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            add(item.get("tools") or [], f"input[{index}].tools")
    return offered


def _joined(content: Any, name: str) -> str:
    parts = read_content(content, name, _part)
    return parts if isinstance(parts, str) else "".join(part.get("text") or "" for part in parts)


def _part(part: dict[str, Any], name: str) -> Part:
    kind = part.get("type")
    warn_unread(ResponsesCall.title, kind, part)
    if kind in _TEXT_PARTS:
        return Part("text", require(str, part.get("text"), f"{name}.text"))
    if kind == "refusal":
        return Part("text", require(str, part.get("refusal"), f"{name}.refusal"))
    if kind == "input_image" and part.get("image_url"):
        return Part("image", part["image_url"], content={"detail": part["detail"]} if part.get("detail") else {})
    raise unserved_kind(name, kind, "is not served; send text, or an image's URL", param="input")


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise unserved_tool(f"{name} is of type {kind!r:.60}", "OpenAI", "function or custom tools")
    return {**tool, "name": _flat_name(tool), **({"parameters": _CUSTOM_PARAMETERS} if kind == "custom" else {})}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    kind = require(dict, choice, "tool_choice").get("type")
    if kind in ("function", "custom"):
        return named_tool(_flat_name(choice))
    if kind == "allowed_tools":
        tools = require(list, choice.get("tools"), "tool_choice.tools")
        names = [_flat_name(require(dict, tool, "tool_choice.tools")) for tool in tools]
        return allowed_tools(choice.get("mode"), names)
    raise RefusedError(400, f"tool_choice of type {kind!r:.60} is not served; name a function", param="tool_choice")


def _response_format(format_: Mapping[str, Any]) -> dict[str, Any]:
    kind = format_.get("type", "text")
    if kind == "text":
        return {}
    if kind != "json_schema":
        return dict(format_)
    return {"type": kind, "json_schema": {key: value for key, value in format_.items() if key != "type"}}
