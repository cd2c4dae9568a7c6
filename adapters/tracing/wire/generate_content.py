"""Google's ``generateContent``: from a request to a chat request, and from a chat completion or its chunks to a reply.

Google's servers take the names of fields in both spellings, ``generationConfig`` and ``generation_config``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, encode_event
from groundwire.adapters.tracing.wire.chat_request import (
    CallIds,
    Part,
    allowed_tools,
    call_part,
    chat_tools,
    named_tool,
    read_content,
    read_message,
    refuse_beginning,
    renamed,
    structured,
)
from groundwire.adapters.tracing.wire.parts import PartsCall
from groundwire.adapters.tracing.wire.request import (
    RefusedError,
    optional,
    require,
    unserved_tool,
    warn_ignored,
    warn_unread,
)
from groundwire.tools.files import shorten_repr
from groundwire.tools.secrets import masked_values

_SETTINGS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "candidateCount": "n",
    "maxOutputTokens": "max_tokens",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "stopSequences": "stop",
}
"""Fields of ``generationConfig``, with their names in a chat request."""
_OTHER_SETTINGS = ("responseMimeType", "responseSchema", "responseJsonSchema", "responseModalities")
_MODES = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_OPAQUE = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema", "labels"}
"""Fields whose values have names of the agent's own."""
_RESULT_KEYS = ({"result"}, {"output"}, {"content"})  # how clients wrap a tool's result that is no object


class GenerateContentCall(PartsCall):
    """A reply with one candidate, whose reasoning, text and tool calls are a part each."""

    path = (
        "(?:models|tunedModels|endpoints)/(?P<model>[^/]+):"
        "(?:generateContent|(?P<stream>streamGenerateContent)|(?P<count>countTokens))"
    )
    name = "generate_content"
    title = "generateContent"
    id_prefix = ""
    fields = ("contents", "generateContentRequest")
    count_field = "totalTokens"
    own = frozenset({
        "contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "generateContentRequest", "alt",
        # Facts for Google's servers that do not change a reply:
        "safetySettings", "labels", "serviceTier", "store", "modelArmorConfig",
    })  # fmt: skip
    refused = {"cachedContent": "cached content is on Google's servers: send it in contents"}
    stop_reasons = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
    errors = {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        503: "UNAVAILABLE",
        504: "DEADLINE_EXCEEDED",
    }
    _separator = b"["

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        super().__init__(request, conversation)
        self._is_list = request.get("alt") != "sse"
        if self._is_list:
            self.stream_type = "application/json"

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        status = cls.error_name(refused.status)
        return {"error": {"code": refused.status, "message": str(refused), "status": status}}

    def error_event(self, refused: RefusedError) -> bytes:
        return self._encoded(masked_values(self.error(refused))) + b"]" * self._is_list

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        prompt, cached, sampled = self._token_counts()
        counts = {
            "promptTokenCount": prompt,
            "cachedContentTokenCount": cached,
            "candidatesTokenCount": sampled,
            "totalTokenCount": prompt + sampled,
        }
        reason = self.stop_reasons.get(self._finish_reason(), "STOP")
        return {**self._reply(parts or [Part("text")], finishReason=reason), "usageMetadata": counts}

    def _event(self, part: Part) -> bytes:
        return self._encoded(self._reply([part]))

    def _end(self, parts: Sequence[Part]) -> bytes:
        return self._encoded(self._whole(parts)) + b"]" * self._is_list

    def _encoded(self, reply: Mapping[str, Any]) -> bytes:
        """An event, or without ``alt=sse`` the next item of a list."""
        if not self._is_list:
            return encode_event(reply)
        separator, self._separator = self._separator, b","
        return separator + json.dumps(reply).encode() + b"\n"

    def _reply(self, parts: Sequence[Part], **fields: Any) -> dict[str, Any]:
        content = {"role": "model", "parts": list(map(_part, parts))}
        candidate = {"content": content, "index": 0, **fields}
        return {"candidates": [candidate], "modelVersion": self._model, "responseId": self.reply_id}

    @classmethod
    def _prepared(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        request = _camel_case(request)
        nested = optional(dict, request, "generateContentRequest")  # of a request to count tokens
        request = {**request, **nested, "model": request.get("model")}
        return {**request, **renamed(optional(dict, request, "generationConfig"), _SETTINGS)}

    @classmethod
    def _messages(cls, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        read_part = partial(_read_part, CallIds())
        if system := request.get("systemInstruction"):
            content = read_content(_parts_of(system, "systemInstruction"), "systemInstruction.parts", read_part)
            messages.append({"role": "system", "content": content})
        for index, content in enumerate(require(list, request.get("contents"), "contents")):
            name = f"contents[{index}]"
            role = "assistant" if require(dict, content, name).get("role") == "model" else "user"
            warn_unread(cls.title, "content", content)
            messages += read_message(role, _parts_of(content, name), f"{name}.parts", read_part)
        refuse_beginning(messages, "contents")
        return messages

    @classmethod
    def _options(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        settings = optional(dict, request, "generationConfig")
        for name, value in settings.items():
            if name not in _SETTINGS and name not in _OTHER_SETTINGS and value not in (None, False):
                warn_ignored(cls.title, f"generationConfig.{name}")
        for modality in optional(list, settings, "responseModalities", "generationConfig"):
            if str(modality).upper() != "TEXT":
                raise RefusedError(400, f"responseModalities has {modality!r:.60}: the policy only writes text")
        chat = {**_tools(request), **_response_format(settings)}
        if calling := optional(dict, optional(dict, request, "toolConfig"), "functionCallingConfig", "toolConfig"):
            chat["tool_choice"] = _tool_choice(calling, "toolConfig.functionCallingConfig")
        return chat


def _part(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {"functionCall": {"id": part.id, "name": part.name, "args": part.input}}
    return {"text": part.text, **({"thought": True} if part.kind == "thinking" else {})}


def _camel_case(value: Any) -> Any:
    """A request, or a value in it, with the names of fields as in ``generationConfig``."""
    if isinstance(value, list):
        return list(map(_camel_case, value))
    if not isinstance(value, dict):
        return value
    named = {_camel(name): item for name, item in value.items()}
    return {name: item if name in _OPAQUE else _camel_case(item) for name, item in named.items()}


def _camel(name: str) -> str:
    return re.sub("_([a-z])", lambda match: match[1].upper(), name)


def _parts_of(content: Any, name: str) -> Any:
    """The parts of a content, which may also be a text."""
    if isinstance(content, str):
        return content
    parts = require(dict, content, name).get("parts") or []
    return [parts] if isinstance(parts, dict) else parts


def _read_part(ids: CallIds, part: dict[str, Any], name: str) -> Part:
    warn_unread(GenerateContentCall.title, "part", part)
    if call := optional(dict, part, "functionCall", name):
        warn_unread(GenerateContentCall.title, "functionCall", call)
        return call_part(ids.of_call(call.get("id"), call.get("name")), call.get("name"), call.get("args"))
    if response := optional(dict, part, "functionResponse", name):
        warn_unread(GenerateContentCall.title, "functionResponse", response)
        call_id = ids.of_result(response.get("id"), response.get("name"))
        return Part("result", id=call_id, content=_result(response.get("response")))
    if "text" in part:
        return Part("thinking" if part.get("thought") else "text", require(str, part["text"], f"{name}.text"))
    for field in ("inlineData", "fileData"):
        data = optional(dict, part, field, name)
        if (kind := str(data.get("mimeType"))).startswith("image/"):
            return Part("image", data.get("fileUri") or f"data:{kind};base64,{data.get('data')}")
    if part.keys() <= {"thoughtSignature", "thought"}:
        return Part("thinking")
    fields = ", ".join(part)
    raise RefusedError(400, f"{name} has {fields:.60}: send text, images, function calls and their responses")


def _result(response: Any) -> str:
    """A function's response as text, without the object around one that is none."""
    if isinstance(response, dict) and response.keys() in _RESULT_KEYS:
        [response] = response.values()
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)


def _tools(request: Mapping[str, Any]) -> dict[str, Any]:
    declarations = []
    for index, tool in enumerate(optional(list, request, "tools")):
        for kind in require(dict, tool, f"tools[{index}]"):
            if kind != "functionDeclarations":
                raise unserved_tool(f"tools[{index}] has {kind!r:.60}", "Google", "functionDeclarations")
            declarations += optional(list, tool, kind, f"tools[{index}]")
    return chat_tools(declarations, _tool)


def _tool(declaration: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    warn_unread(GenerateContentCall.title, "functionDeclaration", declaration)
    schema = declaration.get("parametersJsonSchema") or _json_schema(declaration.get("parameters"))
    return {**declaration, "parameters": schema}


def _tool_choice(config: Mapping[str, Any], place: str) -> Any:
    mode = (optional(str, config, "mode", place) or "AUTO").upper()
    if mode not in _MODES:
        raise RefusedError(400, f"{place}.mode must be AUTO, ANY or NONE, not {mode!r:.60}")
    names = optional(list, config, "allowedFunctionNames", place)
    if mode != "ANY" or not names:
        return _MODES[mode]
    return named_tool(names[0]) if len(names) == 1 else allowed_tools("required", names)


def _response_format(settings: Mapping[str, Any]) -> dict[str, Any]:
    if schema := settings.get("responseJsonSchema") or _json_schema(settings.get("responseSchema")):
        return structured(require(dict, schema, "generationConfig.responseSchema"))
    kind = settings.get("responseMimeType") or "text/plain"
    if kind not in ("text/plain", "application/json"):
        advice = "ask for application/json with a responseSchema"
        raise RefusedError(400, f"responseMimeType {shorten_repr(kind)} is not served: {advice}")
    return {"response_format": {"type": "json_object"}} if kind == "application/json" else {}


def _json_schema(schema: Any) -> Any:
    """The JSON schema of Google's: types are in capitals, numbers may be texts, and properties have an order."""
    if isinstance(schema, list):
        return list(map(_json_schema, schema))
    if not isinstance(schema, dict):
        return schema
    schema = {_camel(key): value for key, value in schema.items()}
    order, nullable = schema.pop("propertyOrdering", None), schema.pop("nullable", False)
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            schema[key] = value.lower()
        elif key == "properties" and isinstance(value, dict):
            names = [name for name in order if isinstance(name, str)] if isinstance(order, list) else []
            schema[key] = {name: _json_schema(value[name]) for name in dict.fromkeys([*names, *value]) if name in value}
        elif key in ("items", "anyOf", "additionalProperties"):
            schema[key] = _json_schema(value)
        elif key.startswith(("min", "max")) and isinstance(value, str) and value.isdecimal():
            schema[key] = int(value)
    return {"anyOf": [schema, {"type": "null"}]} if nullable else schema
