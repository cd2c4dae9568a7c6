"""Agents that use OpenAI's Responses API are served and traced like those that use chat completions."""

from __future__ import annotations

from typing import Any

import agents
import openai
import pytest
from wire import ARGUMENTS, CALL, OTHER_CALL, PARAMETERS, Bench, bench

from groundwire.adapters.tracing.scripted_server import END, Reply, encode, render

TOOL: Any = {"type": "function", "name": "run", "description": "Run it", "parameters": PARAMETERS, "strict": False}

__all__ = ["bench"]


def client(b: Bench) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=b.url, api_key="none", max_retries=0)


async def ask(b: Bench, stream: bool = False, **options: Any) -> Any:
    """The response, of a stream the one that its last event has."""
    async with client(b) as asking:
        answer = await asking.responses.create(model="any", stream=stream, **options)
        return [event async for event in answer][-1].response if stream else answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_traced_as_the_chat_completion_that_it_is(bench: Any, stream: bool) -> None:
    b = await bench(Reply(text="schön", logprobs=[-0.25] * 7))
    answer = await ask(b, stream, instructions="Be brief", input="héllo", temperature=0.5, max_output_tokens=9)
    assert (answer.status, answer.output_text, answer.instructions) == ("completed", "schön", "Be brief")
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "héllo"}]
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(render(messages)), 7)
    [call] = await b.calls()
    assert (call.prompt_ids, call.response_ids, call.logprobs) == (
        render(messages),
        [*encode("schön"), END],
        [-0.25] * 7,
    )
    assert (call.messages, call.reply["content"], call.untrainable_reason) == (messages, "schön", "")
    [asked] = b.server.requests
    assert (asked["temperature"], asked["max_completion_tokens"]) == (0.5, 9)


async def test_a_streams_events_are_those_of_openai(bench: Any) -> None:
    b = await bench(Reply(text="ab", tool_calls=[CALL, OTHER_CALL]))
    events = [event async for event in await client(b).responses.create(model="any", input="x", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    call_events = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 2),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(*call_events, "output_item.done") * 2,
        "completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "ab"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    assert [(each.type, getattr(each, "call_id", None)) for each in done] == [
        ("message", None),
        ("function_call", "call-1"),
        ("function_call", "call-2"),
    ]


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_continues_the_conversation_token_by_token(bench: Any, stream: bool, by_id: bool) -> None:
    b = await bench(Reply(text="Look: ", tool_calls=[CALL, OTHER_CALL]), "done", "and more")
    first = await ask(b, stream, instructions="i", input=[{"role": "user", "content": "q"}], tools=[TOOL])
    outputs = [
        {"type": "function_call_output", "call_id": each.call_id, "output": "1"}
        for each in first.output
        if each.type == "function_call"
    ]
    if by_id:
        again: dict[str, Any] = {"input": outputs, "previous_response_id": first.id}
    else:
        again = {"input": [{"role": "user", "content": "q"}, *(each.to_dict() for each in first.output), *outputs]}
    second = await ask(b, stream, instructions="i", tools=[TOOL], **again)
    third = await ask(b, stream, instructions="i", input="more", previous_response_id=second.id, tools=[TOOL])
    assert (second.output_text, third.output_text) == ("done", "and more")
    calls = await b.check_turns()
    assert [message["role"] for message in calls[2].messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user")
    ]
    assert calls[1].messages[2] == {"role": "assistant", "content": "Look: ", "tool_calls": [CALL, OTHER_CALL]}


async def test_a_tool_call_without_text_has_no_message(bench: Any) -> None:
    b = await bench(Reply(tool_calls=[CALL]), "")
    first, second = await ask(b, input="q", tools=[TOOL]), await ask(b, input="q")
    assert [each.type for each in first.output] == ["function_call"]
    assert [(each.type, each.content[0].text) for each in second.output] == [("message", "")]


async def test_reasoning_items_that_are_passed_back_are_accepted(bench: Any) -> None:
    b = await bench("x")
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    empty = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "secret"}
    await ask(b, input=[{"role": "user", "content": "q"}, reasoning, said, empty, {"role": "user", "content": "r"}])
    [call] = await b.calls()
    assert call.messages[1] == {"role": "assistant", "reasoning": "hm", "reasoning_content": "hm", "content": "a"}
    assert len(call.messages) == 3


async def test_the_format_and_the_choice_of_tools_are_passed_on(bench: Any) -> None:
    b = await bench("{}")
    format_: Any = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    choice: Any = {"type": "function", "name": "run"}
    await ask(b, input="q", tools=[TOOL], tool_choice=choice, text={"format": format_}, extra_body={"seed": 3})
    [asked] = b.server.requests
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert asked["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "run"}}
    assert asked["seed"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_is_a_function_of_one_text(bench: Any, stream: bool) -> None:
    arguments = '{"input": "*** Begin «Patch»"}'
    call = {"id": "call-1", "type": "function", "function": {"name": "patch", "arguments": arguments}}
    b = await bench(Reply(tool_calls=[call]), "done")
    tool = {"type": "custom", "name": "patch", "description": "Edit", "format": {"type": "text"}}
    first = await ask(b, stream, input=[{"role": "user", "content": "q"}], tools=[tool])
    [made] = first.output
    assert (made.type, made.name, made.input) == ("custom_tool_call", "patch", "*** Begin «Patch»")
    output = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "ok"}
    await ask(b, stream, input=[{"role": "user", "content": "q"}, made.to_dict(), output], tools=[tool])
    [trajectory] = await b.trajectories()
    assert len(trajectory.calls) == 2
    assert b.server.requests[0]["tools"][0]["function"]["parameters"]["required"] == ["input"]


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_a_namespace_are_called_by_vllms_name_for_them_and_come_back_by_their_own(
    bench: Any, stream: bool
) -> None:
    calls = [
        {**made, "function": {"name": name, "arguments": arguments}}
        for made, name, arguments in (
            (CALL, "crm__run", ARGUMENTS),
            (OTHER_CALL, "run", ARGUMENTS),
            ({**CALL, "id": "c3"}, "fs__patch", '{"input": "x"}'),
        )
    ]  # fmt: skip
    b = await bench(Reply(tool_calls=calls), "found", "found")
    patch = {"type": "custom", "name": "patch", "description": "Edit"}
    tools: Any = [{"type": "namespace", "name": "crm", "description": "Sales", "tools": [TOOL]}, TOOL]
    added = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "fs", "description": "Files", "tools": [patch]}, TOOL],
    }
    asked: Any = [added, {"role": "user", "content": "q"}]
    choice: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "namespace": "crm", "name": "run"}],
    }
    first = await ask(b, stream, input=asked, tools=tools, tool_choice=choice)
    assert [(item.type, getattr(item, "namespace", None), item.name) for item in first.output] == [
        ("function_call", "crm", "run"),
        ("function_call", None, "run"),
        ("custom_tool_call", "fs", "patch"),
    ]
    outputs = [
        {"type": item.type + "_output", "call_id": item.call_id, "output": "ok", "name": item.name}
        for item in first.output
    ]
    await ask(b, stream, input=[*asked, *(item.to_dict() for item in first.output), *outputs], tools=tools)
    await ask(b, stream, input=outputs, tools=tools, previous_response_id=first.id)
    one, two, three = b.server.requests
    assert [tool["function"]["name"] for tool in one["tools"]] == ["crm__run", "run", "fs__patch"]
    assert one["tool_choice"]["allowed_tools"]["tools"][0]["function"]["name"] == "crm__run"
    assert two["messages"][1]["tool_calls"] == three["messages"][1]["tool_calls"] == calls
    assert len((await b.trajectories())[0].calls) == 2


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (["thought", "thought", "text", "call"], [{"reasoning": "hmhm", "content": "a", "tool_calls": 1}]),
        (["text", "thought", "call"], [{"content": "a"}, {"reasoning": "hm", "content": None, "tool_calls": 1}]),
        (["text", "text"], [{"content": "a"}, {"content": "a"}]),
        (["call", "call", "text"], [{"content": None, "tool_calls": 2}, {"content": "a"}]),
        (["thought"], [{"reasoning": "hm", "content": ""}]),
    ],
)
async def test_items_in_the_order_of_a_reply_are_one_message(bench: Any, items: Any, messages: Any) -> None:
    b = await bench("x")
    known = {
        "thought": {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        "text": {"type": "message", "role": "assistant", "content": "a"},
        "call": {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}"},
    }
    await ask(b, input=[*(known[item] for item in items), {"role": "user", "content": "q"}])
    [asked] = b.server.requests
    for message in asked["messages"]:
        assert message.pop("role") in ("assistant", "user")
        if "tool_calls" in message:
            message["tool_calls"] = len(message["tool_calls"])
        assert message.pop("reasoning_content", None) == message.get("reasoning")
    assert asked["messages"] == [*messages, {"content": "q"}]


async def test_a_reply_that_ends_at_the_limit_is_incomplete(bench: Any) -> None:
    b = await bench(Reply(text="a", finish_reason="length"))
    answer = await ask(b, stream=True, input="q")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": "q", "tools": [{"type": "web_search"}]}, r"tools\[0\] is of type 'web_search', which OpenAI runs"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\] is of type 'item_reference', .* not served"),
        ({"input": "q", "previous_response_id": "resp_1"}, "previous_response_id 'resp_1' is unknown"),
        ({"input": "q", "background": True}, "background is not served"),
        ({"input": "q", "extra_body": {"n": 2}}, "n is 2: only chat completions have several choices"),
        ({"input": 3}, "input must be a list, not 3"),
        ({"input": "q", "tools": ["run"]}, r"tools\[0\] must be an object, not 'run'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "of type 'input_file', which is not"),
    ],
)
async def test_what_is_not_served_is_refused_in_one_sentence_and_recorded(
    bench: Any, options: Any, message: str
) -> None:
    b = await bench("x")
    with pytest.raises(openai.BadRequestError, match=message):
        await ask(b, **options)
    assert b.server.requests == []
    assert [call.status for call in await b.calls()] == [400]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_policys_refusal_reaches_the_agent(bench: Any, stream: bool) -> None:
    b = await bench(Reply(status=400, text="the prompt is too long", code="context_length_exceeded"))
    with pytest.raises(openai.BadRequestError, match="the prompt is too long"):
        await ask(b, stream, input="q")
    [call] = await b.calls()
    assert (call.status, call.error) == (400, "the prompt is too long")


async def test_an_agent_of_the_agents_sdk_with_its_default_model_runs_and_is_traced(bench: Any) -> None:
    asked = []

    @agents.function_tool
    def run(sql: str) -> str:
        """Run it."""
        asked.append(sql)
        return "42"

    b = await bench(Reply(tool_calls=[CALL]), "The answer is 42.")
    agent = agents.Agent(name="a", instructions="Answer.", tools=[run])
    config = agents.RunConfig(model_provider=agents.OpenAIProvider(openai_client=client(b)), tracing_disabled=True)
    result = await agents.Runner.run(agent, "How many?", run_config=config)
    assert (result.final_output, asked) == ("The answer is 42.", ["SELECT 1"])
    calls = await b.calls()
    assert [call.untrainable_reason for call in calls] == ["", ""]
    assert len(await b.trajectories()) == 1


async def test_the_agents_sdk_streams(bench: Any) -> None:
    b = await bench(Reply(text="well", tool_calls=[CALL]), "42")
    agent = agents.Agent(name="a", tools=[agents.function_tool(lambda sql: "42", name_override="run")])
    config = agents.RunConfig(model_provider=agents.OpenAIProvider(openai_client=client(b)), tracing_disabled=True)
    result = agents.Runner.run_streamed(agent, "How many?", run_config=config)
    _ = [event async for event in result.stream_events()]
    assert result.final_output == "42"
    assert len(await b.trajectories()) == 1
