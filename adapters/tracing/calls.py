"""An LLM call: one request to the policy and its reply. In the store it is one span.

Token ids are most of a span. They are packed as base64 of little-endian uint32; as JSON they would be a fifth larger
and thirty times slower to read. Logprobs are packed as float32, which is how servers compute them. Messages stay JSON
text until they are read, because training does not need them.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from array import array
from binascii import a2b_base64, b2a_base64
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pydantic_core

from groundwire.adapters.tracing.spans import CALL_ID, REPLY_ID, SpanRecord, rewards_in
from groundwire.tools.text import valid_texts

UNKNOWN_GRAMMAR = "null"
"""The grammar of a reply that was constrained in a way that the server did not report."""
_OK = range(200, 300)
AGENT = "gen_ai.agent.name"
PROMPT_IDS = "groundwire.prompt_token_ids"
"""Every call's span has it (empty if the call failed), and no other span."""
_INPUT_TOKENS, _OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
_FINISH_REASONS = "gen_ai.response.finish_reasons"
_ATTRIBUTES = {
    "agent": AGENT,
    "model": "gen_ai.request.model",
    "wire_api": "groundwire.wire_api",
    "grammar": "groundwire.grammar",
    "weights_version": "groundwire.weights_version",
    "first_weights_version": "groundwire.first_weights_version",
    "status": "http.response.status_code",
    "error": "error.message",
    "call_id": CALL_ID,
    "reply_id": REPLY_ID,
    "choice": "groundwire.choice",
    "reply_key": "groundwire.reply_key",
    "prompt_key": "groundwire.prompt_key",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "reply_body": "groundwire.reply_body",
    "replayed": "groundwire.replayed",
    "messages_json": "gen_ai.input.messages",
    "tools_json": "gen_ai.tool.definitions",
    "reply_json": "gen_ai.output.messages",
}
"""The attribute of a call's span for each field; one without a value is left out. The names are OpenTelemetry's for
generative AI, which trace viewers know, or begin with ``groundwire.``."""
_PACKED = {
    "prompt_ids": (PROMPT_IDS, "I"),
    "response_ids": ("groundwire.response_token_ids", "I"),
    "logprobs": ("groundwire.response_logprobs", "f"),
}


@dataclass(frozen=True, slots=True)
class CallCredit:
    """What one call is trained with."""

    returns: float
    advantage: float
    weight: float
    """Factor of the advantage. Tokens of weight 0 are not trained: they do not count in a mean over tokens either."""


@dataclass(slots=True, kw_only=True)
class LLMCall:
    """One request to the policy, as the proxy saw it. It failed if ``status`` is not 2xx or ``error`` is not empty."""

    rollout_id: str
    attempt_id: str
    sequence: int
    """Its place among the spans of the attempt, by the arrival of the request."""
    agent: str = ""
    model: str = ""
    wire_api: str = ""
    """The API that the agent used: ``chat``, ``responses``, ``messages`` or ``completions``; "" if it is not known."""
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    """The tokens that the server sampled."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm, under the weights that sampled; one for each of ``response_ids``."""
    finish_reason: str = ""
    grammar: str = ""
    """What the reply had to be, as JSON text; "" for a free reply, :data:`UNKNOWN_GRAMMAR` if the server does not say.
    The logprobs are those of the constrained distribution."""
    weights_version: int | None = None
    """The version of the weights at the reply's last token; None if the server does not send it."""
    first_weights_version: int | None = None
    """The version at the first token; None if the server does not send it."""
    started: float = 0.0
    """Arrival of the request, in seconds since the epoch."""
    ended: float = 0.0
    """End of the reply, in seconds since the epoch."""
    status: int = 200
    """The HTTP status that the agent got."""
    error: str = ""
    call_id: str = ""
    """The random id that the agent's HTTP client gave the request, if it is ours or hooked."""
    reply_id: str = ""
    """The id in the reply, as the agent got it."""
    choice: int | None = None
    """The index of this reply among several choices (``n``) of one request; None for the only one. Which choice the
    agent went on with is not known."""
    reward: float | None = None
    """The reward that the agent emitted for this call. Not part of the call's own span."""
    teacher_logprobs: list[float] = field(default_factory=list)
    """Those of a teacher for ``response_ids``; empty if none was asked. Not part of the call's own span."""
    credit: CallCredit | None = None
    """What the call was trained with; None if it was not."""
    prompt_tokens: int = 0
    """The server's count, if it is not the number of its ids."""
    response_tokens: int = 0
    """The server's count, if it is not the number of its ids; of several choices, less the ids of the others."""
    messages_json: str = "[]"
    tools_json: str = ""
    reply_json: str = ""
    reply_key: str = ""
    """What all ids in the reply are made of, if they are ours: with it the same reply is written again."""
    prompt_key: str = ""
    """A digest of what the request asks for (:func:`groundwire.adapters.tracing.sampling.prompt_key`)."""
    cached_tokens: int | None = None
    """The part of the prompt that the policy had in a cache; None for nothing."""
    reply_body: str = ""
    """The reply of a policy server behind HTTP, as it sent it, packed by :func:`pack_body`; "" of a policy in this
    process, whose reply follows from the other fields. Of several choices the first has it."""
    replayed: str = ""
    """The rollout whose replay the call is part of, answered from its record or sampled anew after it; "" of none."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The request's messages."""
        return json.loads(self.messages_json)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The request's tool definitions."""
        return json.loads(self.tools_json) if self.tools_json else []

    @property
    def reply(self) -> dict[str, Any]:
        """The assistant's message; empty if the call failed."""
        return json.loads(self.reply_json) if self.reply_json else {}

    @property
    def truncated(self) -> bool:
        """Whether the limit of tokens ended the reply."""
        return self.finish_reason == "length"

    @property
    def failed(self) -> bool:
        """Whether the agent got an error in place of a reply, or not all of the reply."""
        return bool(self.error) or self.status not in _OK

    @property
    def untrainable_reason(self) -> str:
        """Why this call cannot be trained on; empty if it can."""
        if self.failed or self.replayed:
            replayed = f"it is part of a replay of rollout {self.replayed}"
            return f"failed with status {self.status}: {self.error}" if self.failed else replayed
        if not self.prompt_ids or not self.response_ids:
            return "the server sent no token ids"
        if len(self.logprobs) != len(self.response_ids):
            return f"{len(self.response_ids)} sampled tokens but {len(self.logprobs)} logprobs"
        if not all(map(math.isfinite, self.logprobs)):
            return "a logprob is not a finite number"
        if self.grammar == UNKNOWN_GRAMMAR:
            return (
                "the server constrained the reply (response_format, tool_choice or structured outputs) and did not "
                "report how, so its logprobs cannot be computed again"
            )
        counted = (
            ("prompt", self.prompt_tokens, self.prompt_ids),
            ("sampled", self.response_tokens, self.response_ids),
        )
        lost = (
            f"the server counted {count} {kind} tokens and sent the ids of {len(ids)}"
            for kind, count, ids in counted
            if count not in (0, len(ids))
        )
        return next(lost, "")


def pack_body(body: bytes) -> str:
    """The bytes of a reply as text: UTF-8 after "=", else compressed, which takes a quarter of the proxy's time."""
    try:
        return "=" + body.decode()
    except UnicodeDecodeError:
        return b2a_base64(zlib.compress(body, 1), newline=False).decode()


def unpack_body(text: str) -> bytes:
    """The bytes that :func:`pack_body` packed."""
    return text[1:].encode() if text.startswith("=") else zlib.decompress(a2b_base64(text))


def to_json(value: Any) -> str:
    """``value`` as compact JSON in valid Unicode."""
    try:
        return pydantic_core.to_json(value).decode()
    except ValueError:  # it has half of a surrogate pair
        return json.dumps(valid_texts(value), separators=(",", ":"), ensure_ascii=False)


def to_span(call: LLMCall) -> SpanRecord:
    """The span of a call. Attributes are str, int or lists of str, which every store accepts."""
    values = {name: getattr(call, field) for field, name in _ATTRIBUTES.items()}
    key = f"{call.rollout_id}/{call.attempt_id}/{call.sequence}/{call.choice}".encode("utf-8", "surrogatepass")
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        _FINISH_REASONS: [call.finish_reason],
        _INPUT_TOKENS: call.prompt_tokens or len(call.prompt_ids),
        _OUTPUT_TOKENS: call.response_tokens or len(call.response_ids),
        **{name: value for name, value in values.items() if value not in ("", None)},
    }
    for name, (attribute, typecode) in _PACKED.items():
        attributes[attribute] = b2a_base64(array(typecode, getattr(call, name)), newline=False).decode()
    return SpanRecord(
        name="chat",
        rollout_id=call.rollout_id,
        attempt_id=call.attempt_id,
        sequence_id=call.sequence,
        attributes=attributes,
        start_time=call.started,
        end_time=call.ended,
        error=call.error if call.failed else None,
        span_id=hashlib.blake2b(key, digest_size=8).hexdigest(),  # sent again, it is stored once
    )


def from_span(span: Any) -> LLMCall:
    """The call that :func:`to_span` wrote."""
    attributes = span.attributes
    fields = {field: attributes[name] for field, name in _ATTRIBUTES.items() if name in attributes}
    for name, (attribute, typecode) in _PACKED.items():
        fields[name] = array(typecode, a2b_base64(attributes.get(attribute, ""))).tolist()
    counts = {"prompt_tokens": (_INPUT_TOKENS, "prompt_ids"), "response_tokens": (_OUTPUT_TOKENS, "response_ids")}
    for name, (attribute, ids) in counts.items():
        count = attributes.get(attribute, 0)
        fields[name] = count if count != len(fields[ids]) else 0
    return LLMCall(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        sequence=span.sequence_id,
        finish_reason="".join(attributes.get(_FINISH_REASONS, ())),
        started=span.start_time or 0.0,
        ended=span.end_time or 0.0,
        **fields,
    )


def all_calls_from_spans(spans: Iterable[Any]) -> list[LLMCall]:
    """Every call among ``spans``, in order, with its emitted reward. Other spans are ignored."""
    spans = list(spans)
    return order_calls((from_span(span) for span in spans if PROMPT_IDS in (span.attributes or {})), spans)


def order_calls(calls: Iterable[LLMCall], spans: Iterable[Any]) -> list[LLMCall]:
    """The calls of an attempt in order, with the rewards that its other ``spans`` emitted for them.

    An emitted reward belongs to the reply that it names, else to the call in whose context it was emitted, else to the
    newest call before it; of several the last counts. The choices of a request share its reward.
    Without marks of emitted spans the last reward is the rollout's, and so is an equal one after the last call.
    """
    calls = sorted(calls, key=lambda call: (call.sequence, call.started))
    requests = [call for call in calls if not call.choice]
    sequences = [call.sequence for call in requests]
    indices = {name: index for index, call in enumerate(requests) for name in (call.call_id, call.reply_id) if name}
    all_rewards, by_request = rewards_in(spans), dict[tuple[int | None, float], float]()
    returned = next((reward for reward in reversed(all_rewards) if not reward.emitted), None)
    for reward in all_rewards:
        index = indices.get(reward.call_id, bisect_left(sequences, reward.sequence) - 1)
        if reward.reply_id:
            index = indices.get(reward.reply_id, -1)  # a reply of another model is no call
        repeated = returned is not None and index == len(requests) - 1 and reward.primary == returned.primary
        if index >= 0 and (reward.emitted or not (reward is returned or repeated)):
            by_request[_request_of(requests[index])] = reward.primary
    return [
        replace(call, reward=by_request[_request_of(call)]) if _request_of(call) in by_request else call
        for call in calls
    ]


def _request_of(call: LLMCall) -> tuple[int | None, float]:
    """What the choices of one request have in common."""
    return (call.sequence if call.choice is None else None), call.started


def calls_from_spans(spans: Iterable[Any]) -> list[LLMCall]:
    """The calls that can be trained on, in order: those without an :attr:`LLMCall.untrainable_reason`."""
    return [call for call in all_calls_from_spans(spans) if not call.untrainable_reason]


def same_request(before: int | None, choice: int | None) -> bool:
    """Whether two calls, one after the other, are choices of one request, by their :attr:`LLMCall.choice`."""
    return before is not None and choice is not None and before < choice


def select_calls(calls: Iterable[LLMCall], selected: Callable[[LLMCall], object]) -> list[LLMCall]:
    """The selected calls. A reward that was emitted for another one is added to that of the last selected before it:
    it is what followed from it, as the rewards between two decisions are of the first one.
    """
    kept: list[LLMCall] = []
    before, first = None, 0  # the last selected request begins at ``first``
    for call in calls:
        if selected(call):
            first = first if kept and same_request(kept[-1].choice, call.choice) else len(kept)
            kept.append(call)
        elif call.reward is not None and not same_request(before, call.choice):  # choices share their request's reward
            kept[first:] = [replace(choice, reward=(choice.reward or 0.0) + call.reward) for choice in kept[first:]]
        before = call.choice
    return kept
