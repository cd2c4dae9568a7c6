"""Requests of agents: how they are read, which of their fields reach the policy, what it is asked, and the refusal that
each wire API formats.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

from groundwire.adapters._types import AGENT_HEADER
from groundwire.tools.files import parse_json, shorten_repr

_log = logging.getLogger(__name__)
SESSION_HEADER = "x-session-id"
"""The header with the rollout of a request, for a server or for a router in front of several."""
ERROR_HEADER = "x-error-code"
"""The header with the code of an error, for which most APIs have no field."""
RAW_PROMPT = "raw_prompt"
"""The field of chat requests with the prompt of a legacy completion."""
CONSTRAINTS = (  # vLLM's own fields
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids",
    "bad_words", "logit_bias",
)  # fmt: skip
_MAX_CHOICES = 128
_KINDS: Mapping[type, str] = {list: "a list", dict: "an object", str: "text"}
T = TypeVar("T")
_READ: Mapping[str, Mapping[str, str]] = {
    "chat completions": {
        "message": "role content name status",
        "assistant message": "role content name status tool_calls reasoning_content reasoning thinking "
        "thinking_blocks reasoning_details",
        "text": "text",
        "input_text": "text",
        "output_text": "text",
        "refusal": "refusal",
    },
    "Responses": {
        "message": "role content status",
        "function_call": "name namespace arguments status",
        "custom_tool_call": "name namespace input status",
        "function_call_output": "output name namespace status",
        "custom_tool_call_output": "output name namespace status",
        "reasoning": "content summary encrypted_content status",
        "additional_tools": "role tools",
        "input_text": "text",
        "output_text": "text",
        "refusal": "refusal",
        "input_image": "image_url detail",
        "function": "name namespace description parameters strict",
        "custom": "name namespace description",
        "namespace": "name tools",
    },
    "Messages": {
        "message": "role content",
        "text": "text",
        "thinking": "thinking",
        "redacted_thinking": "",
        "image": "source",
        "tool_use": "name input",
        "tool_result": "content",
        "tool": "name description input_schema strict",
    },
    "generateContent": {
        "content": "role parts",
        "part": "text thought functionCall functionResponse inlineData fileData",
        "functionCall": "name args",
        "functionResponse": "name response",
        "functionDeclaration": "name description parameters parametersJsonSchema",
    },
    "Converse": {
        "message": "role content",
        "reasoningContent": "reasoningText",
        "reasoningText": "text",
        "toolUse": "name input",
        "toolResult": "content",
        "toolSpec": "name description inputSchema strict",
    },
    "Ollama": {
        "message": "role content images thinking tool_calls tool_name name",
        "tool_call": "function",
        "function": "name description arguments parameters",
    },
}
_HARMLESS = {
    "type", "id", "call_id", "tool_use_id", "toolUseId", "tool_call_id", "index", "caller", "annotations", "citations",
    "logprobs", "cache_control", "prompt_cache_breakpoint", "signature", "thoughtSignature", "object", "weight",
    "provider_specific_fields",
}  # fmt: skip
"""Facts for clients, and for the providers' servers."""
_KNOWN = {(api, kind): _HARMLESS.union(names.split()) for api, kinds in _READ.items() for kind, names in kinds.items()}
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {}, "success")
_MAX_WARNINGS = 100  # agents choose the names


class RefusedError(Exception):
    """A request that is answered with ``status`` and a message.

    ``code`` is an error code of OpenAI's API (the default is the status); ``param`` is the field at fault.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API formats it, so that every client raises its own error type."""
        kind = "invalid_request_error" if self.status in range(400, 500) else "upstream_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code or self.status}
        return {"error": error}


def require(kind: type[T], value: Any, name: str) -> T:
    """``value``, the field ``name``, if it is of ``kind``, list, dict or str. Raises :class:`RefusedError`."""
    if not isinstance(value, kind):
        raise RefusedError(400, f"{name} must be {_KINDS[kind]}, not {shorten_repr(value)}", param=name)
    return value


def optional(kind: type[T], holder: Mapping[str, Any], field: str, place: str = "") -> T:
    """The ``field`` of ``holder``, whose own name is ``place``; empty without it. Raises :class:`RefusedError`."""
    return require(kind, holder.get(field) or kind(), f"{place}.{field}" if place else field)


def unserved_tool(what: str, provider: str, offer: str) -> RefusedError:
    """The refusal of a tool of the provider's."""
    advice = f"runs on its own servers; offer {offer}, which the agent runs itself"
    return RefusedError(400, f"{what}, which {provider} {advice}", param="tools")


def unserved_kind(name: str, kind: Any, advice: str, *, param: str | None = None) -> RefusedError:
    """The refusal of a part of a request, by its type."""
    return RefusedError(400, f"{name} is of type {kind!r:.60}, which {advice}", param=param)


def refuse_fields(request: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raise :class:`RefusedError` for a field of ``refused``, whose values say why, or what to do instead."""
    for name, advice in refused.items():
        if request.get(name):
            raise RefusedError(400, f"{name} is not served: {advice}", param=name)


@functools.cache
def warn_ignored(api: str, field: str) -> None:
    """Warn once that the policy cannot honour a field of requests."""
    _log.warning("agents send the field %s of the %s API, which has no effect on the policy", field, api)


def warn_unread(api: str, kind: Any, fields: Mapping[str, Any]) -> None:
    """Warn once for each of the ``fields`` of a known ``kind`` that is set and has no effect on the policy."""
    known = _KNOWN.get((api, kind)) if isinstance(kind, str) else None
    if known is None or fields.keys() <= known:
        return
    for name in sorted(fields.keys() - known):
        if fields[name] not in _NEUTRAL and warn_ignored.cache_info().currsize < _MAX_WARNINGS:
            warn_ignored(api, f"{kind}.{name:.60}")


def read_request(body: bytes) -> dict[str, Any]:
    """Parse a request. Raises :class:`RefusedError`."""
    try:
        payload = parse_json(body)
    except ValueError as error:
        raise RefusedError(400, f"the request is not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise RefusedError(400, f"the request is a JSON {type(payload).__name__}, not an object")
    return payload


def choices_of(chat: Mapping[str, Any]) -> int:
    """The number of choices that a chat request asks for. Raises :class:`RefusedError` for an unusable one."""
    n = chat.get("n")
    if n is None:
        return 1
    if not isinstance(n, int) or not 1 <= n <= _MAX_CHOICES:
        raise RefusedError(400, f"n must be a number from 1 to {_MAX_CHOICES}, not {shorten_repr(n)}", param="n")
    return n


def calling_agent(headers: Mapping[str, str]) -> str:
    """The name of the calling agent: our header, else the ``agent`` entry of W3C baggage, else empty.

    ``headers`` must ignore case.
    """
    if AGENT_HEADER in headers:
        return unquote(headers[AGENT_HEADER])
    for entry in headers.get("baggage", "").split(","):
        key, _, value = entry.partition(";")[0].partition("=")
        if key.strip() == "agent":
            return unquote(value.strip())
    return ""


def traced_request(request: Mapping[str, Any], *, model: str | None, ids: bool = True) -> dict[str, Any]:
    """The request to send on: the agent's, which also asks for token ids and logprobs if ``ids`` is true, and a stream
    for its usage, which shows whether ids were lost.
    """
    sent = {**request, **({"return_token_ids": True, "logprobs": True} if ids else {})}
    options = request.get("stream_options") or {}
    if ids and request.get("stream") is True and isinstance(options, Mapping):
        sent["stream_options"] = {**options, "include_usage": True}
    if RAW_PROMPT in sent:  # the legacy API, whose logprobs are a number
        del sent["messages"]
        sent |= {"prompt": sent.pop(RAW_PROMPT), "logprobs": 1 if sent["logprobs"] else None}
    if model is not None:
        sent["model"] = model
    if sent.get("top_logprobs", 0) is None:  # with null, vLLM streams no logprobs at all
        del sent["top_logprobs"]
    return sent


def wants_usage(request: Mapping[str, Any]) -> bool:
    """Whether the agent asks for the usage of a stream, or in a way that is not known."""
    options = request.get("stream_options") or {}
    return not isinstance(options, Mapping) or bool(options.get("include_usage"))


def is_constrained(request: Mapping[str, Any]) -> bool:
    """Whether a server that honours the request samples from fewer tokens than the model's whole vocabulary."""
    choice, format_ = request.get("tool_choice"), request.get("response_format")
    if isinstance(choice, Mapping):
        choice = (choice.get("allowed_tools") or {}).get("mode", "required")
    if isinstance(format_, Mapping):
        format_ = format_.get("type")
    return (
        choice not in (None, "none", "auto")
        or format_ not in (None, "text")
        or any(request.get(name) for name in CONSTRAINTS)
    )
