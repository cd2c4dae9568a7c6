"""With the policy in its own process, the proxy answers and traces as with a policy behind HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import openai
import pytest
from open_rollouts import OpenRollouts

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.tools.http.access_token import access_token
from groundwire.train.policy.errors import ContextLengthError, EngineError
from groundwire.train.policy.server import PolicyServer
from groundwire.train.policy.types import Completion, Sampling

HELLO = [{"role": "user", "content": "the age of a singer"}]
CALL = '<tool_call>{"name": "query", "arguments": {"sql": "SELECT 1"}}</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "query", "parameters": {"type": "object"}}}]


class _Engine:
    """Answers with ``text``; may fail, refuse or never answer."""

    max_model_len, weights_version = 400, 3

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, "select age"
        self.error: Exception | None = None
        self.slow, self.finish_reason = False, "stop"
        self.logprob: Any = -0.5
        self.samplings = list[Sampling]()
        self.waiting = list[Future[Completion]]()

    def detokenize(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, *, on_token: Any = None) -> Future[Completion]:
        self.samplings.append(sampling)
        if isinstance(self.error, ContextLengthError):
            raise self.error
        ids = [*self.tokenizer(self.text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        future: Future[Completion] = Future()
        for token in ids if on_token else ():
            on_token(token, -0.5)
        if self.error is not None:
            future.set_exception(self.error)
        elif self.slow:
            self.waiting.append(future)
        else:
            logprobs = [self.logprob] * len(ids)
            future.set_result(Completion(prompt, ids, logprobs, self.detokenize(ids), self.finish_reason, 3, 0, 2))
        return future


class _Agent:
    """A rollout's agent and its traced calls."""

    def __init__(self, engine: _Engine, proxy: LLMProxy, store: Any, rollout: Any) -> None:
        self.engine, self.rollout_id, self._proxy, self._store = engine, rollout.rollout_id, proxy, store
        self.session = f"{rollout.rollout_id}/{rollout.attempt.attempt_id}"
        url = proxy.base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        self.client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    async def ask(self, **options: Any) -> Any:
        asked = {"model": "any", "messages": HELLO, **options}
        answer = await self.client.chat.completions.create(**asked)
        return [chunk async for chunk in answer] if options.get("stream") else answer

    async def call(self) -> LLMCall:
        deadline = asyncio.get_running_loop().time() + 10
        while True:
            await self._proxy.flush(self.rollout_id)
            calls = await self._store.calls(self.rollout_id)
            if calls:
                same = {"rollout_id": "", "attempt_id": "", "started": 0.0, "ended": 0.0}
                return replace(calls[0], **same, reply_key="", reply_body="")
            assert asyncio.get_running_loop().time() < deadline, "no call was traced"
            await asyncio.sleep(0.01)


@pytest.fixture
async def agents(tiny_policy: Any) -> AsyncIterator[list[_Agent]]:
    """One agent of a proxy with the policy in its process, and one of a proxy with the policy behind HTTP."""
    made, closing = [], list[Any]()
    for local in (True, False):
        engine: Any = _Engine(tiny_policy[1])
        server, store = PolicyServer(engine), OpenRollouts()
        await server.start()
        model: dict[str, Any] = {"policy": server}
        if not local:
            model = {"upstreams": [f"{server.url}/v1"], "model": server.model_name, "api_key": access_token()}
        proxy = LLMProxy(**model, sink=store)
        await proxy.start()
        made.append(_Agent(engine, proxy, store, await store.start()))
        closing += [made[-1].client.close, proxy.stop, server.stop]
    yield made
    for close in closing:
        await close()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_reply_and_the_same_call(agents: list[_Agent], stream: bool) -> None:
    answers, calls = [], []
    for agent in agents:
        answer = await agent.ask(stream=stream, temperature=0.5)
        answers.append([(each.choices[0].to_dict(), each.model) for each in (answer if stream else [answer])])
        calls.append(await agent.call())
        [sampling] = agent.engine.samplings
        assert (sampling.temperature, sampling.session) == (0.5, agent.session)
    local, served = calls
    assert local.reply_id.startswith("chatcmpl-")
    assert local == replace(served, reply_id=local.reply_id)
    assert agents[0].engine.detokenize(local.response_ids) == "select age"
    assert (set(local.logprobs), local.finish_reason, local.untrainable_reason) == ({-0.5}, "stop", "")
    assert (local.weights_version, local.first_weights_version) == (3, 2)
    assert local.reply == {"role": "assistant", "content": "select age"}
    # Behind HTTP the agent also gets the ids and logprobs that the proxy requests.
    asked_for = [[{**choice, "logprobs": None} for choice, _ in each] for each in answers]
    for choice in asked_for[1]:
        choice.pop("token_ids", None)
    assert asked_for[0] == asked_for[1]
    assert {name for each in answers for _, name in each} == {"policy"}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_traced_tool_call_is_the_one_that_the_agent_got(agents: list[_Agent], stream: bool) -> None:
    for agent in agents:
        agent.engine.text = f"look: {CALL}"
        answer = await agent.ask(stream=stream, tools=TOOLS)
        last = [each.choices[0] for each in answer][-1].delta if stream else answer.choices[0].message
        call = await agent.call()
        assert call.finish_reason == "tool_calls"
        [traced] = call.reply["tool_calls"]
        assert traced["id"] == last.tool_calls[0].id
        assert traced["function"] == {"name": "query", "arguments": '{"sql": "SELECT 1"}'}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_the_limit_cut_off_is_length_whatever_tool_call_it_completed(
    agents: list[_Agent], stream: bool
) -> None:
    for agent in agents:
        agent.engine.text, agent.engine.finish_reason = f'{CALL}\n<tool_call>\n{{"name": "query", "argum', "length"
        answer = await agent.ask(stream=stream, tools=TOOLS)
        last = answer[-1] if stream else answer
        assert last.choices[0].finish_reason == "length"
        call = await agent.call()
        assert (call.finish_reason, len(call.reply["tool_calls"])) == ("length", 1)
        assert call.truncated


@pytest.mark.parametrize("stream", [False, True])
async def test_the_call_has_the_grammar_that_the_policy_sampled_with(agents: list[_Agent], stream: bool) -> None:
    for agent in agents:
        await agent.ask(stream=stream, tools=TOOLS, tool_choice="required")
        call = await agent.call()
        assert json.loads(call.grammar) == json.loads(agent.engine.samplings[0].grammar)
        assert [tool["name"] for tool in json.loads(call.grammar)["calls"]["tools"]] == ["query"]
        assert call.untrainable_reason == ""


async def test_an_agent_gets_ids_and_logprobs_on_request(agents: list[_Agent]) -> None:
    answer = await agents[0].ask(logprobs=True, extra_body={"return_token_ids": True})
    call = await agents[0].call()
    assert answer.prompt_token_ids == call.prompt_ids
    assert answer.choices[0].token_ids == call.response_ids
    assert [token.logprob for token in answer.choices[0].logprobs.content] == call.logprobs


@pytest.mark.parametrize(
    ("error", "options", "status", "message"),
    [
        (ContextLengthError(500, 400), {}, 400, "the prompt has 500 tokens"),
        (EngineError("out of cards"), {}, 500, "out of cards"),
        (None, {"temperature": -1}, 400, "greater than or equal to 0, not -1"),
    ],
)
async def test_a_refused_request_is_recorded_with_its_reason(
    agents: list[_Agent], error: Exception | None, options: Any, status: int, message: str
) -> None:
    calls = []
    for agent in agents:
        agent.engine.error = error
        with pytest.raises(openai.APIStatusError, match=message) as caught:
            await agent.ask(**options)
        assert caught.value.status_code == status
        calls.append(await agent.call())
        assert f"failed with status {status}" in calls[-1].untrainable_reason
        assert message in calls[-1].untrainable_reason
    assert calls[0] == calls[1]


async def test_a_failure_within_a_stream_is_sent_and_recorded(agents: list[_Agent]) -> None:
    for agent in agents:
        agent.engine.error = EngineError("out of cards")
        with pytest.raises(openai.APIError, match="out of cards"):
            await agent.ask(stream=True)
        assert "out of cards" in (await agent.call()).untrainable_reason


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_cancels_the_request(agents: list[_Agent], stream: bool) -> None:
    for agent in agents:
        agent.engine.slow = True
        asking = asyncio.create_task(agent.ask(stream=stream))
        while not agent.engine.waiting:  # noqa: ASYNC110 (another task's list)
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert (await agent.call()).status in ((200, 499) if stream else (499,))  # 200 if a token was sent
        while not agent.engine.waiting[0].done():  # noqa: ASYNC110 (another task's list)
            await asyncio.sleep(0.01)
        assert agent.engine.waiting[0].cancelled()


async def test_an_unreadable_reply_is_a_failed_call(agents: list[_Agent]) -> None:
    for agent in agents:
        agent.engine.logprob = None
        await agent.ask()
        assert "cannot be read" in (await agent.call()).untrainable_reason


async def test_a_local_policy_and_upstreams_exclude_each_other(tiny_policy: Any) -> None:
    engine: Any = _Engine(tiny_policy[1])
    with pytest.raises(TypeError, match="not both"):
        LLMProxy(policy=PolicyServer(engine), upstreams=["http://a/v1"], sink=OpenRollouts())


async def test_the_list_of_models_is_the_policys(agents: list[_Agent]) -> None:
    for agent in agents:
        assert [model.id async for model in agent.client.models.list()] == ["policy"]
