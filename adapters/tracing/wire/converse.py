"""Bedrock's Converse: from a request to a chat request, and from a chat completion or its chunks to a message.

A stream has the encoding of AWS's event streams.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.wire.chat_request import (
    Part,
    call_part,
    chat_tools,
    chosen_tool,
    read_content,
    renamed,
    structured,
)
from groundwire.adapters.tracing.wire.parts import BlocksCall
from groundwire.adapters.tracing.wire.request import RefusedError, optional, require, unserved_tool, warn_unread
from groundwire.tools.files import parse_json
from groundwire.tools.secrets import masked_values

_STRING = 7  # the type of a header's value in an event stream
_SETTINGS = {"maxTokens": "max_tokens", "temperature": "temperature", "topP": "top_p", "stopSequences": "stop"}
"""Fields of ``inferenceConfig``, with their names in a chat request."""


class ConverseCall(BlocksCall):
    """A message. A reply's reasoning, text and tool calls become a content block each."""

    path = "model/(?P<model>[^/]+)/(?:converse|(?P<stream>converse-stream)|(?P<count>count-tokens))"
    name = "converse"
    title = "Converse"
    fields = ("messages", "input")
    count_field = "inputTokens"
    stream_type = "application/vnd.amazon.eventstream"
    own = frozenset({
        "messages", "system", "inferenceConfig", "toolConfig", "additionalModelRequestFields", "outputConfig", "input",
        "guardrailConfig", "additionalModelResponseFieldPaths",
        # Facts for AWS's servers that do not change a reply:
        "performanceConfig", "serviceTier", "requestMetadata", "projectIdentifier",
    })  # fmt: skip
    ignored = ("guardrailConfig", "additionalModelResponseFieldPaths")
    refused = {"promptVariables": "stored prompts are on AWS's servers: send the messages"}
    stop_reasons = {
        "stop": "end_turn",
        "length": "max_tokens",
        "tool_calls": "tool_use",
        "content_filter": "content_filtered",
    }
    errors = {
        400: "ValidationException",
        401: "AccessDeniedException",
        403: "AccessDeniedException",
        404: "ResourceNotFoundException",
        429: "ThrottlingException",
        500: "InternalServerException",
        503: "ServiceUnavailableException",
    }

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        return {"code": cls.error_name(refused.status), "message": str(refused)}

    def error_event(self, refused: RefusedError) -> bytes:
        name = self.error_name(refused.status)
        body = masked_values({"message": str(refused)})
        return _encode({"exception-type": name[0].lower() + name[1:], "message-type": "exception"}, body)

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        message = {"role": "assistant", "content": list(map(_block, parts or [Part("text")]))}
        return {"output": {"message": message}, "stopReason": self._stop_reason(), **self._metadata()}

    def _head_event(self, chunk: Mapping[str, Any]) -> bytes:
        return _event("messageStart", role="assistant")

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

    def _last_events(self) -> bytes:
        return _event("messageStop", stopReason=self._stop_reason()) + _event("metadata", **self._metadata())

    def _metadata(self) -> dict[str, Any]:
        prompt, cached, reply = self._token_counts()
        usage = {"inputTokens": prompt - cached, "outputTokens": reply, "totalTokens": prompt + reply}
        usage |= {"cacheReadInputTokens": cached, "cacheWriteInputTokens": 0}
        return {"usage": usage, "metrics": {"latencyMs": self._nanoseconds() // 1_000_000}}

    @classmethod
    def _prepared(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        if asked := optional(dict, request, "input"):  # of a request to count tokens
            request = {**request, **require(dict, asked.get("converse"), "input.converse")}
        settings = renamed(optional(dict, request, "inferenceConfig"), _SETTINGS)
        return {**optional(dict, request, "additionalModelRequestFields"), **request, **settings}

    @classmethod
    def _part(cls, block: dict[str, Any], name: str) -> Part | None:
        kind, value = next(iter(block.items()), ("nothing", None))
        if kind == "cachePoint":
            return None
        if kind == "text":
            return Part(kind, require(str, value, f"{name}.text"))
        if kind == "json":
            return Part("text", json.dumps(value, ensure_ascii=False))
        if kind == "guardContent":
            guarded = require(dict, value, f"{name}.{kind}")
            text = optional(dict, guarded, "text", f"{name}.{kind}").get("text")
            return cls._part(guarded if text is None else {"text": text}, f"{name}.{kind}")
        if kind in ("image", "reasoningContent", "toolUse", "toolResult"):
            return cls._structure(kind, require(dict, value, f"{name}.{kind}"), f"{name}.{kind}")
        raise RefusedError(400, f"{name} has {kind:.60}: send text, images, tool uses and tool results")

    @classmethod
    def _structure(cls, kind: str, fields: Mapping[str, Any], name: str) -> Part:
        if kind == "image":
            data = optional(dict, fields, "source", name).get("bytes")
            data = require(str, data, f"{name}.source.bytes")
            return Part(kind, f"data:image/{fields.get('format')};base64,{data}")
        warn_unread(cls.title, kind, fields)
        if kind == "reasoningContent":
            thought = optional(dict, fields, "reasoningText", name)
            return Part("thinking", optional(str, thought, "text", f"{name}.reasoningText"))
        if kind == "toolUse":
            return call_part(fields.get("toolUseId"), fields.get("name"), fields.get("input"))
        content = read_content(fields.get("content") or "", f"{name}.content", cls._part)
        return Part("result", id=fields.get("toolUseId"), content=content)

    @classmethod
    def _options(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        config = optional(dict, request, "toolConfig")
        chat = chat_tools(config.get("tools"), _tool)
        for kind, choice in optional(dict, config, "toolChoice", "toolConfig").items():
            name = require(dict, choice, f"toolConfig.toolChoice.{kind}").get("name")
            chat |= chosen_tool(kind, name, "toolConfig.toolChoice")
        output = optional(dict, request, "outputConfig")
        if text_format := optional(dict, output, "textFormat", "outputConfig"):
            chat |= _response_format(text_format)
        return chat | renamed(output, {"effort": "reasoning_effort"})


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {"toolUse": {"toolUseId": part.id, "name": part.name, "input": part.input}}
    return {"text": part.text} if part.kind == "text" else {"reasoningContent": {"reasoningText": {"text": part.text}}}


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


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    if "cachePoint" in tool:
        return None
    if "toolSpec" not in tool:
        raise unserved_tool(f"{name} has {', '.join(tool)!r:.60}", "AWS", "toolSpec")
    spec = require(dict, tool["toolSpec"], f"{name}.toolSpec")
    warn_unread(ConverseCall.title, "toolSpec", spec)
    return {**spec, "parameters": require(dict, spec.get("inputSchema"), f"{name}.toolSpec.inputSchema").get("json")}


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any]:
    """The field for structured output, whose schema is JSON in a text."""
    name = "outputConfig.textFormat.structure"
    structure = require(dict, text_format.get("structure"), name)
    definition = require(dict, structure.get("jsonSchema"), f"{name}.jsonSchema")
    try:
        schema = parse_json(require(str, definition.get("schema"), f"{name}.jsonSchema.schema"))
    except ValueError as error:
        raise RefusedError(400, f"{name}.jsonSchema.schema is not JSON: {error!s:.100}") from error
    return structured(schema, definition.get("name") or "output")
