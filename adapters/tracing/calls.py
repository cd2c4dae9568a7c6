"""A call is one request to the policy and what it sampled; in the store it is one span.

Token ids are packed (base64 of uint32): as JSON they would be a fifth larger and thirty times slower to read, and they
are most of a span. Messages stay JSON text until somebody asks: training never reads them, so it never pays for them.
Logprobs are float32, which is what the servers compute them in.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from groundwire.adapters.tracing import semconv as names

if TYPE_CHECKING:
    from agentlightning.types import Span

__all__ = ["LLMCall", "check_ids", "from_span", "is_call_span", "to_json", "to_span"]

_UINT32 = "I" if array("I").itemsize == 4 else "L"
_OK = range(200, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMCall:
    """One request to the policy, as the proxy saw it.

    ``prompt_ids`` and ``response_ids`` are what the server read and sampled; ``logprobs`` has one value for each
    response id (natural log, under the sampling weights). A failed call has a ``status`` outside 2xx or an ``error``.
    """

    rollout_id: str
    attempt_id: str
    sequence: int
    """The store's number of the request's arrival: it orders the calls of a rollout."""
    agent: str = ""
    model: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    weights_version: int | None = None
    """Which weights answered, where the server says so; where they changed under the reply, those of its last token."""
    first_weights_version: int | None = None
    """Those of its first token, where the server tells them apart."""
    started: float = 0.0
    """Seconds since the epoch: the request's arrival."""
    ended: float = 0.0
    """Seconds since the epoch: the reply's last byte."""
    status: int = 200
    """HTTP status that the agent got."""
    error: str = ""
    reward: float | None = None
    """What the agent emitted after this call and before the next; no part of the call's own span."""
    prompt_tokens: int = 0
    """Where the server sent no ids: its own count, if it gave one."""
    response_tokens: int = 0
    """The same of the reply."""
    messages_json: str = "[]"
    tools_json: str = ""
    reply_json: str = ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The request's messages."""
        return json.loads(self.messages_json)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The request's tool definitions; empty where there are none."""
        return json.loads(self.tools_json) if self.tools_json else []

    @property
    def reply(self) -> dict[str, Any]:
        """The assistant's message; empty where the call failed."""
        return json.loads(self.reply_json) if self.reply_json else {}

    @property
    def untrainable_reason(self) -> str:
        """Why this call cannot be trained on, in words; empty where it can."""
        if self.error or self.status not in _OK:
            return f"failed with status {self.status}: {self.error}"
        if not self.prompt_ids or not self.response_ids:
            return "the server sent no token ids"
        if len(self.logprobs) != len(self.response_ids):
            return f"{len(self.response_ids)} sampled tokens but {len(self.logprobs)} logprobs"
        if not all(map(math.isfinite, self.logprobs)):
            return "a logprob is not a finite number"
        return ""


def check_ids(values: Iterable[int]) -> list[int]:
    """``values`` as a list. Raises ``TypeError`` or ``OverflowError`` where one is no unsigned 32-bit integer."""
    return array(_UINT32, values).tolist()


def to_json(value: Any) -> str:
    """``value`` as JSON that any store accepts: readable, but escaped where it holds half a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def to_span(call: LLMCall) -> Span:
    """The one span of a call. Every attribute is a str, an int or a list of str: what a store takes, always."""
    from agentlightning.types import Span, TraceStatus

    values: dict[str, Any] = {
        names.OPERATION: "chat",
        names.REQUEST_MODEL: _text(call.model),
        names.AGENT: _text(call.agent),
        names.INPUT_MESSAGES: call.messages_json,
        names.FINISH_REASONS: [_text(call.finish_reason)],
        names.INPUT_TOKENS: len(call.prompt_ids) or call.prompt_tokens,
        names.OUTPUT_TOKENS: len(call.response_ids) or call.response_tokens,
        names.STATUS: call.status,
        names.PROMPT_IDS: _pack(_UINT32, call.prompt_ids),
        names.RESPONSE_IDS: _pack(_UINT32, call.response_ids),
        names.LOGPROBS: _pack("f", call.logprobs),
    }
    optional = {
        names.TOOLS: call.tools_json,
        names.OUTPUT_MESSAGES: call.reply_json,
        names.ERROR: _text(call.error),
    }
    values.update({name: value for name, value in optional.items() if value})
    if call.weights_version is not None:
        values[names.WEIGHTS_VERSION] = call.weights_version
    if call.first_weights_version is not None:
        values[names.FIRST_WEIGHTS_VERSION] = call.first_weights_version
    failed = bool(call.error) or call.status not in _OK
    return Span.from_attributes(
        attributes=values,
        rollout_id=call.rollout_id,
        attempt_id=call.attempt_id,
        sequence_id=call.sequence,
        name=names.SPAN_NAME,
        start_time=call.started,
        end_time=call.ended,
        status=TraceStatus(status_code="ERROR", description=_text(call.error)) if failed else None,
    )


def is_call_span(span: Any) -> bool:
    """Whether a span of the store is a call's: others are rewards, or a framework's own."""
    return names.PROMPT_IDS in (span.attributes or {})


def from_span(span: Any) -> LLMCall:
    """The call that :func:`to_span` wrote. ``span`` is Agent Lightning's Span, or anything with its fields."""
    get = span.attributes.get
    ids = _unpack(_UINT32, get(names.PROMPT_IDS)), _unpack(_UINT32, get(names.RESPONSE_IDS, ""))
    return LLMCall(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        sequence=span.sequence_id,
        agent=get(names.AGENT, ""),
        model=get(names.REQUEST_MODEL, ""),
        prompt_ids=ids[0],
        response_ids=ids[1],
        prompt_tokens=0 if ids[0] else get(names.INPUT_TOKENS, 0),
        response_tokens=0 if ids[1] else get(names.OUTPUT_TOKENS, 0),
        logprobs=_unpack("f", get(names.LOGPROBS, "")),
        finish_reason="".join(get(names.FINISH_REASONS, ())),
        weights_version=get(names.WEIGHTS_VERSION),
        first_weights_version=get(names.FIRST_WEIGHTS_VERSION),
        started=span.start_time or 0.0,
        ended=span.end_time or 0.0,
        status=get(names.STATUS, 200),
        error=get(names.ERROR, ""),
        messages_json=get(names.INPUT_MESSAGES, "[]"),
        tools_json=get(names.TOOLS, ""),
        reply_json=get(names.OUTPUT_MESSAGES, ""),
    )


def _pack(typecode: str, values: Sequence[float]) -> str:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode("ascii")


def _unpack(typecode: str, text: str) -> list[Any]:
    packed = array(typecode)
    packed.frombytes(base64.b64decode(text))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()
