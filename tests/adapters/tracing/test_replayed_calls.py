"""A replayed call is answered with the bytes of the recorded one, whatever API it uses, and is never trained on."""

from __future__ import annotations

import asyncio
import json
import zlib
from binascii import b2a_base64
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from open_rollouts import OpenRollouts
from wire import CHAT_TOOL, PARAMETERS

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.calls import pack_body, unpack_body
from groundwire.adapters.tracing.emitted_spans import CALL_HEADER
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.replay import NOT_RECORDED, Replay
from groundwire.tools.http.access_token import access_token
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.policy.errors import ContextLengthError
from groundwire.train.policy.recorded import RecordEngine
from groundwire.train.policy.server import PolicyServer
from groundwire.train.policy.types import Completion, Sampling

SAID = 'a singer: é <tool_call>{"name": "run", "arguments": {"sql": "SELECT 1"}}</tool_call>'
QUESTION = [{"role": "user", "content": "How many singers?"}]
FUNCTION: Any = {"name": "run", "description": "Run it"}
RESPONSES = {
    "model": "m",
    "input": QUESTION,
    "tools": [{"type": "function", "strict": False, "parameters": PARAMETERS, **FUNCTION}],
    "include": ["message.output_text.logprobs"],
}
MESSAGES = {
    "model": "m",
    "max_tokens": 99,
    "messages": QUESTION,
    "tools": [{"input_schema": PARAMETERS, **FUNCTION}],
}
GEMINI = {
    "contents": [{"role": "user", "parts": [{"text": "How many singers?"}]}],
    "tools": [{"functionDeclarations": [{"parametersJsonSchema": PARAMETERS, **FUNCTION}]}],
}
CONVERSE = {
    "messages": [{"role": "user", "content": [{"text": "How many singers?"}]}],
    "toolConfig": {"tools": [{"toolSpec": {"inputSchema": {"json": PARAMETERS}, **FUNCTION}}]},
}
CHAT = {"model": "m", "messages": QUESTION, "tools": [CHAT_TOOL], "logprobs": True, "return_token_ids": True}
OLLAMA = {"model": "m", "messages": QUESTION, "tools": [CHAT_TOOL]}
COMPLETION = {"model": "m", "prompt": "the age of", "logprobs": 1, "max_tokens": 99}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("v1/chat/completions", CHAT),
    "chat, streamed": ("v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "chat, two choices": ("v1/chat/completions", CHAT | {"n": 2}),
    "chat, two choices, streamed": ("v1/chat/completions", CHAT | {"n": 2, "stream": True}),
    "completions, two choices": ("v1/completions", COMPLETION | {"n": 2}),
    "completions": ("v1/completions", COMPLETION),
    "completions, streamed": ("v1/completions", COMPLETION | {"stream": True}),
    "Responses": ("v1/responses", RESPONSES),
    "Responses, streamed": ("v1/responses", RESPONSES | {"stream": True}),
    "Messages": ("v1/messages", MESSAGES),
    "Messages, streamed": ("v1/messages", MESSAGES | {"stream": True}),
    "generateContent": ("v1beta/models/m:generateContent", GEMINI),
    "generateContent, events": ("v1beta/models/m:streamGenerateContent?alt=sse", GEMINI),
    "generateContent, list": ("v1beta/models/m:streamGenerateContent", GEMINI),
    "Converse": ("model/m/converse", CONVERSE),
    "Converse, streamed": ("model/m/converse-stream", CONVERSE),
    "Ollama": ("api/chat", OLLAMA | {"stream": False}),
    "Ollama, streamed": ("api/chat", OLLAMA),
}


class SayingEngine:
    """Samples what it is told to say."""

    max_model_len, weights_version = 500, 3

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, *, on_token: Any = None) -> Future[Completion]:
        if len(prompt) >= self.max_model_len:
            raise ContextLengthError(len(prompt), self.max_model_len)
        ids = [*self.tokenizer(SAID, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        future: Future[Completion] = Future()
        logprobs = [-0.125 * place for place in range(len(ids))]
        for token, logprob in zip(ids, logprobs, strict=True) if on_token else ():
            on_token(token, logprob)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        future.set_result(Completion(prompt, ids, logprobs, text, "stop", 3, 7, 2))
        return future

    def close(self) -> None:
        pass


class Agent:
    """What an agent has of a rollout: the address of its calls."""

    def __init__(self, proxy: LLMProxy, store: OpenRollouts, rollout: Any) -> None:
        self.proxy, self.store, self.rollout_id = proxy, store, rollout.rollout_id
        self._root = proxy.base_url(rollout.rollout_id, rollout.attempt.attempt_id).removesuffix("v1")

    async def ask(self, path: str, body: Any, agent: str = "", call_id: str = "") -> httpx.Response:
        headers = {"baggage": f"agent={agent}"} if agent else {}
        headers |= {CALL_HEADER: call_id} if call_id else {}
        async with httpx.AsyncClient(trust_env=False, timeout=600) as client:
            return await client.post(f"{self._root}{path}", json=body, headers=headers)

    async def calls(self) -> list[LLMCall]:
        await self.proxy.flush(self.rollout_id)
        return await self.store.calls(self.rollout_id)


@asynccontextmanager
async def recording(tokenizer: Any, *, behind_http: bool = False) -> AsyncIterator[Agent]:
    server, store = PolicyServer(SayingEngine(tokenizer)), OpenRollouts()  # type: ignore[arg-type]
    async with server:
        policy: Any = {"policy": server}
        if behind_http:
            policy = {"upstreams": [f"{server.url}/v1"], "model": "policy", "api_key": access_token()}
        async with LLMProxy(sink=store, **policy) as proxy:
            yield Agent(proxy, store, await store.start(task={"id": "1"}))


@asynccontextmanager
async def replaying(tokenizer: Any, calls: Iterable[LLMCall], *, is_cut: bool = False) -> AsyncIterator[Agent]:
    server, store = PolicyServer(RecordEngine(tokenizer, max_model_len=500)), OpenRollouts()
    replay = Replay()
    async with LLMProxy(sink=store, policy=server, replay=replay) as proxy:
        rollout = await store.start(task={"id": "1"})
        replay.add(rollout.rollout_id, "ro-recorded", calls, is_cut=is_cut)
        yield Agent(proxy, store, rollout)


async def kept(agent: Agent, folder: Path) -> list[LLMCall]:
    """The calls of a rollout as a run keeps them in its files."""
    await agent.calls()
    rollout = await agent.store.get(agent.rollout_id)
    assert rollout is not None
    run = RunDir(folder)
    run.write_rollouts(1, [rollout])
    [[read]] = run.rollout_batches(None, [])
    return read.calls


@pytest.mark.parametrize("behind_http", [False, True], ids=["in process", "behind HTTP"])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_replayed_call_gets_the_recorded_bytes_and_is_not_trained_on(
    tiny_policy: Any, tmp_path: Path, asked: tuple[str, Any], behind_http: bool
) -> None:
    tokenizer = tiny_policy[1]
    async with recording(tokenizer, behind_http=behind_http) as agent:
        then = [await agent.ask(*asked) for _ in range(2)]
        calls = await kept(agent, tmp_path)
    async with replaying(tokenizer, calls) as agent:
        now = [await agent.ask(*asked) for _ in range(2)]
        again = await agent.calls()
    assert [(reply.status_code, reply.content) for reply in now] == [(200, reply.content) for reply in then]
    assert then[0].content != then[1].content or behind_http  # two replies have two ids
    assert all(call.untrainable_reason == "it is part of a replay of rollout ro-recorded" for call in again)
    assert [(c.prompt_ids, c.response_ids, c.logprobs) for c in again] == [
        (c.prompt_ids, c.response_ids, c.logprobs) for c in calls
    ]


async def test_a_response_that_a_later_request_names_is_replayed(tiny_policy: Any, tmp_path: Path) -> None:
    async def converse(agent: Agent) -> list[bytes]:
        first = await agent.ask("v1/responses", RESPONSES)
        output = {"type": "function_call_output", "output": "42", "call_id": first.json()["output"][-1]["call_id"]}
        later = RESPONSES | {"input": [output], "previous_response_id": first.json()["id"]}
        return [first.content, (await agent.ask("v1/responses", later)).content]

    async with recording(tiny_policy[1]) as agent:
        then, calls = await converse(agent), await kept(agent, tmp_path)
    async with replaying(tiny_policy[1], calls) as agent:
        assert await converse(agent) == then


async def test_calls_are_found_by_agent_prompt_and_options_in_any_order(tiny_policy: Any, tmp_path: Path) -> None:
    path, body = ASKED["chat"]
    other = body | {"messages": [{"role": "user", "content": "Another question"}]}
    forced = body | {"tool_choice": "required"}
    async with recording(tiny_policy[1]) as agent:
        then = [
            (await agent.ask(path, asked, name)).content
            for asked, name in ((body, "a"), (other, "a"), (body, "b"), (body, "a"))
        ]
        calls = await kept(agent, tmp_path)
    async with replaying(tiny_policy[1], calls) as agent:
        now = [
            (await agent.ask(path, asked, name)).content
            for asked, name in ((body, "b"), (body, "a"), (other, "a"), (body, "a"))
        ]
        assert now == [then[2], then[0], then[1], then[3]]
        for asked, name in ((body, "a"), (body, "c"), (forced, "a")):
            refused = await agent.ask(path, asked, name)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, NOT_RECORDED)


async def test_replies_come_in_the_order_in_which_they_ended(tiny_policy: Any, tmp_path: Path) -> None:
    path, body = ASKED["chat"]
    questions = [body | {"messages": [{"role": "user", "content": f"Question {number}"}]} for number in range(3)]
    async with recording(tiny_policy[1]) as agent:
        for question in questions:
            await agent.ask(path, question)
        calls = await kept(agent, tmp_path)
    # In the record they ran at once, and ended the other way round.
    calls = [replace(call, started=100.0, ended=110.0 - place) for place, call in enumerate(calls)]
    async with replaying(tiny_policy[1], calls) as agent:
        order = list[int]()

        async def ask(number: int) -> None:
            await agent.ask(path, questions[number])
            order.append(number)

        await asyncio.gather(*map(ask, range(3)))
        assert order == [2, 1, 0]


async def test_equal_calls_at_once_are_those_that_the_agent_made_in_the_same_places(
    tiny_policy: Any, tmp_path: Path
) -> None:
    path, body = ASKED["chat"]
    async with recording(tiny_policy[1]) as agent:
        then = [(await agent.ask(path, body, call_id=f"0.{task:x}.0-x")).json()["id"] for task in (9, 10, 17, 18)]
        calls = await kept(agent, tmp_path)
    calls = [replace(call, started=100.0, ended=110.0 + place) for place, call in enumerate(calls)]
    async with replaying(tiny_policy[1], calls) as agent:
        asked = [agent.ask(path, body, call_id=f"0.{task:x}.0-y") for task in (40, 39, 21, 20)]
        now = [reply.json()["id"] for reply in await asyncio.gather(*asked)]
    assert now == then[::-1]


async def test_what_had_started_before_a_call_ended_is_replayed_with_it(tiny_policy: Any, tmp_path: Path) -> None:
    path, body = ASKED["chat"]
    questions = [body | {"messages": [{"role": "user", "content": f"Question {number}"}]} for number in range(2)]
    async with recording(tiny_policy[1]) as agent:
        for question in questions:
            await agent.ask(path, question)
        calls = await kept(agent, tmp_path)
    calls = [replace(call, started=100.0 + place, ended=110.0 + place) for place, call in enumerate(calls)]
    async with replaying(tiny_policy[1], calls) as agent:
        first = asyncio.create_task(agent.ask(path, questions[0]))
        done, _ = await asyncio.wait({first}, timeout=0.5)
        assert not done  # an agent that goes on with the first reply might leave the second call
        second = asyncio.create_task(agent.ask(path, questions[1]))
        assert [(await call).status_code for call in (first, second)] == [200, 200]


async def test_a_stream_that_the_agent_left_ends_where_it_did(tiny_policy: Any, tmp_path: Path) -> None:
    class Unfinished(SayingEngine):
        def submit(self, prompt: tuple[int, ...], sampling: Sampling, *, on_token: Any = None) -> Future[Completion]:
            for token in self.tokenizer("a singer", add_special_tokens=False)["input_ids"]:
                on_token(token, -0.5)
            return Future()

    async def leave(agent: Agent) -> bytes:
        read = b""
        url, body = f"{agent._root}v1/chat/completions", CHAT | {"stream": True}
        client = httpx.AsyncClient(trust_env=False, timeout=600)
        async with client, client.stream("POST", url, json=body) as reply:
            async for part in reply.aiter_raw():
                read += part
                if b"singer" in read:
                    break
        while not await agent.calls():  # noqa: ASYNC110 (the proxy notices it in its own time)
            await asyncio.sleep(0.01)
        return read

    server, store = PolicyServer(Unfinished(tiny_policy[1])), OpenRollouts()  # type: ignore[arg-type]
    async with LLMProxy(sink=store, policy=server) as proxy:
        agent = Agent(proxy, store, await store.start(task={"id": "1"}))
        then, calls = await leave(agent), await kept(agent, tmp_path)
    assert [call.finish_reason for call in calls] == ["cancelled"]
    async with replaying(tiny_policy[1], calls) as agent:
        assert await leave(agent) == then
        [again] = await agent.calls()
    assert (again.finish_reason, again.response_ids) == ("cancelled", calls[0].response_ids)


async def test_a_call_without_a_reply_in_a_rollout_that_was_stopped_is_where_its_record_ends(
    tiny_policy: Any, tmp_path: Path
) -> None:
    path, body = ASKED["chat"]
    async with recording(tiny_policy[1]) as agent:
        await agent.ask(path, body)
        [call] = await kept(agent, tmp_path)
    call = replace(call, status=499, error="the client left", response_ids=[], logprobs=[], ended=call.started + 900)
    async with replaying(tiny_policy[1], [call], is_cut=True) as agent:
        ended = await agent.ask(path, body)  # at once
    assert (ended.status_code, ended.json()["error"]["code"]) == (400, NOT_RECORDED)


async def test_an_attempt_begins_the_record_again(tiny_policy: Any, tmp_path: Path) -> None:
    path, body = ASKED["chat"]
    async with recording(tiny_policy[1]) as agent:
        then, calls = (await agent.ask(path, body)).content, await kept(agent, tmp_path)
    server, store, replay = PolicyServer(RecordEngine(tiny_policy[1], max_model_len=500)), OpenRollouts(), Replay()
    async with LLMProxy(sink=store, policy=server, replay=replay) as proxy:
        rollout = await store.start(task={"id": "1"}, max_attempts=2)
        replay.add(rollout.rollout_id, "ro-recorded", calls)
        first = Agent(proxy, store, rollout)
        assert [(await first.ask(path, body)).status_code for _ in range(2)] == [200, 400]
        await store.end_attempt(rollout.rollout_id, rollout.attempt.attempt_id, None, failed=True)
        proxy.attempt_ended(rollout.rollout_id)
        [again] = await store.dequeue(1)
        assert (await Agent(proxy, store, again).ask(path, body)).content == then


async def test_a_call_that_failed_fails_again_with_the_same_bytes(tiny_policy: Any, tmp_path: Path) -> None:
    asked = [
        ("v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "the age " * 600}]}),
        ("v1/messages", MESSAGES | {"messages": [{"role": "user", "content": "the age " * 600}]}),
        ("v1/chat/completions", CHAT | {"n": 0}),
    ]
    async with recording(tiny_policy[1]) as agent:
        then, calls = [await agent.ask(*each) for each in asked], await kept(agent, tmp_path)
    async with replaying(tiny_policy[1], calls) as agent:
        now = [await agent.ask(*each) for each in asked]
    assert [(each.status_code, each.content) for each in now] == [(400, each.content) for each in then]
    assert json.loads(now[0].content)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body", [b"", b'{"id": "caf\xc3\xa9 = 1"}', b"=", b"data: {}\n\n\x00", bytes(range(256))], ids=repr
)
def test_a_body_is_recorded_as_it_is(body: bytes) -> None:
    assert unpack_body(pack_body(body)) == body
    assert unpack_body(b2a_base64(zlib.compress(body)).decode()) == body  # in earlier records all are compressed
