"""Agents that use Ollama's chat are served and traced like those that use chat completions."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from providers import ApiError, ollama_ask, ollama_replies
from wire import CALL, CHAT_TOOL, OTHER_CALL, bench

from groundwire.adapters.tracing.scripted_server import Reply, render
from groundwire.adapters.tracing.wire.request import warn_ignored

QUESTION: Any = {"role": "user", "content": "q"}

__all__ = ["bench"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_traced_as_the_chat_completion_that_it_is(bench: Any, stream: bool) -> None:
    b = await bench(Reply(text="schön", logprobs=[-0.25] * 7))
    options = {"temperature": 0.5, "seed": 3, "num_predict": 9, "stop": [";"], "top_k": 4}
    messages = [{"role": "system", "content": "Be brief"}, QUESTION]
    replies = await ollama_replies(b, stream, messages=messages, options=options)
    assert "".join(reply["message"]["content"] for reply in replies) == "schön"
    assert [reply["done"] for reply in replies] == [*[False] * (len(replies) - 1), True]
    assert (replies[-1]["done_reason"], len(replies) > 1) == ("stop", stream)
    assert (replies[-1]["prompt_eval_count"], replies[-1]["eval_count"]) == (len(render(messages)), 7)
    await b.check_call(messages, "schön", temperature=0.5, max_tokens=9, stop=[";"], seed=3, top_k=4)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_continues_the_conversation_token_by_token(
    bench: Any, stream: bool, with_ids: bool
) -> None:
    b = await bench(Reply(text="Look: ", tool_calls=[CALL, OTHER_CALL]), "done")
    first = await ollama_ask(b, stream, messages=[QUESTION], tools=[CHAT_TOOL])
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == [{"sql": "SELECT 1"}] * 2
    results: list[Any] = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    for call, result in zip(first["tool_calls"], results, strict=True):
        call_id = call.pop("id")
        if with_ids:
            call["id"] = result["tool_call_id"] = call_id
        else:
            result["tool_name"] = "run"
    turns = [QUESTION, first, *results]
    assert (await ollama_ask(b, stream, messages=turns, tools=[CHAT_TOOL]))["content"] == "done"
    calls = await b.check_turns()
    ids = ["call-1", "call-2"] if with_ids else ["call_0", "call_1"]
    assert calls[1].messages[1:] == [
        {"role": "assistant", "content": "Look: ", "tool_calls": [{**CALL, "id": call_id} for call_id in ids]},
        {"role": "tool", "tool_call_id": ids[0], "content": "1"},
        {"role": "tool", "tool_call_id": ids[1], "content": "2"},
    ]


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        ("json", {"type": "json_object"}),
        (
            {"type": "object"},
            {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}},
        ),
        ("", None),
        (None, None),
    ],
)
async def test_the_format_is_passed_on(bench: Any, form: Any, sent: Any) -> None:
    b = await bench("{}")
    await ollama_ask(b, messages=[QUESTION], format=form, options={"num_predict": -1})
    [asked] = b.server.requests
    assert (asked.get("response_format"), asked.get("max_tokens")) == (sent, None)


async def test_thoughts_and_images_are_passed_on_and_settings_of_the_server_named_once(bench: Any, caplog: Any) -> None:
    warn_ignored.cache_clear()
    b = await bench("x", "y")
    messages = [
        {**QUESTION, "images": ["QUJD"]},
        {"role": "assistant", "content": "a", "thinking": "hm"},
        QUESTION,
    ]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await ollama_ask(b, messages=messages, options={"num_ctx": 4096}, think=True, keep_alive="5m")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("groundwire")] == [
        f"agents send the field {name} of the Ollama API, which has no effect on the policy"
        for name in ("options.num_ctx", "think")
    ]
    call, _ = await b.calls()
    assert call.messages[0]["content"][1]["image_url"]["url"].endswith(";base64,QUJD")
    assert call.messages[1] == {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm"}


async def test_a_reply_that_ends_at_the_limit_says_so(bench: Any) -> None:
    b = await bench(Reply(text="a", finish_reason="length"))
    assert (await ollama_replies(b, True, messages=[QUESTION]))[-1]["done_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "yaml"}, "format must be 'json' or a JSON schema, not 'yaml'"),
        ({"options": {"n": 2}}, "n is 2: only chat completions have several choices"),
        ({"messages": 3}, "messages must be a list, not 3"),
        ({"tools": ["run"]}, "tools[0] must be an object, not 'run'"),
    ],
)
async def test_what_is_not_served_is_refused_in_one_sentence_and_recorded(
    bench: Any, options: Any, message: str
) -> None:
    b = await bench("x")
    with pytest.raises(ApiError) as caught:
        await ollama_ask(b, **{"messages": [QUESTION], **options})
    assert (caught.value.status, caught.value.body) == (400, {"error": message})
    assert b.server.requests == []
    assert [call.status for call in await b.calls()] == [400]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_policys_refusal_reaches_the_agent_in_ollamas_format(bench: Any, stream: bool) -> None:
    b = await bench(Reply(status=429, text="too busy"))
    with pytest.raises(ApiError) as caught:
        await ollama_ask(b, stream, messages=[QUESTION])
    assert (caught.value.status, caught.value.body) == (429, {"error": "too busy"})
    [call] = await b.calls()
    assert (call.status, call.error) == (429, "too busy")


async def test_a_stream_that_breaks_off_ends_with_an_error(bench: Any) -> None:
    b = await bench(Reply(text="ab", breaks_off=True))
    if not b.proxy.upstreams.urls:
        pytest.skip("a policy in this process has no connection")
    with pytest.raises(KeyError):  # the last line has no message
        await ollama_ask(b, True, messages=[QUESTION])
    *_, last = (await b.calls())[0].error.split("; ")
    assert last.startswith("the policy server broke off its stream")
