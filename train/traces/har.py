"""HTTP archives: the LLM calls in them, of any API that we serve, whole replies and streams."""

from __future__ import annotations

import base64
import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.paths import find_api
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.messages import count_of, first, text_of, value_of
from groundwire.train.traces.record import seconds, user_turn
from groundwire.train.traces.spans import Item, TracerSpan, llm_fields, rollout_of
from groundwire.train.traces.streams import whole_reply

name = "HAR"
_ERROR = 400


def takes(record: Any) -> bool:
    """Whether ``record`` is an entry of an archive."""
    return isinstance(record, Mapping) and {"request", "response", "startedDateTime"} <= record.keys()


def split(record: Mapping[str, Any], file: str, unread: Counter[str]) -> Iterator[tuple[str, Item]]:
    """The call, with the conversation that begins as it does."""
    request, response = record["request"], record["response"]
    parts = urlsplit(text_of(request.get("url")))
    called = find_api(f"{parts.path}?{parts.query}" if parts.query else parts.path)
    body = value_of((request.get("postData") or {}).get("text"))
    if called is None or called.counts or not isinstance(body, Mapping):
        unread["HAR: requests that are no LLM call"] += 1
        return
    content = response.get("content") or {}
    reasons, status = list[str](), int(response.get("status") or 0)
    text = _body(content)
    reply, error = whole_reply(value_of(text), reasons), ""
    if isinstance(reply, str) and reply:
        reasons.append("HAR: replies that are neither JSON nor a stream of it")
    if body.get("previous_response_id"):
        reasons.append("requests that go on with an earlier response by its id")
    if not 0 < status < _ERROR:
        message = first(reply, "error", "message", "detail") if isinstance(reply, Mapping) else text
        inner = message.get("message") if isinstance(message, Mapping) else message
        error, reply = f"HTTP {status}: {text_of(inner)[:200]}", None
    usage = first(reply, "usage", "usageMetadata") if isinstance(reply, Mapping) else {}
    known = llm_fields({**called.fields, **body}, reply, reasons, tools=body.get("tools"))
    started = seconds(record["startedDateTime"])
    span = TracerSpan(
        span_id=hashlib.blake2b(to_json([record["startedDateTime"], body]).encode(), digest_size=8).hexdigest(),
        kind="llm",
        started=started,
        ended=seconds(started + float(record.get("time") or 0) / 1000),
        error=error,
        model=text_of(first({**called.fields, **body}, "model")),
        prompt_tokens=count_of(first(usage or {}, "prompt_tokens", "input_tokens", "promptTokenCount")),
        response_tokens=count_of(first(usage or {}, "completion_tokens", "output_tokens", "candidatesTokenCount")),
        unread=reasons,
        source=name,
        **known,
    )
    begins = to_json([message for message in known["messages"] if message["role"] == "system"][:1])
    key = f"{file}{begins}{user_turn(known['messages'])}"
    yield hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).hexdigest(), span.item()


def _body(content: Mapping[str, Any]) -> str:
    """The text of a response; of one that is compressed and damaged what is there."""
    text = text_of(content.get("text"))
    if content.get("encoding") != "base64":
        return text
    data = base64.b64decode(text)
    if data[:2] == b"\x1f\x8b":
        with suppress(EOFError, OSError, zlib.error):
            data = gzip.decompress(data)
    return data.decode("utf-8", "replace")


def build(trace_id: str, items: Sequence[Item], unread: Counter[str]) -> Iterator[Rollout]:
    """The rollouts of calls that begin alike: a call with no reply before it begins another one."""
    runs: list[list[Item]] = []
    for item in sorted(items, key=lambda item: item.get("started", 0.0)):
        replied = any(message["role"] == "assistant" for message in item.get("messages", ()))
        if not runs or not replied:
            runs.append([])
        runs[-1].append(item)
    for number, run in enumerate(runs):
        yield from rollout_of(f"{trace_id}-{number}" if number else trace_id, run, unread)
