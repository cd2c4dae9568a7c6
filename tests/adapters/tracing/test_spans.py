"""A call and its span have the same content; a span is small, and any store accepts it."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundwire.adapters.tracing import LLMCall, from_span, to_span
from groundwire.adapters.tracing.call_writer import CallsNotStoredError, CallWriter
from groundwire.adapters.tracing.spans import SinkRefusedError
from groundwire.adapters.tracing.wire.exchange import HttpExchange, read_exchange
from groundwire.adapters.tracing.wire.request import traced_request
from groundwire.train.store.agent_lightning import SpanFields, span_json
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.sqlite import MEMORY, SqliteStore

ANY_TEXT = st.text(alphabet=st.characters(), max_size=20)  # half surrogate pairs too
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)
PLAIN_TEXT = st.text(max_size=20)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
CALLS = st.builds(
    LLMCall,
    rollout_id=st.just("r"),
    attempt_id=st.just("a"),
    sequence=st.integers(1, 10**6),
    agent=PLAIN_TEXT,
    model=PLAIN_TEXT,
    prompt_ids=IDS,
    response_ids=IDS,
    logprobs=st.lists(st.floats(width=32, allow_nan=False, max_value=0.0), max_size=20),
    finish_reason=st.sampled_from(["", "stop", "length", "tool_calls"]),
    weights_version=st.none() | st.integers(0, 1000),
    started=st.floats(1.0, 2e9),
    ended=st.floats(1.0, 2e9),
    status=st.sampled_from([200, 400, 502]),
    error=PLAIN_TEXT,
)


@given(CALLS)
def test_a_call_survives_its_span_and_the_stores_json(call: LLMCall) -> None:
    assert from_span(to_span(call)) == call
    assert from_span(SpanFields.model_validate_json(json.dumps(span_json(to_span(call))))) == call


def test_a_call_takes_at_most_12_kb() -> None:
    """1,024 prompt ids of a large vocabulary, 64 sampled ones, and messages with as much text as those ids are."""
    rng = random.Random(0)
    ids = [rng.randrange(151_936) for _ in range(1024 + 64)]
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz (),\n", k=4 * 1024))
    messages = [{"role": "system", "content": text[:3600]}, {"role": "user", "content": text[3600:]}]
    call = LLMCall(
        rollout_id="ro-0123456789ab",
        attempt_id="at-01234567",
        sequence=12,
        agent="rewrite_query",
        model="policy",
        prompt_ids=ids[:1024],
        response_ids=ids[1024:],
        logprobs=[rng.uniform(-5, 0) for _ in range(64)],
        finish_reason="stop",
        weights_version=7,
        started=1_790_000_000.123,
        ended=1_790_000_001.456,
        messages_json=json.dumps(messages),
        reply_json=json.dumps({"role": "assistant", "content": text[:250]}),
    )
    assert len(json.dumps(span_json(to_span(call)))) <= 12_000


@given(ANYTHING)
def test_any_request_and_reply_become_a_span_that_stores_accept(value: Any) -> None:
    choice = {"message": {"content": value}, "token_ids": value, "logprobs": value, "finish_reason": value}
    for body in (value, {"choices": value}, {"choices": [choice], "prompt_token_ids": value, "weights_version": value}):
        for streamed in (False, True):
            text = json.dumps(body)
            exchange = HttpExchange(
                rollout_id="r",
                attempt_id="a",
                agent=value if isinstance(value, str) else "",
                started=1.0,
                ended=2.0,
                request={"model": value, "messages": value, "tools": value},
                body=(f"data: {text}\n\n" if streamed else text).encode(),
                streamed=streamed,
            )
            span = SpanFields.model_validate(span_json(to_span(read_exchange(exchange, 0, 1))))
            assert SpanFields.model_validate_json(span.model_dump_json()) == span
            for attribute in span.attributes.values():
                assert isinstance(attribute, str | int) or all(isinstance(item, str) for item in attribute)


def test_float32_logprobs_are_stored_exactly() -> None:
    logprobs = [struct.unpack("f", struct.pack("f", value))[0] for value in (-0.1, -1e-7, -17.25)]
    call = LLMCall(rollout_id="r", attempt_id="a", sequence=1, response_ids=[1, 2, 3], logprobs=logprobs)
    assert from_span(to_span(call)).logprobs == logprobs


async def test_a_stored_call_is_read_back_unchanged() -> None:
    store = SqliteStore(MEMORY)
    await store.enqueue([Rollout(task={})])
    [rollout] = await store.dequeue(1)
    call = LLMCall(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempts[-1].attempt_id,
        sequence=1,
        prompt_ids=[5],
        response_ids=[6],
        logprobs=[-0.5],
        wire_api="responses",
        tools_json='[{"type":"function"}]',
    )
    await store.add_calls([call])
    found = await store.get(rollout.rollout_id)
    assert found is not None
    assert found.calls == [call]
    store.close()


def test_the_request_asks_for_ids_and_logprobs_and_keeps_the_rest() -> None:
    asked = {"model": "x", "temperature": 0.2, "logprobs": False, "top_logprobs": None}
    assert traced_request(asked, model=None) == {
        "model": "x",
        "temperature": 0.2,
        "logprobs": True,
        "return_token_ids": True,
    }
    assert traced_request({"logprobs": True, "top_logprobs": 5}, model="policy")["top_logprobs"] == 5
    assert traced_request(asked, model="policy")["model"] == "policy"


def test_a_vllm_stream_is_read_whole() -> None:
    events = [
        {"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [_chunk({"reasoning": "so "}, [3], [-0.5])]},
        {"choices": [_chunk({}, [4], [-0.25])]},  # a token that the tool parser held back
        {"choices": [_chunk({"tool_calls": [_part(0, "run", id="c1")]}, [5], [-1.0])]},
        {"choices": [_chunk({"tool_calls": [_part(0, None, '{"a"')]}, [6, 7], [-1.0, -2.0])]},
        {"choices": [{**_chunk({"tool_calls": [_part(0, None, ":1}")]}, [8], [-3.0]), "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"total_tokens": 8}},
    ]
    body = ": comment\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    exchange = HttpExchange(rollout_id="r", attempt_id="a", agent="", started=1.0, body=body.encode(), streamed=True)
    call = read_exchange(exchange, 0, 1)
    assert (call.prompt_ids, call.response_ids) == ([1, 2], [3, 4, 5, 6, 7, 8])
    assert (call.logprobs, call.untrainable_reason) == ([-0.5, -0.25, -1.0, -1.0, -2.0, -3.0], "")
    assert call.reply["tool_calls"][0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "run", "arguments": '{"a":1}'},
    }
    assert call.reply["reasoning"] == "so "


def _chunk(delta: dict[str, Any], ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    content = [{"token": "t", "logprob": value} for value in logprobs]
    return {"index": 0, "delta": delta, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": None}


def _part(index: int, name: str | None, arguments: str = "", **fields: Any) -> dict[str, Any]:
    return {"index": index, "function": {"name": name, "arguments": arguments}, **fields}


def _without_ids(body: bytes, *, streamed: bool = False) -> LLMCall:
    exchange = HttpExchange(rollout_id="r", attempt_id="a", agent="", started=1.0, body=body, streamed=streamed)
    return read_exchange(exchange, 0, 1)


def test_without_ids_the_servers_token_counts_are_read_from_replies_and_streams() -> None:
    usage = {"prompt_tokens": 70, "completion_tokens": 7, "total_tokens": 77}
    message = {"role": "assistant", "content": "hello"}
    whole = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    chunks = [{"choices": [{"delta": message, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
    stream = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    for call in (_without_ids(json.dumps(whole).encode()), _without_ids(stream, streamed=True)):
        assert (call.prompt_tokens, call.response_tokens) == (70, 7)
        assert call.untrainable_reason == "the server sent no token ids"
        assert from_span(to_span(call)) == call


def test_invalid_token_counts_are_ignored() -> None:
    for count in ("7", -1, None, 1 << 70, {}):
        usage = {"prompt_tokens": count, "completion_tokens": count}
        reply = {"choices": [{"message": {"role": "assistant", "content": ""}}], "usage": usage}
        call = _without_ids(json.dumps(reply).encode())
        assert (call.prompt_tokens, call.response_tokens, call.error) == (0, 0, "")


def test_without_ids_the_request_does_not_ask_for_them() -> None:
    asked = {"messages": [], "temperature": 0.5}
    assert traced_request(asked, model="theirs", ids=False) == {**asked, "model": "theirs"}


async def test_refusals_that_nobody_asks_for_are_not_kept_for_ever() -> None:
    class Refusing:
        async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
            raise SinkRefusedError("no such rollout")

        async def add_calls(self, calls: Sequence[LLMCall]) -> None:
            raise AssertionError("calls without a number are not written")

    sink: Any = Refusing()
    writer, last = CallWriter(sink, sink.add_calls), 1030
    for number in range(last + 1):
        writer.finish(writer.reserve(f"r{number}", "a"), lambda sequence: None)  # type: ignore[arg-type,return-value]
    for _ in range(100):
        await asyncio.sleep(0)
    await writer.flush("r0")  # forgotten
    with pytest.raises(CallsNotStoredError, match=f"refused a call of rollout r{last}: no such rollout"):
        await writer.flush(f"r{last}")
    with suppress(CallsNotStoredError):
        await writer.close(timeout_s=1)


async def test_a_flush_waits_for_late_numbers_which_are_in_the_order_of_arrival() -> None:
    class Slow(MemoryStore):
        async def reserve_sequence_ids(self, attempts: Any) -> Any:
            await asyncio.sleep(0.05)
            return await super().reserve_sequence_ids(attempts)

    store = Slow()
    rollout = Rollout(task={})
    await store.enqueue([rollout])
    await store.dequeue(1)
    ids = rollout.rollout_id, rollout.attempts[-1].attempt_id
    writer = CallWriter(store, store.add_calls)
    for _ in range(2):
        call = LLMCall(rollout_id=ids[0], attempt_id=ids[1], sequence=0)
        writer.finish(writer.reserve(*ids), lambda sequence, call=call: replace(call, sequence=sequence))
        await asyncio.sleep(0)  # the second is numbered after the first
    await asyncio.wait_for(writer.flush(), 600)
    await store.get(ids[0])
    assert [call.sequence for call in rollout.calls] == [1, 2]
    await writer.close(timeout_s=1)
