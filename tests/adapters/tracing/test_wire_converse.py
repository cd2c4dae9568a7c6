"""Agents that use Bedrock's Converse are served and traced like those that use chat completions."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from botocore.exceptions import ClientError, EventStreamError
from providers import BEDROCK_MODEL, bedrock_ask, bedrock_client, bedrock_events
from wire import CALL, OTHER_CALL, PARAMETERS, bench, policy

from groundwire.adapters.tracing.scripted_server import Reply
from groundwire.adapters.tracing.wire.request import warn_ignored

SPEC: Any = {"toolSpec": {"name": "run", "description": "Run it", "inputSchema": {"json": PARAMETERS}}}
CACHE: Any = {"cachePoint": {"type": "default"}}
QUESTION: Any = {"role": "user", "content": [{"text": "q"}]}

__all__ = ["bench", "policy"]


async def ask(b: Any, **request: Any) -> Any:
    return await asyncio.to_thread(bedrock_client(b.root).converse, modelId=BEDROCK_MODEL, **request)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_traced_as_the_chat_completion_that_it_is(bench: Any, stream: bool) -> None:
    b = await bench(Reply(text="schön", logprobs=[-0.25] * 7))
    config = {"temperature": 0.5, "maxTokens": 9, "stopSequences": [";"]}
    request = {
        "messages": [QUESTION],
        "system": [{"text": "Be brief"}, CACHE],
        "inferenceConfig": config,
        "additionalModelRequestFields": {"top_k": 4},
    }
    message = await bedrock_ask(b, stream, **request)
    assert message == {"role": "assistant", "content": [{"text": "schön"}]}
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "q"}]
    call = await b.check_call(messages, "schön", temperature=0.5, max_tokens=9, stop=[";"], top_k=4)
    assert (call.model, call.logprobs) == (BEDROCK_MODEL, [-0.25] * 7) or not b.proxy.upstreams.urls


async def test_a_streams_events_are_those_of_aws(bench: Any) -> None:
    b = await bench(Reply(text="ab", tool_calls=[CALL, OTHER_CALL]))
    events = await asyncio.to_thread(
        bedrock_events, bedrock_client(b.root), messages=[QUESTION], toolConfig={"tools": [SPEC]}
    )
    block = ["contentBlockStart", "contentBlockDelta", "contentBlockStop"]
    assert [next(iter(event)) for event in events] == [
        "messageStart",
        *["contentBlockDelta"] * 2,
        "contentBlockStop",
        *block * 2,
        "messageStop",
        "metadata",
    ]
    assert [event["contentBlockStop"]["contentBlockIndex"] for event in events if "contentBlockStop" in event] == [
        *range(3)
    ]
    assert events[-2]["messageStop"]["stopReason"] == "tool_use"
    [call] = await b.calls()
    usage = events[-1]["metadata"]["usage"]
    assert (usage["inputTokens"], usage["outputTokens"]) == (len(call.prompt_ids), len(call.response_ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_continues_the_conversation_token_by_token(bench: Any, stream: bool) -> None:
    b = await bench(Reply(text="Look: ", tool_calls=[CALL, OTHER_CALL]), "done")
    tools = {"tools": [SPEC, CACHE]}
    first = await bedrock_ask(b, stream, messages=[QUESTION], toolConfig=tools)
    assert [use["toolUse"]["input"] for use in first["content"][1:]] == [{"sql": "SELECT 1"}] * 2
    results = [
        {"toolResult": {"toolUseId": "call-1", "content": [{"text": "1"}]}},
        {"toolResult": {"toolUseId": "call-2", "content": [{"json": {"rows": [2]}}], "status": "success"}},
        {"text": "Go on"},
        CACHE,
    ]
    turns = [QUESTION, first, {"role": "user", "content": results}]
    second = await bedrock_ask(b, stream, messages=turns, toolConfig=tools)
    assert second["content"] == [{"text": "done"}]
    calls = await b.check_turns()
    assert calls[1].messages[1:] == [
        {"role": "assistant", "content": "Look: ", "tool_calls": [CALL, OTHER_CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": "1"},
        {"role": "tool", "tool_call_id": "call-2", "content": '{"rows": [2]}'},
        {"role": "user", "content": "Go on"},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_arguments_come_back_as_the_model_wrote_them(bench: Any, stream: bool) -> None:
    call = {**CALL, "function": {"name": "run", "arguments": '{"sql": '}}
    b = await bench(Reply(tool_calls=[call]), "x")
    said = await bedrock_ask(b, stream, messages=[QUESTION], toolConfig={"tools": [SPEC]})
    assert said["content"][0]["toolUse"]["input"] == {"malformed_arguments": '{"sql": '}
    result = {"toolResult": {"toolUseId": "call-1", "content": [{"text": "no JSON"}], "status": "error"}}
    await bedrock_ask(b, messages=[QUESTION, said, {"role": "user", "content": [result]}])
    assert len(await b.trajectories()) == 1


async def test_thoughts_that_are_passed_back_are_accepted_and_guardrails_named_once(bench: Any, caplog: Any) -> None:
    warn_ignored.cache_clear()
    b = await bench("x", "y")
    thoughts = [
        {"reasoningContent": {"reasoningText": {"text": "hm"}}},
        {"reasoningContent": {"redactedContent": b"x"}},
    ]
    said = {"role": "assistant", "content": [*thoughts, {"text": "a"}]}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            guardrail = {"guardrailIdentifier": "abcdefgh", "guardrailVersion": "1"}
            await ask(b, messages=[QUESTION, said, QUESTION], guardrailConfig=guardrail)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("groundwire")] == [
        f"agents send the field {name} of the Converse API, which has no effect on the policy"
        for name in ("guardrailConfig", "reasoningContent.redactedContent")
    ]
    call, _ = await b.calls()
    assert call.messages[1] == {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"auto": {}}, "auto"),
        ({"any": {}}, "required"),
        ({"tool": {"name": "run"}}, {"type": "function", "function": {"name": "run"}}),
    ],
)
async def test_the_choice_of_tools_and_the_format_are_passed_on(bench: Any, choice: Any, sent: Any) -> None:
    b = await bench("{}")
    schema = {"jsonSchema": {"schema": '{"type": "object"}', "name": "answer"}}
    output = {"textFormat": {"type": "json_schema", "structure": schema}}
    await ask(b, messages=[QUESTION], toolConfig={"tools": [SPEC], "toolChoice": choice}, outputConfig=output)
    [asked] = b.server.requests
    assert asked["tool_choice"] == sent
    assert asked["response_format"]["json_schema"] == {"name": "answer", "schema": {"type": "object"}}


async def test_images_are_passed_on(bench: Any) -> None:
    b = await bench("x")
    image = {"image": {"format": "png", "source": {"bytes": b"ABC"}}}
    await ask(b, messages=[{"role": "user", "content": [{"text": "q"}, image]}])
    [call] = await b.calls()
    assert call.messages[0]["content"][1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


async def test_a_reply_that_ends_at_the_limit_says_so(bench: Any) -> None:
    b = await bench(Reply(text="a", finish_reason="length"))
    assert (await ask(b, messages=[QUESTION]))["stopReason"] == "max_tokens"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"toolConfig": {"tools": [{"systemTool": {"name": "x"}}]}},
            "has 'systemTool', which AWS runs on its own serv",
        ),
        (
            {"messages": [{"role": "user", "content": [{"document": {"name": "d", "source": {"text": "x"}}}]}]},
            r"messages\[0\].content\[0\] has document: send text, images, tool uses and tool results",
        ),
        ({"promptVariables": {"a": {"text": "b"}}}, "promptVariables is not served"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [{"text": "{"}]}]}, "the last message is the assist"),
        ({"additionalModelRequestFields": {"n": 2}}, "n is 2: only chat completions have several choices"),
    ],
)
async def test_what_is_not_served_is_refused_in_one_sentence_and_recorded(
    bench: Any, options: Any, message: str
) -> None:
    b = await bench("x")
    with pytest.raises(ClientError, match=message) as caught:
        await ask(b, **{"messages": [QUESTION], **options})
    assert caught.value.response["Error"]["Code"] == "ValidationException"
    assert b.server.requests == []
    assert [call.status for call in await b.calls()] == [400]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_policys_refusal_reaches_the_agent_as_an_exception_of_aws(bench: Any, stream: bool) -> None:
    b = await bench(Reply(status=429, text="too busy"))
    client = bedrock_client(b.root)
    with pytest.raises(client.exceptions.ThrottlingException, match="too busy"):
        await asyncio.to_thread(
            client.converse_stream if stream else client.converse, modelId=BEDROCK_MODEL, messages=[QUESTION]
        )
    [call] = await b.calls()
    assert (call.status, call.error) == (429, "too busy")


async def test_a_stream_that_breaks_off_ends_with_an_exception(bench: Any) -> None:
    b = await bench(Reply(text="ab", breaks_off=True))
    if not b.proxy.upstreams.urls:
        pytest.skip("a policy in this process has no connection")
    with pytest.raises(EventStreamError, match=r"internalServerException.*the policy server broke off its stream"):
        await bedrock_ask(b, True, messages=[QUESTION])


async def test_the_tokens_of_a_prompt_are_counted_as_the_policy_will_see_them(policy: Any) -> None:
    request: Any = {"messages": [QUESTION], "system": [{"text": "Be brief"}]}
    client = bedrock_client(policy.root)
    counted = await asyncio.to_thread(client.count_tokens, modelId="m", input={"converse": request})
    reply = await ask(policy, **request, inferenceConfig={"maxTokens": 2})
    [call] = await policy.calls()
    sent = reply["usage"]["inputTokens"] + reply["usage"]["cacheReadInputTokens"]
    assert counted["inputTokens"] == sent == len(call.prompt_ids)
