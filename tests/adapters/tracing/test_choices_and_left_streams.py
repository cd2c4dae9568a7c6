"""Every sampled token is recorded: those of each choice, and those of a stream that the agent leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from wire import Bench, bench, policy

from groundwire.adapters.tracing import trajectories
from groundwire.adapters.tracing.scripted_server import Reply, encode, render

HELLO: list[Any] = [{"role": "user", "content": "the age of a singer"}]

__all__ = ["bench", "policy"]


async def _chat(b: Bench) -> AsyncIterator[str]:
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none") as client:
        async for chunk in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
            yield chunk.choices[0].delta.content or ""


async def _responses(b: Bench) -> AsyncIterator[str]:
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none") as client:
        async for event in await client.responses.create(model="m", input=HELLO, stream=True):
            yield event.delta if event.type == "response.output_text.delta" else ""


async def _messages(b: Bench) -> AsyncIterator[str]:
    async with anthropic.AsyncAnthropic(base_url=b.root, api_key="none") as client:
        async for event in await client.messages.create(model="m", max_tokens=99, messages=HELLO, stream=True):
            yield event.delta.text if event.type == "content_block_delta" else ""


@pytest.mark.parametrize("stream", [_chat, _responses, _messages])
async def test_a_stream_that_the_agent_leaves_is_recorded_and_trained_up_to_there(bench: Any, stream: Any) -> None:
    b = await bench(Reply(text="a long story", delay_s=60))
    read, parts = "", stream(b)
    while read != "a long story":
        read += await anext(parts)
    await parts.aclose()
    while not (calls := await b.calls()):  # noqa: ASYNC110 (the proxy notices it)
        await asyncio.sleep(0.01)
    [call] = calls
    assert (call.status, call.error, call.untrainable_reason) == (200, "", "")
    assert (call.prompt_ids, call.response_ids) == (render(HELLO), encode("a long story"))
    assert (len(call.logprobs), call.finish_reason) == (12, "cancelled")
    while b.server.cancelled != 1:  # noqa: ASYNC110 (behind HTTP, the server notices it after the proxy)
        await asyncio.sleep(0.01)
    [trajectory] = await b.trajectories()
    assert trajectory.loss_mask == [1] * 12


async def test_the_engine_stops_when_the_agent_leaves_the_stream(policy: Any) -> None:
    read, prompt = list[int](), list[int]()
    async with openai.AsyncOpenAI(base_url=policy.url, api_key="none") as client:
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, stream=True, temperature=2.0, seed=3, extra_body={"return_token_ids": True}
        )
        async for chunk in stream:
            prompt += getattr(chunk, "prompt_token_ids", None) or []
            read += getattr(chunk.choices[0], "token_ids", None) or []
            if len(read) == 5:
                break
        await stream.close()
    while not (calls := await policy.calls()):  # noqa: ASYNC110 (the proxy notices it)
        await asyncio.sleep(0.01)
    [call] = calls
    assert (call.untrainable_reason, call.prompt_ids, call.response_ids[:5]) == ("", prompt, read)
    assert len(call.response_ids) == len(call.logprobs)
    while policy.engine._batch.requests:  # noqa: ASYNC110 (the engine is another thread)
        await asyncio.sleep(0.01)


async def test_a_constrained_stream_that_the_agent_leaves_is_trained_with_its_constraint(policy: Any) -> None:
    schema = {"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 60}
    format_: Any = {"type": "json_schema", "json_schema": {"name": "turns", "schema": schema}}
    async with openai.AsyncOpenAI(base_url=policy.url, api_key="none") as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True, response_format=format_)
        read = 0
        async for _ in stream:
            if (read := read + 1) == 4:
                break
        await stream.close()
    while not (calls := await policy.calls()):  # noqa: ASYNC110 (the proxy notices it)
        await asyncio.sleep(0.01)
    [call] = calls
    assert (call.finish_reason, call.untrainable_reason) == ("cancelled", "")
    assert json.loads(call.grammar) == {"schema": schema}
    assert policy.tokenizer.decode(call.response_ids).startswith('["')


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_is_a_call_and_a_trajectory_of_its_own(policy: Any, stream: bool) -> None:
    shown: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async with openai.AsyncOpenAI(base_url=policy.url, api_key="none") as client:
        request: Any = {"model": "m", "max_tokens": 6, "temperature": 2.0, "extra_body": {"return_token_ids": True}}
        answer = await client.chat.completions.create(messages=HELLO, n=3, stream=stream, **request)
        for part in [chunk async for chunk in answer] if stream else [answer]:
            for choice in part.choices:
                shown[choice.index] += getattr(choice, "token_ids", None) or []
        calls = await policy.calls()
        assert {call.choice: call.response_ids for call in calls} == shown
        assert [call.untrainable_reason for call in calls] == [""] * 3
        assert len({tuple(ids) for ids in shown.values()}) == 3
        said = {"role": "assistant", "content": calls[0].reply["content"]}
        await client.chat.completions.create(messages=[*HELLO, said, *HELLO], **request)
    calls = await policy.calls()
    assert [call.choice for call in calls] == [0, 1, 2, None]
    assert len(trajectories(calls)) == 4


async def test_a_refused_request_for_several_choices_is_one_failed_call(policy: Any) -> None:
    async with openai.AsyncOpenAI(base_url=policy.url, api_key="none") as client:
        for options in ({"n": 129}, {"n": 4, "temperature": -1}):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=HELLO, **options)
    assert [call.status for call in await policy.calls()] == [400, 400]
