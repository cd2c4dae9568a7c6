"""The proxy changes nothing that an agent sees, and loses nothing that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import openai
import pytest
from chaos.mutations import gzip_bomb
from open_rollouts import OpenRollouts

from groundwire.adapters import AGENT_HEADER
from groundwire.adapters.tracing import LLMCall, open_attempts
from groundwire.adapters.tracing.call_writer import CallsNotStoredError
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import END, Reply, ScriptedPolicyServer, encode, render
from groundwire.tools.errors import CommandError
from groundwire.train.store.rollout import Rollout

HELLO = [{"role": "user", "content": "héllo"}]
TOOL_CALL = {"id": "call-1", "type": "function", "function": {"name": "run", "arguments": '{"sql": "SELECT 1"}'}}


class Bench:
    """A store with one rollout, and a proxy before a scripted policy."""

    def __init__(self, server: ScriptedPolicyServer, proxy: LLMProxy, store: Any, rollout: Rollout) -> None:
        self.server, self.proxy, self.store = server, proxy, store
        self.rollout_id, self.attempt_id = rollout.rollout_id, rollout.attempts[-1].attempt_id
        self.url = proxy.base_url(self.rollout_id, self.attempt_id)
        self.client = openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)

    async def ask(self, messages: Sequence[Any] = HELLO, **options: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=list(messages), **options)

    async def calls(self) -> list[LLMCall]:
        await self.proxy.flush(self.rollout_id)
        return await stored(self.store, self.rollout_id)


async def stored(store: Any, rollout_id: str) -> list[LLMCall]:
    return await store.calls(rollout_id)


class SlowStore(OpenRollouts):
    """Takes its time, and fails the first ``failures`` writes."""

    failures = 0

    async def add_calls(self, calls: Any) -> None:
        await asyncio.sleep(0.2)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the store is away")
        await super().add_calls(calls)


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    """Makes benches, and closes them."""
    closing: list[Any] = []

    async def make(replies: Any, *, store: Any = None, **options: Any) -> Bench:
        store = store or OpenRollouts()
        server = ScriptedPolicyServer(replies=replies)
        await server.start()
        proxy = LLMProxy(upstreams=[server.base_url], sink=store, **options)
        await proxy.start()
        made = Bench(server, proxy, store, await store.start(max_attempts=2))
        closing.extend([made.client.close, proxy.stop, server.stop])
        return made

    yield make
    for close in closing:
        await close()


async def test_a_call_becomes_one_span_with_what_the_server_sampled(bench: Any) -> None:
    b = await bench([Reply(text="hi", logprobs=[-0.25, -0.5, -1.0], weights_version=7)])
    reply = await b.ask(extra_headers={AGENT_HEADER: "write_query"}, temperature=0.5)
    assert reply.choices[0].message.content == "hi"
    (call,) = await b.calls()
    assert (call.prompt_ids, call.response_ids) == (render(HELLO), [*encode("hi"), END])
    assert (call.logprobs, call.finish_reason, call.weights_version) == ([-0.25, -0.5, -1.0], "stop", 7)
    assert (call.agent, call.messages, call.reply["content"], call.untrainable_reason) == (
        "write_query",
        HELLO,
        "hi",
        "",
    )
    assert call.started <= call.ended
    assert b.server.requests[0]["temperature"] == 0.5


async def test_a_stream_is_passed_on_as_a_stream_and_recorded_whole(bench: Any) -> None:
    b = await bench([Reply(text="schön", delay_s=0.3)])
    texts, before_the_end = "", None
    async for chunk in await b.ask(stream=True):
        texts += chunk.choices[0].delta.content or ""
        if chunk.choices[0].finish_reason is None:
            before_the_end = texts
    assert texts == before_the_end == "schön"
    (call,) = await b.calls()
    assert (call.prompt_ids, call.response_ids) == (render(HELLO), [*encode("schön"), END])
    assert len(call.logprobs) == len(call.response_ids)
    assert (call.reply, call.finish_reason) == ({"role": "assistant", "content": "schön"}, "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_come_through(bench: Any, stream: bool) -> None:
    b = await bench([Reply(tool_calls=[TOOL_CALL])])
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    answer = await b.ask(tools=tools, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta.tool_calls async for chunk in answer]
        (tool_call,) = [delta[0] for delta in deltas if delta]
    else:
        tool_call = answer.choices[0].message.tool_calls[0]
    assert tool_call.function.arguments == '{"sql": "SELECT 1"}'
    (call,) = await b.calls()
    assert call.reply["tool_calls"] == [TOOL_CALL]
    assert (call.tools, call.finish_reason, call.untrainable_reason) == (tools, "tool_calls", "")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_servers_reply_of_as_many_tokens_as_allowed_was_cut_off(bench: Any, stream: bool, name: str) -> None:
    """vLLM says tool_calls if there was a whole call before the cut."""
    b = await bench([Reply(tool_calls=[TOOL_CALL], token_ids=[1, 2, 3])] * 2)
    for limit in (3, 4):
        answer = await b.ask(stream=stream, **{name: limit})
        assert [chunk async for chunk in answer] if stream else answer
    assert [call.finish_reason for call in await b.calls()] == ["length", "tool_calls"]


async def test_the_agents_name_comes_from_the_header_else_from_baggage(bench: Any) -> None:
    b = await bench(["a", "b", "c"])
    await b.ask(extra_headers={AGENT_HEADER: "one", "baggage": "agent=two"})
    await b.ask(extra_headers={"baggage": "user=x, agent=rewrite%20it;ttl=3"})
    await b.ask()
    assert [call.agent for call in await b.calls()] == ["one", "rewrite it", ""]


async def test_calls_are_numbered_by_arrival(bench: Any) -> None:
    b = await bench(lambda body: Reply(text="x", delay_s=0.3 if "slow" in body["messages"][0]["content"] else 0.0))
    slow = asyncio.create_task(b.ask([{"role": "user", "content": "slow"}]))
    await asyncio.sleep(0.1)
    await b.ask([{"role": "user", "content": "quick"}])
    await slow
    assert [call.messages[0]["content"] for call in await b.calls()] == ["slow", "quick"]


async def test_a_reward_emitted_after_a_reply_has_a_higher_number_than_the_call(bench: Any) -> None:
    b = await bench(["x"])
    await b.ask()
    [later] = await b.store.reserve_sequence_ids([(b.rollout_id, b.attempt_id)])
    (call,) = await b.calls()
    assert call.sequence < later


async def test_an_upstream_error_is_passed_on_unchanged_and_recorded(bench: Any) -> None:
    b = await bench([Reply(status=400, text="This model's maximum context length is 8 tokens", code="its own")])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8") as caught:
        await b.ask()
    assert caught.value.body["code"] == "its own"
    (call,) = await b.calls()
    assert (call.status, call.error) == (400, "This model's maximum context length is 8 tokens")
    assert "failed with status 400" in call.untrainable_reason


async def test_an_unreachable_policy_server_is_a_502_and_recorded(bench: Any) -> None:
    b = await bench(["x"])
    await b.server.stop()
    with pytest.raises(openai.InternalServerError, match="did not answer") as caught:
        await b.ask()
    assert caught.value.status_code == 502
    assert [call.status for call in await b.calls()] == [502]


async def test_a_silent_policy_server_is_a_504_and_recorded(bench: Any) -> None:
    b = await bench([Reply(text="x", delay_s=5.0)], timeout_s=0.2)
    with pytest.raises(openai.InternalServerError, match=r"silent for 0\.2 s") as caught:
        await b.ask()
    assert caught.value.status_code == 504
    assert [call.status for call in await b.calls()] == [504]


async def test_an_interrupted_stream_is_an_error_for_the_agent_and_recorded(bench: Any) -> None:
    b = await bench([Reply(text="hello", breaks_off=True)])
    with pytest.raises(openai.APIError, match="broke off"):
        _ = [chunk async for chunk in await b.ask(stream=True)]
    (call,) = await b.calls()
    assert "broke off" in call.untrainable_reason


async def test_a_client_that_disconnects_cancels_the_upstream_call(bench: Any) -> None:
    b = await bench([Reply(text="hello", delay_s=30.0)])
    task = asyncio.create_task(b.ask())
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(_until(lambda: b.server.cancelled == 1), 600)
    (call,) = await _calls_when_there(b)
    assert (call.status, call.untrainable_reason) == (
        499,
        "failed with status 499: the client left before the reply was complete",
    )


@pytest.mark.parametrize("n", [0, 129, "2"])
async def test_an_impossible_number_of_choices_is_refused(bench: Any, n: Any) -> None:
    b = await bench(["x"])
    with pytest.raises(openai.BadRequestError, match="n must be a number from 1 to 128"):
        await b.ask(n=n)
    assert b.server.requests == []
    assert [call.status for call in await b.calls()] == [400]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "a JSON list, not an object"),
        (b'{"messages": ' + b"[" * 980 + b"]" * 980 + b"}", "recursion limit exceeded"),
        (gzip_bomb(megabytes=100), "not JSON"),
    ],
)
async def test_a_request_that_is_not_a_json_object_is_refused(bench: Any, body: bytes, message: str) -> None:
    b = await bench([])
    json = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=json) as session,
        session.post(f"{b.url}/chat/completions", data=body) as reply,
    ):
        assert reply.status == 400
        assert message in (await reply.json())["error"]["message"]


async def test_a_request_that_is_too_large_is_refused_and_recorded(bench: Any) -> None:
    b = await bench([])
    with pytest.raises(openai.APIStatusError, match="larger than 16 MiB") as caught:
        await b.ask([{"role": "user", "content": "x" * (17 << 20)}])
    assert caught.value.status_code == 413
    assert [call.status for call in await b.calls()] == [413]


async def test_a_request_that_is_not_complete_in_time_is_refused(bench: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("groundwire.adapters.tracing.proxy._BODY_S", 0.2)
    b = await bench([])
    reader, writer = await asyncio.open_connection("127.0.0.1", b.proxy.port)
    path = b.url.removeprefix(b.proxy.url)
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert (await asyncio.wait_for(reader.readline(), 600)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_call_without_a_rollout_is_refused_with_advice(bench: Any) -> None:
    b = await bench(["x"])
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{b.proxy.port}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="use the base URL of a rollout"):
        await client.chat.completions.create(model="any", messages=HELLO)
    assert [model.id async for model in client.models.list()] == ["scripted"]
    await client.close()


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("audio/speech", "the policy only writes text; ask an audio model of your own"),
        ("images/generations", "ask an image model of your own"),
        ("v1beta/models/gemini:embedContent", "ask an embedding model of your own"),
        ("v1beta/interactions", "use Google's generateContent"),
        ("model/anthropic.claude/invoke", "use Bedrock's Converse API"),
        ("api/generate", "use Ollama's /api/chat"),
        ("v2/chat", "its /compatibility/v1/chat/completions is"),
        ("responses/resp_1/cancel", "its previous_response_id works within the rollout"),
        ("threads", "completions, or the API of Gemini, Bedrock's Converse or Ollama"),
    ],
)
async def test_an_api_that_is_not_served_is_refused_in_one_sentence(bench: Any, path: str, advice: str) -> None:
    b = await bench([])
    async with aiohttp.ClientSession() as session, session.post(f"{b.url}/{path}", json={"model": "m"}) as reply:
        assert reply.status == 404
        assert (await reply.json())["error"]["message"].endswith(advice)


@pytest.mark.parametrize(
    "path",
    [
        "chat/completions", "openai/v1/chat/completions", "compatibility/v1/chat/completions",
        "openai/deployments/NAME/chat/completions?api-version=1",
    ],
)  # fmt: skip
async def test_what_providers_put_before_the_path_of_an_api_is_of_no_account(bench: Any, path: str) -> None:
    b = await bench(["x"])
    root = b.url.removesuffix("/v1")
    request = {"model": "m", "messages": HELLO}
    async with aiohttp.ClientSession() as session, session.post(f"{root}/{path}", json=request) as reply:
        assert reply.status == 200


async def test_the_model_and_the_upstream_can_be_changed_while_it_runs(bench: Any) -> None:
    b = await bench(["old"])
    b.proxy.upstreams.model = "policy-v2"
    async with ScriptedPolicyServer(replies=["new"]) as other:
        b.proxy.upstreams.urls = [other.base_url]
        assert (await b.ask()).choices[0].message.content == "new"
        assert other.requests[0]["model"] == "policy-v2"


async def test_a_port_in_use_is_a_clear_error(bench: Any) -> None:
    b = await bench([])
    with pytest.raises(CommandError, match=rf"port {b.proxy.port} on 127\.0\.0\.1 is in use"):
        await LLMProxy(upstreams=[b.server.base_url], sink=b.store, port=b.proxy.port).start()


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
async def test_an_address_of_another_machine_is_a_clear_error(bench: Any, host: str) -> None:
    b = await bench([])
    proxy = LLMProxy(upstreams=[b.server.base_url], sink=b.store, host=host, token="the-token-of-a-proxy")
    with pytest.raises(CommandError, match=f"cannot listen on {host}, .* --proxy-host"):
        await proxy.start()


async def test_many_concurrent_calls_are_all_stored(bench: Any) -> None:
    b = await bench(lambda body: Reply(text=body["messages"][0]["content"], delay_s=0.2))

    async def post(session: aiohttp.ClientSession, number: int) -> None:
        body = {"messages": [{"role": "user", "content": str(number)}]}
        async with session.post(f"{b.url}/chat/completions", json=body) as reply:
            assert reply.status == 200

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(post(session, number) for number in range(256)))
    calls = await b.calls()
    assert sorted(int(call.reply["content"]) for call in calls) == list(range(256))
    assert len({call.sequence for call in calls}) == 256


async def test_a_slow_store_delays_no_reply_and_a_failing_one_loses_no_call(bench: Any) -> None:
    b = await bench(["x"] * 5, store=SlowStore())
    b.store.failures = 3
    for _ in range(5):
        await b.ask()
    assert len(await stored(b.store, b.rollout_id)) < 5
    assert len(await b.calls()) == 5


async def test_stopping_waits_for_calls_in_flight_and_for_a_slow_store(bench: Any) -> None:
    b = await bench(lambda body: Reply(text="late", delay_s=0.5), store=SlowStore())
    b.store.failures = 1
    asking = [asyncio.create_task(b.ask(stream=i % 2 == 0)) for i in range(8)]
    await asyncio.wait_for(_until(lambda: len(b.server.requests) == 8), 600)
    await b.proxy.stop()
    calls = await stored(b.store, b.rollout_id)
    assert [call.reply["content"] for call in calls] == ["late"] * 8
    await asyncio.gather(*asking)


async def test_stopping_cancels_slow_calls_and_records_them(bench: Any) -> None:
    b = await bench([Reply(text="x", delay_s=60.0)], drain_timeout_s=0.2)
    asking = asyncio.create_task(b.ask())
    await asyncio.wait_for(_until(lambda: len(b.server.requests) == 1), 600)
    await b.proxy.stop()
    assert [call.status for call in await stored(b.store, b.rollout_id)] == [499]
    with pytest.raises(openai.APIError):
        await asking


async def test_an_unreachable_store_is_an_error_with_the_number_of_missing_calls(bench: Any) -> None:
    b = await bench(["x", "x"], store=SlowStore(), drain_timeout_s=0.5)
    b.store.failures = 1000
    await b.ask()
    await b.ask()
    with pytest.raises(CallsNotStoredError, match=r"2 calls are not in the store after 0\.5 s.*the store is away"):
        await b.proxy.stop()


async def _is_gone(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as stray:
        with pytest.raises(openai.APIStatusError, match="unknown or has ended") as caught:
            await stray.chat.completions.create(model="any", messages=HELLO)
    assert caught.value.status_code == 410


async def test_nothing_is_sampled_or_recorded_for_an_unknown_attempt(bench: Any) -> None:
    b = await bench(["x", "y"])
    other = await b.store.start()
    await b.ask()
    for rollout_id, attempt_id in [
        ("nobody", "none"),
        (b.rollout_id, "anything"),
        (b.rollout_id, other.attempt.attempt_id),
        (b.rollout_id + "\n", b.attempt_id),
    ]:
        await _is_gone(b.proxy.base_url(rollout_id, attempt_id))
    await b.ask()
    assert len(b.server.requests) == len(await b.calls()) == 2
    await b.proxy.flush()


@pytest.mark.parametrize("status", ["succeeded", "failed", "timeout"])
async def test_nothing_is_sampled_for_an_attempt_that_has_ended(bench: Any, status: str) -> None:
    b = await bench(["x", "y"])
    await b.ask()
    if status == "timeout":
        (await b.store.get(b.rollout_id)).attempt.status = status
    else:
        await b.store.end_attempt(b.rollout_id, b.attempt_id, None, failed=status == "failed")
    b.proxy.attempt_ended(b.rollout_id)
    await _is_gone(b.url)
    assert len(b.server.requests) == 1


async def test_an_attempt_that_runs_again_replaces_the_one_before(bench: Any) -> None:
    b = await bench(["x", "y"])
    await b.ask()
    await b.store.end_attempt(b.rollout_id, b.attempt_id, None, failed=True)
    [again] = await b.store.dequeue(1)
    async with openai.AsyncOpenAI(base_url=b.proxy.base_url(b.rollout_id, again.attempt.attempt_id), api_key="-") as c:
        await c.chat.completions.create(model="any", messages=HELLO)
    await _is_gone(b.url)


async def test_a_store_that_is_away_stops_no_attempt_that_was_running(bench: Any, monkeypatch: Any) -> None:
    class Away(OpenRollouts):
        away = False

        async def sampling_of(self, rollout_id: str, attempt_id: str) -> Any:
            await asyncio.sleep(3600 if self.away else 0)
            return await super().sampling_of(rollout_id, attempt_id)

    monkeypatch.setattr(open_attempts, "_FRESH_S", 0.0)
    monkeypatch.setattr(open_attempts, "_LOOKUP_S", 0.1)
    monkeypatch.setattr(open_attempts, "_FIRST_LOOKUP_S", 0.1)
    b = await bench(["x", "y"], store=Away())
    other = await b.store.start()
    await b.ask()
    b.store.away = True
    await b.ask()
    url = b.proxy.base_url(other.rollout_id, other.attempt.attempt_id)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as unknown:
        with pytest.raises(openai.InternalServerError, match="does not say whether the attempt is running"):
            await unknown.chat.completions.create(model="any", messages=HELLO)


class PoisonedStore(OpenRollouts):
    """Fails at every request that names the rollout ``poisoned``, as a store does whose data of it is damaged."""

    poisoned = ""

    async def reserve_sequence_ids(self, attempts: Any) -> Any:
        if any(rollout_id == self.poisoned for rollout_id, _ in attempts):
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        return await super().reserve_sequence_ids(attempts)


async def test_a_rollout_that_cannot_be_numbered_delays_no_other_and_flush_keeps_its_limit(bench: Any) -> None:
    b = await bench(["x", "y", "z"], store=PoisonedStore())
    other = await b.store.start()
    b.store.poisoned = other.rollout_id
    url = b.proxy.base_url(other.rollout_id, other.attempt.attempt_id)
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        await client.chat.completions.create(model="any", messages=HELLO)
        await b.ask()
        assert len(await asyncio.wait_for(b.calls(), 600)) == 1
        with pytest.raises(CallsNotStoredError, match=r"1 calls are not in the store after 0\.1 s.*int too large"):
            await b.proxy.flush(other.rollout_id, timeout_s=0.1)
        await b.ask()
        assert len(await asyncio.wait_for(b.calls(), 600)) == 2
    await b.proxy.stop()  # without an error: the calls of the poisoned rollout are given up


async def _until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def _calls_when_there(b: Bench) -> list[LLMCall]:
    while not (calls := await b.calls()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return calls
