"""Bedrock's Converse: from a request to a chat request, and from a chat completion or its chunks to a message.

A stream has the encoding of AWS's event streams.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation
from groundwire.adapters.tracing.wire.parts import BlocksCall, Part, assistant_message, refuse_beginning, tool_call
from groundwire.adapters.tracing.wire.request import (
    RefusedError,
    chat_tools,
    passed_on,
    read_content,
    refuse_fields,
    require,
    warn_ignored,
)
from groundwire.tools.files import parse_json
from groundwire.tools.secrets import masked_values

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "content_filtered",
}
_ERRORS = {
    401: "AccessDeniedException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    429: "ThrottlingException",
    503: "ServiceUnavailableException",
}
_SERVER_ERROR = 500
_STRING = 7
"""The type of a header's value in an event stream."""
_OWN = {
    "messages", "system", "inferenceConfig", "toolConfig", "additionalModelRequestFields", "outputConfig", "input",
    "guardrailConfig", "additionalModelResponseFieldPaths",
    # Facts for AWS's servers that do not change a reply:
    "performanceConfig", "serviceTier", "requestMetadata", "projectIdentifier",
}  # fmt: skip
"""The fields that are not passed on."""
_IGNORED = ("guardrailConfig", "additionalModelResponseFieldPaths")
_REFUSED = {"promptVariables": "stored prompts are on AWS's servers: send the messages"}
_INFERENCE = {"maxTokens": "max_tokens", "temperature": "temperature", "topP": "top_p"}
_CHOICES = {"auto": "auto", "any": "required"}
_ADVICE = "send text, images, tool uses and tool results"


class ConverseCall(BlocksCall):
    """A message. A reply's reasoning, text and tool calls become a content block each."""

    path = "model/(?P<model>[^/]+)/(?:converse|(?P<stream>converse-stream)|(?P<count>count-tokens))"
    name = "converse"
    fields = ("messages", "input")
    count_field = "inputTokens"
    stream_type = "application/vnd.amazon.eventstream"

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        super().__init__(request)
        if asked := request.get("input"):  # of a request to count tokens
            request = {**request, **require(dict, require(dict, asked, "input").get("converse"), "input.converse")}
        self.chat = {"messages": _messages(request), **_options(request)}
        self._started = time.monotonic()
        self._has_begun = False

    @classmethod
    def messages(cls, request: Mapping[str, Any]) -> Any:
        """The chat messages of ``system`` and ``messages``."""
        return _messages(request)

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of a chunk."""
        start = b"" if self._has_begun else _event("messageStart", role="assistant")
        self._has_begun = True
        return start + super().events(chunk)

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        """The error as AWS formats it."""
        return {"code": _error_name(refused.status), "message": str(refused)}

    def error_event(self, refused: RefusedError) -> bytes:
        """The exception in place of an event."""
        name = _error_name(refused.status)
        body = masked_values({"message": str(refused)})
        return _encode({"exception-type": name[0].lower() + name[1:], "message-type": "exception"}, body)

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        message = {"role": "assistant", "content": list(map(_block, parts or [Part("text")]))}
        return {"output": {"message": message}, "stopReason": self._stop_reason(), **self._metadata()}

    def _end(self, parts: Sequence[Part]) -> bytes:
        last = b"".join(map(self._event, parts)) + self._end_block()
        return last + _event("messageStop", stopReason=self._stop_reason()) + _event("metadata", **self._metadata())

    def _begin_block(self, part: Part) -> bytes:
        if part.kind != "call":
            return b""
        start = {"toolUse": {"toolUseId": part.id, "name": part.name}}
        return _event("contentBlockStart", start=start, contentBlockIndex=self._index)

    def _add_to_block(self, part: Part) -> bytes:
        delta: dict[str, Any] = {"text": part.text}
        if part.kind == "call":
            delta = {"toolUse": {"input": json.dumps(part.input, ensure_ascii=False)}}
        elif part.kind == "thinking":
            delta = {"reasoningContent": delta}
        return _event("contentBlockDelta", delta=delta, contentBlockIndex=self._index)

    def _end_block(self) -> bytes:
        return _event("contentBlockStop", contentBlockIndex=self._index) if self._block_kind else b""

    def _stop_reason(self) -> str:
        reason = self._finish_reason()
        return _STOP_REASONS.get(reason, reason)

    def _metadata(self) -> dict[str, Any]:
        prompt, cached, reply = self._token_counts()
        usage = {"inputTokens": prompt - cached, "outputTokens": reply, "totalTokens": prompt + reply}
        usage |= {"cacheReadInputTokens": cached, "cacheWriteInputTokens": 0}
        return {"usage": usage, "metrics": {"latencyMs": int(1000 * (time.monotonic() - self._started))}}


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {"toolUse": {"toolUseId": part.id, "name": part.name, "input": part.input}}
    return {"text": part.text} if part.kind == "text" else {"reasoningContent": {"reasoningText": {"text": part.text}}}


def _error_name(status: int) -> str:
    default = "InternalServerException" if status >= _SERVER_ERROR else "ValidationException"
    return _ERRORS.get(status, default)


def _event(kind: str, **fields: Any) -> bytes:
    return _encode({"event-type": kind, "message-type": "event"}, fields)


def _encode(headers: Mapping[str, str], body: Mapping[str, Any]) -> bytes:
    """A message of an event stream: its lengths, headers and body, with checksums."""
    head = b""
    for name, value in {**headers, "content-type": "application/json"}.items():
        head += struct.pack(f"!B{len(name) + 1}sBH", len(name) + 1, f":{name}".encode(), _STRING, len(value))
        head += value.encode()
    data = json.dumps(body).encode()
    prelude = struct.pack("!II", len(head) + len(data) + 16, len(head))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + head + data
    return message + struct.pack("!I", zlib.crc32(message))


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat messages of a request. Each tool result becomes a message of its own."""
    messages: list[dict[str, Any]] = []
    if system := _without_cache_points(request.get("system") or [], "system"):
        messages.append({"role": "system", "content": read_content(system, "system", _part)})
    for index, message in enumerate(require(list, request.get("messages"), "messages")):
        name = f"messages[{index}].content"
        role = require(dict, message, f"messages[{index}]").get("role")
        blocks = _without_cache_points(message.get("content"), name)
        if role == "assistant":
            messages.append(_assistant_message(blocks, name))
        else:
            messages += _user_messages(role, blocks, name)
    refuse_beginning(messages, "messages")
    return messages


def _without_cache_points(blocks: Any, name: str) -> list[dict[str, Any]]:
    blocks = [require(dict, block, f"{name}[{index}]") for index, block in enumerate(require(list, blocks, name))]
    return [block for block in blocks if "cachePoint" not in block]


def _user_messages(role: Any, blocks: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    messages, rest = [], []
    for index, block in enumerate(blocks):
        if (result := block.get("toolResult")) is not None:
            result = require(dict, result, f"{name}[{index}].toolResult")
            content = read_content(result.get("content") or "", f"{name}[{index}].toolResult.content", _part)
            messages.append({"role": "tool", "tool_call_id": result.get("toolUseId"), "content": content})
        else:
            rest.append(block)
    return [*messages, {"role": role, "content": read_content(rest, name, _part)}] if rest else messages


def _assistant_message(blocks: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        if "text" in block:
            texts.append(require(str, block["text"], f"{name}[{index}].text"))
        elif "toolUse" in block:
            use = require(dict, block["toolUse"], f"{name}[{index}].toolUse")
            calls.append(tool_call(use.get("toolUseId"), use.get("name"), use.get("input")))
        elif "reasoningContent" in block:
            thought = require(dict, block["reasoningContent"], f"{name}[{index}].reasoningContent")
            thought = require(dict, thought.get("reasoningText") or {}, f"{name}[{index}].reasoningText")
            thoughts.append(require(str, thought.get("text") or "", f"{name}[{index}].reasoningText.text"))
        else:
            raise _unknown_block(block, f"{name}[{index}]")
    return assistant_message(texts, thoughts, calls)


def _part(block: Any, name: str) -> dict[str, Any]:
    block = require(dict, block, name)
    if "guardContent" in block:
        block = require(dict, block["guardContent"], f"{name}.guardContent")
        block = block.get("text") if isinstance(block.get("text"), dict) else block
    if "text" in block:
        return {"type": "text", "text": require(str, block["text"], f"{name}.text")}
    if "json" in block:
        return {"type": "text", "text": json.dumps(block["json"], ensure_ascii=False)}
    if "image" in block:
        image = require(dict, block["image"], f"{name}.image")
        data = require(dict, image.get("source"), f"{name}.image.source").get("bytes")
        data = require(str, data, f"{name}.image.source.bytes")
        return {"type": "image_url", "image_url": {"url": f"data:image/{image.get('format')};base64,{data}"}}
    raise _unknown_block(block, name)


def _unknown_block(block: Mapping[str, Any], name: str) -> RefusedError:
    return RefusedError(400, f"{name} has {', '.join(block) or 'nothing':.60}: {_ADVICE}", param="messages")


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request without its messages. The model's own fields are passed on.

    Raises :class:`RefusedError` for what only AWS's servers can do.
    """
    refuse_fields(request, _REFUSED)
    for name in _IGNORED:
        if request.get(name):
            warn_ignored("Converse", name)
    config = require(dict, request.get("inferenceConfig") or {}, "inferenceConfig")
    known = {chat_name: config.get(name) for name, chat_name in _INFERENCE.items()}
    model_fields = require(dict, request.get("additionalModelRequestFields") or {}, "additionalModelRequestFields")
    chat = passed_on({**model_fields, **request, **known}, _OWN)
    if stop := config.get("stopSequences"):
        chat["stop"] = stop
    tools = require(dict, request.get("toolConfig") or {}, "toolConfig")
    chat |= chat_tools(_without_cache_points(tools.get("tools") or [], "toolConfig.tools"), _tool)
    for kind, choice in require(dict, tools.get("toolChoice") or {}, "toolConfig.toolChoice").items():
        if kind == "tool":
            tool = require(dict, choice, "toolConfig.toolChoice.tool").get("name")
            chat["tool_choice"] = {"type": "function", "function": {"name": tool}}
        elif kind in _CHOICES:
            chat["tool_choice"] = _CHOICES[kind]
        else:
            raise RefusedError(400, f"toolConfig.toolChoice must be auto, any or tool, not {kind!r:.60}")
    output = require(dict, request.get("outputConfig") or {}, "outputConfig")
    if effort := output.get("effort"):
        chat["reasoning_effort"] = effort
    return chat | _response_format(output.get("textFormat"))


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if "toolSpec" not in tool:
        kind = ", ".join(tool)
        raise RefusedError(
            400,
            f"{name} has {kind!r:.60}, which AWS runs on its own servers; offer toolSpec, which the agent runs itself",
            param="tools",
        )
    spec = require(dict, tool["toolSpec"], f"{name}.toolSpec")
    return {**spec, "parameters": require(dict, spec.get("inputSchema"), f"{name}.toolSpec.inputSchema").get("json")}


def _response_format(text_format: Any) -> dict[str, Any]:
    """The field for structured output, whose schema is JSON in a text."""
    if not text_format:
        return {}
    name = "outputConfig.textFormat.structure"
    structure = require(dict, require(dict, text_format, "outputConfig.textFormat").get("structure"), name)
    definition = require(dict, structure.get("jsonSchema"), f"{name}.jsonSchema")
    try:
        schema = parse_json(require(str, definition.get("schema"), f"{name}.jsonSchema.schema"))
    except ValueError as error:
        raise RefusedError(400, f"{name}.jsonSchema.schema is not JSON: {error!s:.100}") from error
    json_schema = {"name": definition.get("name") or "output", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}
