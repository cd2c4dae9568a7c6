"""Agents that use Anthropic's Messages API are served and traced like those that use chat completions."""

from __future__ import annotations

import logging
from typing import Any

import anthropic
import pytest
from wire import CALL, OTHER_CALL, PARAMETERS, Bench, bench, policy

from groundwire.adapters.tracing.scripted_server import Reply, render
from groundwire.adapters.tracing.wire.request import warn_ignored

TOOL: Any = {"name": "run", "description": "Run it", "input_schema": PARAMETERS}
QUESTION: Any = {"role": "user", "content": "q"}

__all__ = ["bench", "policy"]


def client(b: Bench, *, url: str = "") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url or b.root, api_key="none", max_retries=0)


async def ask(b: Bench, stream: bool = False, **options: Any) -> Any:
    async with client(b) as asking:
        request = {"model": "claude", "max_tokens": 9, "messages": [QUESTION], **options}
        if not stream:
            return await asking.messages.create(**request)
        async with asking.messages.stream(**request) as events:
            return await events.get_final_message()


@pytest.mark.parametrize("system", ["Be brief", [{"type": "text", "text": "Be brief", "cache_control": {}}]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_traced_as_the_chat_completion_that_it_is(bench: Any, stream: bool, system: Any) -> None:
    b = await bench(Reply(text="schön", logprobs=[-0.25] * 7))
    sampling = {"temperature": 0.5, "seed": 3}
    answer = await ask(b, stream, system=system, stop_sequences=[";"], extra_body=sampling)
    assert [(block.type, block.text) for block in answer.content] == [("text", "schön")]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    messages = [{"role": "system", "content": "Be brief"}, QUESTION]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(render(messages)), 7)
    call = await b.check_call(messages, "schön", temperature=0.5, max_tokens=9, stop=[";"], seed=3)
    assert call.logprobs == [-0.25] * 7


async def test_a_streams_events_are_those_of_anthropic(bench: Any) -> None:
    b = await bench(Reply(text="ab", tool_calls=[CALL, OTHER_CALL]))
    async with client(b) as asking:
        events = [
            event
            async for event in await asking.messages.create(
                model="any", max_tokens=9, messages=[QUESTION], tools=[TOOL], stream=True
            )
        ]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event.type for event in events] == [
        "message_start",
        *[*block[:2], *block[1:]],  # two deltas of the text
        *block * 2,
        "message_delta",
        "message_stop",
    ]
    assert events[-2].delta.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_continues_the_conversation_token_by_token(bench: Any, stream: bool) -> None:
    b = await bench(Reply(text="Look: ", tool_calls=[CALL, OTHER_CALL]), "done")
    first = await ask(b, stream, system="s", tools=[TOOL])
    assert (first.stop_reason, [block.type for block in first.content]) == (
        "tool_use",
        ["text", "tool_use", "tool_use"],
    )
    assert first.content[1].input == {"sql": "SELECT 1"}
    results = [
        {"type": "tool_result", "tool_use_id": "call-1", "content": "1"},
        {"type": "tool_result", "tool_use_id": "call-2", "content": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "Go on"},
    ]
    said = [block.to_dict() for block in first.content]
    turns = [QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    second = await ask(b, stream, system="s", tools=[TOOL], messages=turns)
    assert second.content[0].text == "done"
    calls = await b.check_turns()
    assert calls[1].messages[2:] == [
        {"role": "assistant", "content": "Look: ", "tool_calls": [CALL, OTHER_CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": "1"},
        {"role": "tool", "tool_call_id": "call-2", "content": "2"},
        {"role": "user", "content": "Go on"},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_arguments_come_back_as_the_model_wrote_them(bench: Any, stream: bool) -> None:
    call = {**CALL, "function": {"name": "run", "arguments": '{"sql": '}}
    b = await bench(Reply(tool_calls=[call]), "x")
    first = await ask(b, stream, tools=[TOOL])
    assert first.content[0].input == {"malformed_arguments": '{"sql": '}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": "no JSON", "is_error": True}
    said = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    await ask(b, messages=[QUESTION, said, {"role": "user", "content": [result]}])
    assert len(await b.trajectories()) == 1


async def test_thinking_blocks_that_are_passed_back_are_accepted(bench: Any, caplog: Any) -> None:
    warn_ignored.cache_clear()
    b = await bench("x", "y")
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"}]
    said = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "a"}]}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await ask(b, messages=[QUESTION, said, QUESTION], thinking={"type": "enabled", "budget_tokens": 1024})
    assert [record.getMessage() for record in caplog.records if record.name.startswith("groundwire")] == [
        f"agents send the field {name} of the Messages API, which has no effect on the policy"
        for name in ("redacted_thinking.data", "thinking")
    ]
    call, _ = await b.calls()
    assert call.messages[1] == {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "run"}, {"type": "function", "function": {"name": "run"}}),
    ],
)
async def test_the_choice_of_tools_and_the_format_are_passed_on(bench: Any, choice: Any, sent: Any) -> None:
    b = await bench("{}")
    format_ = {"type": "json_schema", "schema": {"type": "object"}}
    choice = {**choice, **({} if choice["type"] == "none" else {"disable_parallel_tool_use": True})}
    await ask(b, tools=[TOOL], tool_choice=choice, output_config={"format": format_})
    [asked] = b.server.requests
    assert asked["tool_choice"] == sent
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert asked.get("parallel_tool_calls") == (None if choice["type"] == "none" else False)


async def test_a_reply_that_ends_at_the_limit_says_so(bench: Any) -> None:
    b = await bench(Reply(text="a", finish_reason="length"))
    assert (await ask(b, True)).stop_reason == "max_tokens"


async def test_a_base_url_that_ends_in_v1_works_too(bench: Any) -> None:
    b = await bench("x")
    async with client(b, url=b.url) as asking:
        await asking.messages.create(model="any", max_tokens=9, messages=[QUESTION])
    assert len(await b.calls()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\[0\] is of type 'web_search_20250305', wh"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "of type 'document', which is not serv"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is not served"),
        ({"extra_body": {"n": 2}}, "n is 2: only chat completions have several choices"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "{"}]}, "the last message is the assistant's"),
        ({"messages": 3}, "messages must be a list, not 3"),
    ],
)
async def test_what_is_not_served_is_refused_in_one_sentence_and_recorded(
    bench: Any, options: Any, message: str
) -> None:
    b = await bench("x")
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        await ask(b, **options)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert b.server.requests == []
    assert [call.status for call in await b.calls()] == [400]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_policys_refusal_reaches_the_agent_in_anthropics_format(bench: Any, stream: bool) -> None:
    b = await bench(Reply(status=429, text="too busy"))
    with pytest.raises(anthropic.RateLimitError, match="too busy") as caught:
        await ask(b, stream)
    assert caught.value.body == {"type": "error", "error": {"type": "rate_limit_error", "message": "too busy"}}
    [call] = await b.calls()
    assert (call.status, call.error) == (429, "too busy")


async def test_the_tokens_of_a_message_are_counted_as_the_policy_will_see_them(policy: Any) -> None:
    request: Any = {"model": "any", "system": "Be brief", "messages": [QUESTION]}
    async with client(policy) as asking, client(policy, url=policy.url) as with_v1:
        counts = [(await each.messages.count_tokens(**request)).input_tokens for each in (asking, with_v1)]
        reply = await asking.messages.create(max_tokens=2, **request)
        with pytest.raises(anthropic.BadRequestError, match="messages must be a list"):
            await asking.messages.count_tokens(model="any", messages="q")  # type: ignore[arg-type]
    [call] = await policy.calls()
    sent = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert counts == [sent] * 2 == [len(call.prompt_ids)] * 2


async def test_the_tokens_of_an_ended_rollout_are_not_counted(policy: Any) -> None:
    async with client(policy, url=policy.root.replace("/attempt/", "/attempt/other")) as asking:
        with pytest.raises(anthropic.APIStatusError, match="is unknown or has ended") as caught:
            await asking.messages.count_tokens(model="any", messages=[QUESTION])
    assert caught.value.status_code == 410


@pytest.mark.parametrize("stream", [False, True])
async def test_a_messages_client_learns_which_stop_sequence_ended_the_reply(policy: Any, stream: bool) -> None:
    async with anthropic.AsyncAnthropic(base_url=policy.root, api_key="none") as client:
        request: Any = {"model": "m", "max_tokens": 300, "messages": [{"role": "user", "content": "select"}]}
        request["extra_body"] = {"seed": 3}
        ends = []
        for stop in ([], [" "]):
            if stream:
                async with client.messages.stream(**request, stop_sequences=stop) as events:
                    final = await events.get_final_message()
            else:
                final = await client.messages.create(**request, stop_sequences=stop)
            ends.append((final.stop_reason, final.stop_sequence))
    assert ends[1] == ("stop_sequence", " ")
    assert ends[0][1] is None
