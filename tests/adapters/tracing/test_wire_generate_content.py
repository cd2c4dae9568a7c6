"""Agents that use Google's API are served and traced like those that use chat completions."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from providers import GEMINI_MODEL, ApiError, gemini_replies, post
from wire import CALL, OTHER_CALL, PARAMETERS, bench, policy

from groundwire.adapters.tracing.scripted_server import Reply, render
from groundwire.adapters.tracing.wire.request import warn_ignored

TOOL: Any = {"functionDeclarations": [{"name": "run", "description": "Run it", "parametersJsonSchema": PARAMETERS}]}
QUESTION: Any = {"role": "user", "parts": [{"text": "q"}]}

__all__ = ["bench", "policy"]


async def ask(b: Any, stream: bool = False, *, sse: bool = True, **options: Any) -> Any:
    """The parts of a reply, its finish reason and its counts of tokens."""
    replies = await gemini_replies(b, stream, sse=sse, **{"contents": [QUESTION], **options})
    parts = [part for reply in replies for part in reply["candidates"][0]["content"]["parts"]]
    assert [reply["candidates"][0].get("finishReason") for reply in replies[:-1]] == [None] * (len(replies) - 1)
    return parts, replies[-1]["candidates"][0]["finishReason"], replies[-1]["usageMetadata"]


@pytest.mark.parametrize("system", ["Be brief", {"parts": [{"text": "Be brief"}]}, {"parts": {"text": "Be brief"}}])
@pytest.mark.parametrize(("stream", "sse"), [(False, True), (True, True), (True, False)])
async def test_a_reply_is_traced_as_the_chat_completion_that_it_is(
    bench: Any, stream: bool, sse: bool, system: Any
) -> None:
    b = await bench(Reply(text="schön", logprobs=[-0.25] * 7))
    config = {"temperature": 0.5, "seed": 3, "max_output_tokens": 9, "stopSequences": [";"], "topK": 4}
    parts, reason, counts = await ask(b, stream, sse=sse, system_instruction=system, generationConfig=config)
    assert ("".join(part["text"] for part in parts), reason) == ("schön", "STOP")
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "q"}]
    assert (counts["promptTokenCount"], counts["candidatesTokenCount"]) == (len(render(messages)), 7)
    await b.check_call(messages, "schön", temperature=0.5, max_tokens=9, stop=[";"], seed=3, top_k=4)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_continues_the_conversation_token_by_token(
    bench: Any, stream: bool, with_ids: bool
) -> None:
    b = await bench(Reply(text="Look: ", tool_calls=[CALL, OTHER_CALL]), "done")
    parts, *_ = await ask(b, stream, tools=[TOOL])
    texts = "".join(part["text"] for part in parts if "text" in part)
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    assert [call["args"] for call in calls] == [{"sql": "SELECT 1"}] * 2
    for call in calls:
        call.pop("id", None) if not with_ids else None
    results = [
        {"functionResponse": {**{key: call[key] for key in ("id", "name") if key in call}, "response": response}}
        for call, response in zip(calls, ({"output": "1"}, {"rows": [2]}), strict=True)
    ]
    said = {"role": "model", "parts": [{"text": texts}, *({"functionCall": call} for call in calls)]}
    turns = [QUESTION, said, {"role": "user", "parts": [*results, {"text": "Go on"}]}]
    assert (await ask(b, stream, tools=[TOOL], contents=turns))[0][0]["text"].startswith("d")
    traced = await b.check_turns()
    ids = ["call-1", "call-2"] if with_ids else ["call_0", "call_1"]
    assert traced[1].messages[1:] == [
        {
            "role": "assistant",
            "content": "Look: ",
            "tool_calls": [{**CALL, "id": call_id} for call_id in ids],
        },
        {"role": "tool", "tool_call_id": ids[0], "content": "1"},
        {"role": "tool", "tool_call_id": ids[1], "content": '{"rows": [2]}'},
        {"role": "user", "content": "Go on"},
    ]


async def test_results_without_ids_belong_to_the_calls_of_their_functions(bench: Any) -> None:
    b = await bench("x")
    said = [{"functionCall": {"name": name, "args": {}}} for name in ("first", "second", "first")]
    results = [{"functionResponse": {"name": name, "response": {}}} for name in ("second", "first", "first")]
    await ask(b, contents=[QUESTION, {"role": "model", "parts": said}, {"role": "user", "parts": results}])
    [call] = await b.calls()
    assert [message["tool_call_id"] for message in call.messages[2:]] == ["call_1", "call_0", "call_2"]


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_arguments_come_back_as_the_model_wrote_them(bench: Any, stream: bool) -> None:
    call = {**CALL, "function": {"name": "run", "arguments": '{"sql": '}}
    b = await bench(Reply(tool_calls=[call]), "x")
    parts, *_ = await ask(b, stream, tools=[TOOL])
    assert parts[0]["functionCall"]["args"] == {"malformed_arguments": '{"sql": '}
    result = {"functionResponse": {"name": "run", "response": {"error": "no JSON"}}}
    await ask(b, contents=[QUESTION, {"role": "model", "parts": parts}, {"role": "user", "parts": [result]}])
    assert len(await b.trajectories()) == 1


@pytest.mark.parametrize(
    ("calling", "sent"),
    [
        ({"mode": "AUTO"}, "auto"),
        ({"mode": "any"}, "required"),
        ({"mode": "NONE"}, "none"),
        ({"mode": "ANY", "allowedFunctionNames": ["run"]}, {"type": "function", "function": {"name": "run"}}),
    ],
)
async def test_the_choice_of_tools_is_passed_on(bench: Any, calling: Any, sent: Any) -> None:
    b = await bench("{}")
    await ask(b, tools=[TOOL], toolConfig={"functionCallingConfig": calling})
    assert b.server.requests[0]["tool_choice"] == sent


async def test_a_schema_of_google_is_a_json_schema(bench: Any) -> None:
    b = await bench("{}", "{}", "{}")
    schema = {
        "type": "OBJECT",
        "properties": {
            "name": {"type": "STRING", "nullable": True},
            "type": {"type": "ARRAY", "items": {"type": "INTEGER"}, "min_items": "1"},
        },
        "propertyOrdering": ["type", "name"],
        "required": ["type"],
    }
    json_schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    await ask(b, generationConfig={"responseMimeType": "application/json", "responseSchema": schema})
    await ask(b, generationConfig={"responseMimeType": "application/json", "responseJsonSchema": json_schema})
    await ask(b, generationConfig={"responseMimeType": "application/json"})
    formats = [asked["response_format"] for asked in b.server.requests]
    assert list(formats[0]["json_schema"]["schema"]["properties"].items()) == [
        ("type", {"type": "array", "items": {"type": "integer"}, "minItems": 1}),
        ("name", {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ]
    assert formats[1]["json_schema"]["schema"] == json_schema
    assert formats[2] == {"type": "json_object"}


async def test_thoughts_that_are_passed_back_are_accepted_and_other_settings_named_once(
    bench: Any, caplog: Any
) -> None:
    warn_ignored.cache_clear()
    b = await bench("x", "y")
    said = {
        "role": "model",
        "parts": [{"text": "hm", "thought": True}, {"text": "a", "thoughtSignature": "s"}, {"thoughtSignature": "s"}],
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await ask(
                b, contents=[QUESTION, said, QUESTION], generationConfig={"thinkingConfig": {"thinkingBudget": 1}}
            )
    assert [record.getMessage() for record in caplog.records if record.name.startswith("groundwire")] == [
        "agents send the field generationConfig.thinkingConfig of the generateContent API, which has no effect on the "
        "policy"
    ]
    call, _ = await b.calls()
    assert call.messages[1] == {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm"}


async def test_images_are_passed_on(bench: Any) -> None:
    b = await bench("x")
    image = {"inlineData": {"mimeType": "image/png", "data": "QUJD"}}
    await ask(b, contents=[{"parts": [{"text": "q"}, image]}])
    [call] = await b.calls()
    assert call.messages[0]["content"][1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


async def test_a_reply_that_ends_at_the_limit_says_so(bench: Any) -> None:
    b = await bench(Reply(text="a", finish_reason="length"))
    assert (await ask(b, True))[1] == "MAX_TOKENS"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{"googleSearch": {}}]}, "tools[0] has 'googleSearch', which Google runs on its own servers; offer"),
        ({"contents": [{"parts": [{"executableCode": {}}]}]}, "contents[0].parts[0] has executableCode: send text"),
        ({"cachedContent": "c"}, "cachedContent is not served: cached content is on Google's servers"),
        ({"generationConfig": {"candidateCount": 2}}, "n is 2: only chat completions have several choices"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "responseModalities has 'IMAGE': the policy only wr"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType 'text/x.enum' is not served"),
        ({"contents": [QUESTION, {"role": "model", "parts": [{"text": "{"}]}]}, "the last message is the assistant's"),
        ({"contents": 3}, "contents must be a list, not 3"),
    ],
)
async def test_what_is_not_served_is_refused_in_one_sentence_and_recorded(
    bench: Any, options: Any, message: str
) -> None:
    b = await bench("x")
    with pytest.raises(ApiError) as caught:
        await ask(b, **options)
    error = caught.value.body["error"]
    assert (error["code"], error["status"], error["message"][: len(message)]) == (400, "INVALID_ARGUMENT", message)
    assert b.server.requests == []
    assert [call.status for call in await b.calls()] == [400]


@pytest.mark.parametrize(("stream", "sse"), [(False, True), (True, True), (True, False)])
async def test_a_policys_refusal_reaches_the_agent_in_googles_format(bench: Any, stream: bool, sse: bool) -> None:
    b = await bench(Reply(status=429, text="too busy"))
    with pytest.raises(ApiError) as caught:
        await ask(b, stream, sse=sse)
    assert caught.value.body == {"error": {"code": 429, "message": "too busy", "status": "RESOURCE_EXHAUSTED"}}
    [call] = await b.calls()
    assert (call.status, call.error) == (429, "too busy")


@pytest.mark.parametrize("sse", [False, True])
async def test_a_stream_that_breaks_off_ends_with_an_error(bench: Any, sse: bool) -> None:
    b = await bench(Reply(text="ab", breaks_off=True))
    if "upstreams" not in str(b.proxy.upstreams.urls) and not b.proxy.upstreams.urls:
        pytest.skip("a policy in this process has no connection")
    *_, last = await gemini_replies(b, True, sse=sse, contents=[QUESTION])
    assert last["error"]["status"] == "INTERNAL"
    assert last["error"]["message"].startswith("the policy server broke off its stream")


async def test_the_tokens_of_a_prompt_are_counted_as_the_policy_will_see_them(policy: Any) -> None:
    url = f"{policy.root}/v1beta/models/{GEMINI_MODEL}:countTokens"
    system = {"parts": [{"text": "Be brief"}]}
    whole = {"generateContentRequest": {"model": "m", "systemInstruction": system, "contents": [QUESTION]}}
    counts = [
        (await post(url, request)).json()["totalTokens"]
        for request in (whole, {"systemInstruction": system, "contents": [QUESTION]})
    ]
    reply = await gemini_replies(
        policy, systemInstruction=system, contents=[QUESTION], generationConfig={"maxOutputTokens": 2}
    )
    [call] = await policy.calls()
    assert counts == [reply[0]["usageMetadata"]["promptTokenCount"]] * 2 == [len(call.prompt_ids)] * 2


@pytest.mark.parametrize(
    "path",
    ["models/m", "v1/models/m", "v1beta/models/m", "v1/v1beta1/projects/p/locations/l/publishers/google/models/m"],
)
async def test_every_version_and_place_of_the_path_is_served(bench: Any, path: str) -> None:
    b = await bench("x")
    await post(f"{b.root}/{path}:generateContent?key=secret", {"contents": [QUESTION]})
    [call] = await b.calls()
    assert call.wire_api == "generate_content"
