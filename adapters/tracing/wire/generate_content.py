"""Google's ``generateContent``: from a request to a chat request, and from a chat completion or its chunks to a reply.

Google's servers take the names of fields in both spellings, ``generationConfig`` and ``generation_config``.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, encode_event
from groundwire.adapters.tracing.wire.parts import (
    CallIds,
    Part,
    PartsCall,
    assistant_message,
    refuse_beginning,
    tool_call,
)
from groundwire.adapters.tracing.wire.request import (
    RefusedError,
    chat_tools,
    passed_on,
    read_content,
    refuse_fields,
    require,
    warn_ignored,
)
from groundwire.tools.files import shorten_repr
from groundwire.tools.secrets import masked_values

_FINISH_REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_SERVER_ERROR = 500
_OWN = {
    "contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "generateContentRequest", "alt",
    # Facts for Google's servers that do not change a reply:
    "safetySettings", "labels", "serviceTier", "store", "modelArmorConfig",
}  # fmt: skip
"""The fields that are not passed on."""
_REFUSED = {"cachedContent": "cached content is on Google's servers: send it in contents"}
_CONFIG = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "candidateCount": "n",
    "maxOutputTokens": "max_tokens",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
"""Fields of ``generationConfig``, with their names in a chat request."""
_OTHER_CONFIG = ("stopSequences", "responseMimeType", "responseSchema", "responseJsonSchema", "responseModalities")
_MODES = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_OPAQUE = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema", "labels"}
"""Fields whose values have names of the agent's own."""
_RESULT_KEYS = ({"result"}, {"output"}, {"content"})
"""How clients wrap a tool's result that is no object."""


class GenerateContentCall(PartsCall):
    """A reply with one candidate, whose reasoning, text and tool calls are a part each."""

    path = (
        "(?:models|tunedModels|endpoints)/(?P<model>[^/]+):"
        "(?:generateContent|(?P<stream>streamGenerateContent)|(?P<count>countTokens))"
    )
    name = "generate_content"
    fields = ("contents", "generateContentRequest")
    count_field = "totalTokens"

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        super().__init__(request)
        request = _camel_case(request)
        if nested := request.get("generateContentRequest"):  # of a request to count tokens
            request = {**request, **require(dict, nested, "generateContentRequest"), "model": self._model}
        self.chat = {"messages": _messages(request), **_options(request)}
        self.reply_id = uuid.uuid4().hex
        self._is_list = request.get("alt") != "sse"
        self._has_begun = False
        if self._is_list:
            self.stream_type = "application/json"

    @classmethod
    def messages(cls, request: Mapping[str, Any]) -> Any:
        """The chat messages of ``systemInstruction`` and ``contents``."""
        return _messages(_camel_case(request))

    @classmethod
    def error(cls, refused: RefusedError) -> dict[str, Any]:
        """The error as Google formats it."""
        default = "INTERNAL" if refused.status >= _SERVER_ERROR else "INVALID_ARGUMENT"
        status = _STATUSES.get(refused.status, default)
        return {"error": {"code": refused.status, "message": str(refused), "status": status}}

    def error_event(self, refused: RefusedError) -> bytes:
        """The error in place of a reply."""
        return self._encoded(masked_values(self.error(refused))) + b"]" * self._is_list

    def _whole(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        return self._reply(parts or [Part("text")], ended=True)

    def _event(self, part: Part) -> bytes:
        return self._encoded(self._reply([part]))

    def _end(self, parts: Sequence[Part]) -> bytes:
        return self._encoded(self._whole(parts)) + b"]" * self._is_list

    def _encoded(self, reply: Mapping[str, Any]) -> bytes:
        """An event, or without ``alt=sse`` the next item of a list."""
        if not self._is_list:
            return encode_event(reply)
        separator = b"," if self._has_begun else b"["
        self._has_begun = True
        return separator + json.dumps(reply).encode() + b"\n"

    def _reply(self, parts: Sequence[Part], *, ended: bool = False) -> dict[str, Any]:
        """A whole reply, or the next piece of one."""
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(map(_part, parts))}, "index": 0}
        reply = {"candidates": [candidate], "modelVersion": self._model, "responseId": self.reply_id}
        if ended:
            candidate["finishReason"] = _FINISH_REASONS.get(self._finish_reason(), "STOP")
            prompt, cached, sampled = self._token_counts()
            reply["usageMetadata"] = {
                "promptTokenCount": prompt,
                "cachedContentTokenCount": cached,
                "candidatesTokenCount": sampled,
                "totalTokenCount": prompt + sampled,
            }
        return reply


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


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat messages of a request. Each function's response becomes a message of its own."""
    messages: list[dict[str, Any]] = []
    if system := request.get("systemInstruction"):
        parts = _parts_of(system, "systemInstruction")
        messages.append({"role": "system", "content": read_content(parts, "systemInstruction.parts", _read_part)})
    ids = CallIds()
    for index, content in enumerate(require(list, request.get("contents"), "contents")):
        name = f"contents[{index}]"
        parts = _parts_of(content, name)
        if require(dict, content, name).get("role") == "model":
            messages.append(_assistant_message(parts, f"{name}.parts", ids))
        else:
            messages += _user_messages(parts, f"{name}.parts", ids)
    refuse_beginning(messages, "contents")
    return messages


def _parts_of(content: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a content, which may also be a text."""
    if isinstance(content, str):
        return [{"text": content}]
    parts = require(dict, content, name).get("parts") or []
    parts = [parts] if isinstance(parts, dict) else require(list, parts, f"{name}.parts")
    return [require(dict, part, f"{name}.parts[{index}]") for index, part in enumerate(parts)]


def _user_messages(parts: Sequence[dict[str, Any]], name: str, ids: CallIds) -> list[dict[str, Any]]:
    messages, rest = [], []
    for index, part in enumerate(parts):
        if (response := part.get("functionResponse")) is not None:
            response = require(dict, response, f"{name}[{index}].functionResponse")
            call_id = ids.of_result(response.get("id"), response.get("name"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _result(response.get("response"))})
        else:
            rest.append(part)
    return [*messages, {"role": "user", "content": read_content(rest, name, _read_part)}] if rest else messages


def _result(response: Any) -> str:
    """A function's response as text, without the object around one that is none."""
    if isinstance(response, dict) and response.keys() in _RESULT_KEYS:
        [response] = response.values()
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)


def _assistant_message(parts: Sequence[dict[str, Any]], name: str, ids: CallIds) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for index, part in enumerate(parts):
        if (call := part.get("functionCall")) is not None:
            call = require(dict, call, f"{name}[{index}].functionCall")
            calls.append(tool_call(ids.of_call(call.get("id"), call.get("name")), call.get("name"), call.get("args")))
        elif "text" in part:
            (thoughts if part.get("thought") else texts).append(require(str, part["text"], f"{name}[{index}].text"))
        elif not part.keys() <= {"thoughtSignature", "thought"}:
            raise _unknown_part(part, f"{name}[{index}]")
    return assistant_message(texts, thoughts, calls)


def _read_part(part: Any, name: str) -> dict[str, Any]:
    if "text" in part:
        return {"type": "text", "text": require(str, part["text"], f"{name}.text")}
    for field in ("inlineData", "fileData"):
        data = require(dict, part.get(field) or {}, f"{name}.{field}")
        if (kind := str(data.get("mimeType"))).startswith("image/"):
            return {
                "type": "image_url",
                "image_url": {"url": data.get("fileUri") or f"data:{kind};base64,{data.get('data')}"},
            }
    raise _unknown_part(part, name)


def _unknown_part(part: Mapping[str, Any], name: str) -> RefusedError:
    fields = ", ".join(part)
    return RefusedError(400, f"{name} has {fields:.60}: send text, images, function calls and their responses")


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request without its messages. Fields that Google's API does not have are passed on.

    Raises :class:`RefusedError` for what only Google's servers can do.
    """
    refuse_fields(request, _REFUSED)
    config = require(dict, request.get("generationConfig") or {}, "generationConfig")
    for name, value in config.items():
        if name not in _CONFIG and name not in _OTHER_CONFIG and value not in (None, False):
            warn_ignored("generateContent", f"generationConfig.{name}")
    known = {chat_name: config.get(name) for name, chat_name in _CONFIG.items()}
    chat = passed_on({**request, **known}, _OWN) | _tools(request.get("tools"))
    if stop := config.get("stopSequences"):
        chat["stop"] = stop
    for modality in require(list, config.get("responseModalities") or [], "generationConfig.responseModalities"):
        if str(modality).upper() != "TEXT":
            raise RefusedError(400, f"responseModalities has {modality!r:.60}: the policy only writes text")
    tool_config = require(dict, request.get("toolConfig") or {}, "toolConfig")
    if calling := tool_config.get("functionCallingConfig"):
        chat |= _tool_choice(require(dict, calling, "toolConfig.functionCallingConfig"))
    return chat | _response_format(config)


def _tools(tools: Any) -> dict[str, Any]:
    declarations = []
    for index, tool in enumerate(require(list, tools or [], "tools")):
        for kind, value in require(dict, tool, f"tools[{index}]").items():
            if kind != "functionDeclarations":
                raise RefusedError(
                    400,
                    f"tools[{index}] has {kind!r:.60}, which Google runs on its own servers; offer "
                    "functionDeclarations, which the agent runs itself",
                    param="tools",
                )
            declarations += require(list, value or [], f"tools[{index}].{kind}")
    return chat_tools(declarations, _tool)


def _tool(declaration: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    schema = declaration.get("parametersJsonSchema") or _json_schema(declaration.get("parameters"))
    return {**declaration, "parameters": schema}


def _tool_choice(config: Mapping[str, Any]) -> dict[str, Any]:
    mode = require(str, config.get("mode") or "AUTO", "toolConfig.functionCallingConfig.mode").upper()
    if mode not in _MODES:
        raise RefusedError(400, f"toolConfig.functionCallingConfig.mode must be AUTO, ANY or NONE, not {mode!r:.60}")
    names = require(
        list, config.get("allowedFunctionNames") or [], "toolConfig.functionCallingConfig.allowedFunctionNames"
    )
    named = [{"type": "function", "function": {"name": name}} for name in names]
    if mode == "ANY" and len(named) == 1:
        return {"tool_choice": named[0]}
    if mode == "ANY" and named:
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}}
    return {"tool_choice": _MODES[mode]}


def _response_format(config: Mapping[str, Any]) -> dict[str, Any]:
    schema = config.get("responseJsonSchema") or _json_schema(config.get("responseSchema"))
    if schema:
        json_schema = {"name": "output", "schema": require(dict, schema, "generationConfig.responseSchema")}
        return {"response_format": {"type": "json_schema", "json_schema": json_schema}}
    kind = config.get("responseMimeType") or "text/plain"
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
