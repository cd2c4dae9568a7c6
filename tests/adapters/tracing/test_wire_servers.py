"""What servers lose or leave out: the same on all APIs, whole and streamed, for the agent and in the trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp import web
from open_rollouts import OpenRollouts
from own_forms import CHAT, FORMS, as_object
from wire import Bench

from groundwire.adapters.tracing.calls import from_span, to_span
from groundwire.adapters.tracing.proxy import LLMProxy

ALL = {"chat": CHAT, **FORMS}
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
_NO_REPLY = "'message'|'candidates'"
"""In the errors of clients that look for the reply where an error is."""
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def served() -> AsyncIterator[Any]:
    """Makes benches whose policy server answers with these bytes, in pieces of a size, or with this JSON."""
    closing: list[Any] = []

    async def make(reply: Any, size: int = 1 << 20) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            asked.append(await request.json())
            if not isinstance(reply, bytes):
                return web.json_response(reply)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for start in range(0, len(reply), size):
                await response.write(reply[start : start + size])
                await asyncio.sleep(0)  # the proxy reads it
            return response

        asked: list[Any] = []
        app = web.Application()
        app.router.add_post("/v1/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        store = OpenRollouts()
        proxy = LLMProxy(sink=store, upstreams=[f"http://127.0.0.1:{runner.addresses[0][1]}/v1"])
        await proxy.start()
        closing.extend([proxy.stop, runner.cleanup])
        server: Any = None
        b: Any = Bench(server, proxy, store, await store.start())
        b.asked = asked
        return b

    yield make
    for close in closing:
        await close()


def chunk(delta: Any, ids: Any = (), finish: Any = None, *, index: Any = 0, **more: Any) -> dict[str, Any]:
    choice = {
        "index": index,
        "delta": delta,
        "finish_reason": finish,
        "token_ids": list(ids),
        "logprobs": _logprobs(ids),
    }
    return {**HEAD, "choices": [choice], **more}


def _logprobs(ids: Any) -> Any:
    return {"content": [{"token": "", "logprob": -0.5} for _ in ids]}


def usage(prompt: int, reply: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def stream(*chunks: Any, end: bytes = DONE) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks) + end


def whole(counts: Any, *replies: Any, prompt: Any = (1, 2), finish: str = "stop") -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "ab"},
            "finish_reason": finish,
            "token_ids": list(ids),
            "logprobs": _logprobs(ids),
        }
        for index, ids in enumerate(replies)
    ]
    return {**HEAD, "object": "chat.completion", "choices": choices, "prompt_token_ids": list(prompt), "usage": counts}


FIRST = chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2])


@pytest.mark.parametrize("api", ALL)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ((2, 2), ""),
        ((2, 14), "the server counted 14 sampled tokens and sent the ids of 2"),
        ((2, 1), "the server counted 1 sampled tokens and sent the ids of 2"),
        ((3, 2), "the server counted 3 prompt tokens and sent the ids of 2"),
    ],
)
async def test_a_reply_is_trained_only_if_its_ids_are_as_many_as_the_server_counted(
    served: Any, api: str, streamed: bool, counts: Any, reason: str
) -> None:
    last = {**HEAD, "choices": [], "usage": usage(*counts)}
    parts = [FIRST, chunk({"content": "a"}, [5]), chunk({"content": "b"}, [6], "stop"), last]
    b = await served(stream(*parts) if streamed else whole(usage(*counts), (5, 6)))
    await ALL[api].ask(b, streamed, [])
    [call] = await b.calls()
    assert (call.untrainable_reason, call.error, call.status) == (reason, "", 200)
    assert from_span(to_span(call)) == call
    assert not streamed or b.asked[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("count", "reasons"), [(3, ["", ""]), (5, ["4 sampled tokens and sent the ids of 2", "3"])])
async def test_the_usage_of_several_choices_is_that_of_all(
    served: Any, streamed: bool, count: int, reasons: list[str]
) -> None:
    last = {**HEAD, "choices": [], "usage": usage(2, count)}
    parts = [FIRST, chunk({"content": "a"}, [5, 6], "stop"), chunk({"content": "b"}, [7], "stop", index=1), last]
    b = await served(stream(*parts) if streamed else whole(usage(2, count), (5, 6), (7,)))
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none") as client:
        reply: Any = await client.chat.completions.create(model="m", messages=[], n=2, stream=streamed)
        assert not streamed or [len(part.choices) async for part in reply] == [1, 1, 1]
    for call, reason in zip(await b.calls(), reasons, strict=True):
        assert reason in call.untrainable_reason
        assert bool(reason) == bool(call.untrainable_reason)


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_the_usage_that_only_the_proxy_asks_for_does_not_reach_the_agent(
    served: Any, api: str, size: int
) -> None:
    text = {"text": "a", "index": 0, "finish_reason": "stop", "logprobs": None, "token_ids": [5]}
    legacy = {**HEAD, "object": "text_completion"}
    chunks = {
        "chat": [{**HEAD, "choices": [], "prompt_filter_results": []}, FIRST, chunk({"content": "a"}, [5], "stop")],
        "completions": [{**legacy, "choices": [text]}],
    }
    last = {**(HEAD if api == "chat" else legacy), "choices": [], "usage": usage(2, 1)}
    b = await served(stream(*chunks[api], last), size)
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none") as client:
        for asked, expected in ({}, len(chunks[api])), ({"include_usage": True}, len(chunks[api]) + 1):
            options: Any = {"model": "m", "stream": True, "stream_options": asked}
            if api == "chat":
                parts: Any = await client.chat.completions.create(messages=[], **options)
            else:
                parts = await client.completions.create(prompt="q", **options)
            assert len([part async for part in parts]) == expected
    assert [each["stream_options"] for each in b.asked] == [{"include_usage": True}] * 2


def _calls(index: list[Any], ids: list[Any], *, repeated: bool = False) -> bytes:
    """Two calls of one function, the arguments of the first in pieces."""

    def part(number: int, arguments: str, *, first: bool) -> Any:
        function = {"arguments": arguments, **({"name": "run"} if first or repeated else {})}
        fields = {"index": index[number], "id": ids[number] if first or repeated else None, "function": function}
        return {"tool_calls": [{name: value for name, value in fields.items() if value is not None}]}

    return stream(
        FIRST,
        chunk(part(0, "", first=True), [5]),
        chunk(part(0, '{"sql": ', first=False), [6]),
        chunk({"content": "\n"}, [7]),
        chunk(part(0, "1}", first=False), [8]),
        chunk(part(1, '{"sql": 2}', first=True), [9]),
        chunk({}, [10], "tool_calls"),
    )


@pytest.mark.parametrize("api", ALL)
@pytest.mark.parametrize(
    ("index", "ids", "repeated"),
    [
        ([0, 1], ["A", "B"], False),
        ([0, 1], [None, None], False),
        ([0, 1], ["A", "B"], True),
        ([None, None], ["A", "B"], False),
        ([None, None], ["A", "B"], True),
        ([None, None], [None, None], False),
        ([0, 0], ["A", "B"], False),
        ([3, 7], ["A", "B"], False),
    ],
)
async def test_calls_in_pieces_are_joined_by_one_rule(
    served: Any, api: str, index: list[Any], ids: list[Any], repeated: bool
) -> None:
    b = await served(_calls(index, ids, repeated=repeated))
    if api == "chat":  # passed on as it is
        async with openai.AsyncOpenAI(base_url=b.url, api_key="none") as client:
            async for _ in await client.chat.completions.create(model="m", messages=[], stream=True):
                pass
    else:
        found = [call for item in await FORMS[api].ask(b, True, []) for call in FORMS[api].calls(item)]
        assert [(name, as_object(arguments)) for _, name, arguments in found] == [("run", {"sql": n}) for n in (1, 2)]
        assert None in ids or [call_id for call_id, *_ in found] == ids
    [call] = await b.calls()
    functions = [each["function"] for each in call.reply["tool_calls"]]
    assert functions == [{"name": "run", "arguments": f'{{"sql": {n}}}'} for n in (1, 2)]
    assert [each["id"] or None for each in call.reply["tool_calls"]] == ids


@pytest.mark.parametrize("api", ALL)
@pytest.mark.parametrize("end", [DONE, b"", b"cut"])
@pytest.mark.parametrize("finished", [True, False])
async def test_a_stream_is_complete_with_its_finish_reason_and_chunks_may_lack_everything_else(
    served: Any, api: str, end: bytes, finished: bool
) -> None:
    odd: list[Any] = [{**HEAD, "choices": []}, {**HEAD, "choices": None}, HEAD]
    last = chunk({"content": "b"}, [6], "stop" if finished else None, index=None)
    parts = [*odd, FIRST, chunk(None), *odd, chunk({"content": "a"}, [5], index=None), last]
    body = stream(*parts, end=end)
    b = await served(stream(*parts, end=b"").rstrip() if end == b"cut" else body)
    if api == "chat":  # passed on as it is
        async with openai.AsyncOpenAI(base_url=b.url, api_key="none") as client:
            read = [part async for part in await client.chat.completions.create(model="m", messages=[], stream=True)]
        assert len(read) == len(parts) - (end == b"cut")
    elif finished or end == DONE:
        assert "ab" in json.dumps(await FORMS[api].ask(b, True, []))
    else:
        with pytest.raises(Exception, match=f"stream ended before|{_NO_REPLY}"):  # of each client's own type
            await FORMS[api].ask(b, True, [])
    [call] = await b.calls()
    if finished:
        assert (call.untrainable_reason, call.response_ids, call.reply["content"]) == ("", [5, 6], "ab")
    else:
        assert "the stream ended before the reply was complete" in call.untrainable_reason


@pytest.mark.parametrize("api", ALL)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reply_that_the_server_could_not_finish_is_no_reply(served: Any, api: str, streamed: bool) -> None:
    parts = [FIRST, chunk({"content": "ab"}, [5], "error")]
    b = await served(stream(*parts) if streamed else whole(usage(2, 1), (5,), finish="error"))
    if api == "chat":  # passed on as it is
        await CHAT.ask(b, streamed, [])
    else:
        with pytest.raises(Exception, match=f"finish_reason 'error'|{_NO_REPLY}"):
            await FORMS[api].ask(b, streamed, [])
    [call] = await b.calls()
    assert "finish_reason 'error'" in call.error
