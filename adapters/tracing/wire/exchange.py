"""One request to the policy and its reply, and the LLM call in it: a chat completion with the token ids of vLLM.

A whole reply has ``prompt_token_ids`` at the top level and ``token_ids`` in its choice. A stream has
``prompt_token_ids`` in its first chunk and ``token_ids`` beside each ``delta``. Replies are read after the agent has
them, and reading never raises: a reply that cannot be read is a failed call.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from groundwire.adapters.tracing.calls import UNKNOWN_GRAMMAR, LLMCall, pack_body, to_json
from groundwire.adapters.tracing.wire.request import RefusedError, is_constrained
from groundwire.tools.secrets import mask_secrets

CLIENT_GONE = 499
"""The status of a call whose agent left before the reply was complete."""
OnSampled = Callable[[int, Mapping[str, Any]], None]
"""Takes the index of a choice and the fields of its :class:`LLMCall` that a policy in this process has sampled, or only
an ``error``."""
CANCELLED = "cancelled"
"""The finish reason of a reply whose agent left the stream: it ends with the last token that was sent."""
FAILED = "error"
"""The finish reason of a reply that the server could not finish."""
UNFINISHED = f"the policy server ended the reply with finish_reason {FAILED!r}"
_STATUS_OK = 200
_VERSIONS = ("weights_version", "first_weights_version")
_OF_REPLY = {"id", "usage", *_VERSIONS}  # fields of chunks that are of the whole reply
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
    reply_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    recorded: Sequence[LLMCall] = ()
    """What answers it in a replay: the choices of the recorded request."""

    @property
    def origin(self) -> LLMCall:
        """The call whose ids and times are in the reply: this one, or the recorded one."""
        return self.recorded[0] if self.recorded else self

    def new_id(self, place: object, length: int = 32) -> str:
        """The id of what is at ``place`` in the reply, in hexadecimal: the same whenever the reply is written."""
        return hashlib.blake2b(f"{self.origin.reply_key}/{place}".encode(), digest_size=16).hexdigest()[:length]


def has_ended(received: bytes | bytearray, chunk: bytes) -> bool:
    """Whether ``chunk``, the last part of ``received``, brought the stream's ``[DONE]``."""
    return received.find(_DONE, max(0, len(received) - len(chunk) - len(_DONE))) >= 0


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
        "reply_body": pack_body(exchange.body) if exchange.body and not choice else "",
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
    for choice in reply.get("choices") or ():
        message = {"role": "assistant", "content": choice.get("text") or ""}
        logprobs = choice.get("logprobs") or {"tokens": (), "token_logprobs": ()}
        pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        content = [{"token": token, "logprob": logprob} for token, logprob in pairs]
        choices.append({**choice, "message": message, "delta": message, "logprobs": {"content": content}})
    prompt_ids = next((choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids")), None)
    return {**reply, "choices": choices, "prompt_token_ids": prompt_ids}


def read_reply(reply: Mapping[str, Any], index: int = 0) -> dict[str, Any]:
    """The fields of :class:`LLMCall` in a whole reply.

    Raises :class:`RefusedError` for one that the server could not finish, one of :data:`UNREADABLE` for a malformed
    one.
    """
    choice = reply["choices"][index]
    if choice.get("finish_reason") == FAILED:
        raise RefusedError(502, UNFINISHED)
    logprobs = (choice.get("logprobs") or {}).get("content") or ()
    ids = {
        "prompt_ids": array("I", reply.get("prompt_token_ids") or ()).tolist(),  # refuses what are no ids
        "response_ids": array("I", _token_ids(choice)).tolist(),
    }
    return {
        **ids,
        "logprobs": [float(token["logprob"]) for token in logprobs],
        "finish_reason": str(choice.get("finish_reason") or ""),
        "reply_id": str(reply.get("id") or "")[:_MAX_ID],
        "reply_json": to_json(choice["message"]),
        "grammar": str(choice.get("grammar") or ""),
        **{name: reply[name] for name in _VERSIONS if isinstance(reply.get(name), int)},
        **_token_counts(reply, *map(len, ids.values())),
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
    other_ids: list[int] = []
    deltas = CallDeltas()
    choice: dict[str, Any] = {"message": message, "token_ids": token_ids, "logprobs": {"content": logprobs}}
    reply: dict[str, Any] = {"choices": [choice, {"token_ids": other_ids}]}
    for event in EventReader().feed(body + b"\n"):
        for name in _OF_REPLY & event.keys():
            if event[name] is not None:
                reply[name] = event[name]
        if event.get("prompt_token_ids"):
            reply.setdefault("prompt_token_ids", event["prompt_token_ids"])
        for chunk in event.get("choices") or ():  # the event with the usage has none
            if (chunk.get("index") or 0) != index:
                other_ids += chunk.get("token_ids") or ()
                continue
            token_ids += chunk.get("token_ids") or ()
            logprobs += (chunk.get("logprobs") or {}).get("content") or ()
            choice["finish_reason"] = chunk.get("finish_reason") or choice.get("finish_reason")
            choice["grammar"] = chunk.get("grammar") or choice.get("grammar")
            _add_delta(message, deltas, chunk.get("delta") or {})
    if deltas.calls:
        message["tool_calls"] = deltas.calls
    if left:
        choice["finish_reason"] = choice.get("finish_reason") or CANCELLED
    if not choice.get("finish_reason"):
        raise RefusedError(502, "the stream ended before the reply was complete")
    return reply


def _add_delta(message: dict[str, Any], deltas: CallDeltas, delta: Mapping[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call_delta in value or ():
                deltas.add(call_delta)
        elif isinstance(value, str) and key != "role":
            message[key] = message.get(key, "") + value


class CallDeltas:
    """The tool calls of a streamed reply, joined from their deltas.

    A delta belongs to the last call of its ``index``. It begins a call if its id is another one, since some servers
    count each call as 0, and without an index also if it has a name.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._indices: list[Any] = []

    def add(self, delta: Mapping[str, Any]) -> None:
        """Add what ``delta`` has."""
        index, call_id, function = delta.get("index"), delta.get("id") or "", delta.get("function") or {}
        name = function.get("name") or ""
        made = (
            self.calls[-1:]
            if index is None
            else [call for known, call in zip(self._indices, self.calls, strict=True) if known == index][-1:]
        )
        if not made or call_id not in ("", made[0]["id"]) or (index is None and name and not call_id):
            made = [{"id": call_id, "type": "function", "function": {"name": "", "arguments": ""}}]
            self.calls += made
            self._indices.append(index)
        joined = made[0]["function"]
        joined["name"] = joined["name"] or name
        joined["arguments"] += function.get("arguments") or ""


def _token_ids(choice: Mapping[str, Any]) -> Sequence[int]:
    """The sampled ids. LiteLLM's proxy passes what OpenAI's choices do not have on in a field of its own."""
    return choice.get("token_ids") or (choice.get("provider_specific_fields") or {}).get("token_ids") or ()


def _token_counts(reply: Mapping[str, Any], prompt_ids: int, response_ids: int) -> dict[str, int]:
    """The server's token counts, where they are not the numbers of ids that it sent."""
    usage, counts = reply.get("usage"), dict[str, int]()
    if isinstance(usage, Mapping):
        sampled = sum(len(_token_ids(choice)) for choice in reply["choices"])
        sent = {"prompt_tokens": ("prompt_tokens", prompt_ids), "response_tokens": ("completion_tokens", sampled)}
        for name, (field_name, ids) in sent.items():
            count = usage.get(field_name)
            if isinstance(count, int) and 0 < count < _MAX_TOKENS and count != ids:
                # The server counts the tokens of all choices together.
                counts[name] = max(1, count - sampled + response_ids) if name == "response_tokens" else count
    return counts


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
