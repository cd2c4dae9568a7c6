"""One request to the policy and its reply, and the LLM call in it: a chat completion with the token ids of vLLM.

A whole reply has ``prompt_token_ids`` at the top level and ``token_ids`` in its choice. A stream has
``prompt_token_ids`` in its first chunk and ``token_ids`` beside each ``delta``. Replies are read after the agent has
them, and reading never raises: a reply that cannot be read is a failed call.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from groundwire.adapters.tracing.calls import UNKNOWN_GRAMMAR, LLMCall, to_json
from groundwire.adapters.tracing.wire.request import RefusedError, is_constrained
from groundwire.tools.secrets import mask_secrets

CLIENT_GONE = 499
"""The status of a call whose agent left before the reply was complete."""
OnSampled = Callable[[int, Mapping[str, Any]], None]
"""Takes the index of a choice and the fields of its :class:`LLMCall` that a policy in this process has sampled, or only
an ``error``."""
CANCELLED = "cancelled"
"""The finish reason of a reply whose agent left the stream: it ends with the last token that was sent."""
_STATUS_OK = 200
_VERSIONS = ("weights_version", "first_weights_version")
_MAX_TOKENS = 1 << 31  # a larger count is an error of the server's, and stores limit integers
_MAX_ID = 200  # characters
_DONE = b"\ndata: [DONE]"
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""The errors that reading a malformed reply may raise."""


@dataclass(slots=True, kw_only=True)
class HttpExchange(LLMCall):
    """A call whose reply is not parsed yet: the fields that the reply has are empty."""

    sequence: int = 0
    request: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""
    """The reply as the policy server sent it."""
    streamed: bool = False
    choices: int = 1
    """How many the request asks for."""
    sampled: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The arguments of :data:`OnSampled`, from a policy in this process; then there is no ``body``."""


def has_ended(received: bytes | bytearray, chunk: bytes) -> bool:
    """Whether ``chunk``, the last part of ``received``, brought the stream's ``[DONE]``."""
    return _DONE in b"\n" + received[-len(chunk) - len(_DONE) :]


class EventReader:
    """The chat chunks of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self.ended = False
        """Whether ``[DONE]`` has arrived."""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The chunks that ``data`` completes. Raises :class:`RefusedError` for one that is an error, and one of
        :data:`UNREADABLE`.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                text = line[len(b"data:") :].strip()
                if text == b"[DONE]":
                    self.ended = True
                elif not self.ended:
                    chunk = as_chat(parse_reply(text))
                    if "error" in chunk:
                        raise RefusedError(502, error_message(text))
                    yield chunk


def read_exchange(exchange: HttpExchange, choice: int, sequence: int) -> LLMCall:
    """The call of a choice of an exchange. Never raises: a reply that cannot be read becomes the call's ``error``."""
    request, known = exchange.request, {name: getattr(exchange, name) for name in LLMCall.__slots__}
    known |= _read_choice(exchange, choice)
    known |= {
        "sequence": sequence,
        "model": str(request.get("model") or ""),
        "reply_id": exchange.reply_id or known["reply_id"],
        "choice": choice if exchange.choices > 1 else None,
        "messages_json": to_json(request.get("messages") or []),
        "tools_json": to_json(request["tools"]) if request.get("tools") else "",
    }
    return LLMCall(**known)


def _read_choice(exchange: HttpExchange, choice: int) -> dict[str, Any]:
    """The fields of the call that depend on the reply."""
    sampled, is_ok = exchange.sampled.get(choice), {"status": _STATUS_OK, "error": ""}
    left = exchange.status == CLIENT_GONE and exchange.streamed
    if sampled is None and not left and (exchange.error or exchange.status != _STATUS_OK):
        return {"error": exchange.error or error_message(exchange.body)}
    try:
        if sampled is not None:
            return {**is_ok, **sampled, "logprobs": list(map(float, sampled.get("logprobs", ())))}
        if exchange.streamed:
            fields = read_reply(_merge_stream(exchange.body, choice, left=left))
        else:
            fields = read_reply(as_chat(parse_reply(exchange.body)), choice)
    except RefusedError as refused:
        return {**is_ok, "error": str(refused)}
    except UNREADABLE as error:
        return {**is_ok, "error": f"the server's reply cannot be read: {type(error).__name__}: {error}"}
    if left and not fields["response_ids"]:  # before it got a token
        return {}
    if not fields["grammar"] and is_constrained(exchange.request):
        fields["grammar"] = UNKNOWN_GRAMMAR
    limit = exchange.request.get("max_completion_tokens") or exchange.request.get("max_tokens")
    if fields["finish_reason"] == "tool_calls" and len(fields["response_ids"]) == limit:
        fields["finish_reason"] = "length"  # vLLM replaces it if there was a whole call before the cut
    return {**fields, **is_ok}


def parse_reply(body: bytes) -> Any:
    """The value of a server's JSON. Raises one of :data:`UNREADABLE`."""
    try:
        return orjson.loads(body)
    except ValueError:  # Python's own parser also takes lone surrogates, NaN and infinity
        return json.loads(body)


def as_chat(reply: dict[str, Any]) -> dict[str, Any]:
    """A legacy completion, or a chunk of one, as that of a chat; others as they are."""
    if reply.get("object") != "text_completion":
        return reply
    choices = []
    for choice in reply["choices"]:
        message = {"role": "assistant", "content": choice.get("text") or ""}
        logprobs = choice.get("logprobs") or {"tokens": (), "token_logprobs": ()}
        pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        content = [{"token": token, "logprob": logprob} for token, logprob in pairs]
        choices.append({**choice, "message": message, "delta": message, "logprobs": {"content": content}})
    prompt_ids = next((choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids")), None)
    return {**reply, "choices": choices, "prompt_token_ids": prompt_ids}


def read_reply(reply: Mapping[str, Any], index: int = 0) -> dict[str, Any]:
    """The fields of :class:`LLMCall` in a whole reply. Raises one of :data:`UNREADABLE` for a malformed one."""
    choice = reply["choices"][index]
    logprobs = (choice.get("logprobs") or {}).get("content") or ()
    return {
        "prompt_ids": array("I", reply.get("prompt_token_ids") or ()).tolist(),  # refuses what are no ids
        "response_ids": array("I", choice.get("token_ids") or ()).tolist(),
        "logprobs": [float(token["logprob"]) for token in logprobs],
        "finish_reason": str(choice.get("finish_reason") or ""),
        "reply_id": str(reply.get("id") or "")[:_MAX_ID],
        "reply_json": to_json(choice["message"]),
        "grammar": str(choice.get("grammar") or ""),
        **{name: reply[name] for name in _VERSIONS if isinstance(reply.get(name), int)},
        **_token_counts(reply),
    }


def _merge_stream(body: bytes, index: int, *, left: bool) -> dict[str, Any]:
    """A choice of a stream as a whole reply, cut short if the agent has ``left``.

    Raises :class:`RefusedError` if the stream reports an error or is cut off by the server.
    """
    if left:
        body = body.rpartition(b"\n")[0]
    message: dict[str, Any] = {"role": "assistant"}
    token_ids: list[int] = []
    logprobs: list[Any] = []
    choice: dict[str, Any] = {"message": message, "token_ids": token_ids, "logprobs": {"content": logprobs}}
    reply: dict[str, Any] = {"choices": [choice]}
    for event in EventReader().feed(body + b"\n"):
        reply["prompt_token_ids"] = reply.get("prompt_token_ids") or event.get("prompt_token_ids")
        reply |= {name: event[name] for name in ("id", "usage", *_VERSIONS) if event.get(name) is not None}
        for chunk in event.get("choices") or ():  # the event with the usage has none
            if chunk.get("index", 0) != index:
                continue
            token_ids += chunk.get("token_ids") or ()
            logprobs += (chunk.get("logprobs") or {}).get("content") or ()
            choice["finish_reason"] = chunk.get("finish_reason") or choice.get("finish_reason")
            choice["grammar"] = chunk.get("grammar") or choice.get("grammar")
            _add_delta(message, chunk.get("delta") or {})
    if left:
        choice["finish_reason"] = choice.get("finish_reason") or CANCELLED
    if not choice.get("finish_reason"):
        raise RefusedError(502, "the stream ended before the reply was complete")
    return reply


def _add_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call_delta in value or ():
                _add_tool_call(message.setdefault("tool_calls", []), call_delta)
        elif isinstance(value, str) and key != "role":
            message[key] = message.get(key, "") + value


def _add_tool_call(calls: list[dict[str, Any]], call_delta: Mapping[str, Any]) -> None:
    index = call_delta.get("index") or 0
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], call_delta.get("function") or {}
    call["id"] = call["id"] or call_delta.get("id") or ""
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _token_counts(reply: Mapping[str, Any]) -> dict[str, int]:
    """The server's token counts, if it sends no ids."""
    usage = reply.get("usage")
    if reply.get("prompt_token_ids") or not isinstance(usage, Mapping):
        return {}
    counts = {"prompt_tokens": usage.get("prompt_tokens"), "response_tokens": usage.get("completion_tokens")}
    return {name: count for name, count in counts.items() if isinstance(count, int) and 0 < count < _MAX_TOKENS}


def error_message(body: bytes) -> str:
    """The message in an error body: in OpenAI's format, in the flat one of older servers, or the body itself."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed)
        message = error["message"] if isinstance(error, dict) else error
        return str(message)
    except (ValueError, LookupError, TypeError, AttributeError):
        return mask_secrets(body.decode("utf-8", "replace"))[:2000] or "the server sent no message"


def error_code(body: bytes) -> str:
    """The code in an error body in OpenAI's format; else empty."""
    try:
        return str(json.loads(body)["error"]["code"] or "")
    except UNREADABLE:
        return ""
