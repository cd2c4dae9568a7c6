"""What clients send back: the same on all APIs."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import Any

import aiohttp
import pytest
from own_forms import CHAT, ENCRYPTED, FORMS, QUESTION
from providers import BEDROCK_MODEL, GEMINI_MODEL
from wire import CALL, OTHER_CALL, bench

from groundwire.adapters.tracing.scripted_server import Reply
from groundwire.adapters.tracing.wire.call import Conversations
from groundwire.adapters.tracing.wire.request import RefusedError, warn_ignored

ALL = {"chat": CHAT, **FORMS}
HALF = "\ud83d"
EMPTY: tuple[Any, ...] = (None, "", [], {}, False)
CUT_OFF = {**OTHER_CALL, "function": {"name": "run", "arguments": '{"sql": "SEL'}}

__all__ = ["bench"]


def conversation() -> Any:
    return Conversations().of("r")


@pytest.mark.parametrize("form", [*ALL, "encrypted"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_reasoning_and_cut_off_arguments_that_are_sent_back_are_as_the_policy_wrote_them(
    bench: Any, form: str, stream: bool
) -> None:
    api = {**ALL, "encrypted": ENCRYPTED}[form]
    b = await bench(Reply(reasoning="Hm: schön.", text="Let me look: ", tool_calls=[CALL, CUT_OFF]), "done")
    items = await api.ask(b, stream, [])
    assert form != "messages" or items[0]["content"][0]["signature"]  # clients drop thoughts without one
    results = [api.result(call_id, "42") for item in items for call_id, *_ in api.calls(item)]
    assert len(results) == 2
    await api.ask(b, stream, [*items, *results])
    question, said, *outputs = b.server.requests[1]["messages"]
    assert question == {"role": "user", "content": QUESTION}
    assert said["reasoning"] == "Hm: schön."
    assert form == "chat" or said["reasoning_content"] == "Hm: schön."
    functions = [(call["id"], call["function"]["arguments"]) for call in said["tool_calls"]]
    assert functions == [(call["id"], call["function"]["arguments"]) for call in (CALL, CUT_OFF)]
    assert said["content"] == "Let me look: "
    assert [output["tool_call_id"] for output in outputs] == ["call-1", "call-2"]
    [trajectory] = await b.trajectories()
    assert len(trajectory.calls) == 2


@pytest.mark.parametrize("api", ALL)
async def test_results_without_a_call_and_repeated_ones_are_served(bench: Any, api: str) -> None:
    form = ALL[api]
    b = await bench(Reply(tool_calls=[CALL]), "done")
    items = await form.ask(b, False, [])
    results = [form.result(call_id, text) for call_id, text in (("call-1", "1"), ("call-1", "2"), ("ghost", "3"))]
    await form.ask(b, False, [*items, *results])
    outputs = [message for message in b.server.requests[1]["messages"] if message["role"] == "tool"]
    assert [output["content"] for output in outputs] == ["1", "2", "3"]
    assert [output["tool_call_id"] for output in outputs] == ["call-1", "call-1", "ghost"]


@pytest.mark.parametrize("api", FORMS)
def test_an_empty_conversation_is_refused_by_the_apis_own_name_for_it(api: str) -> None:
    form = FORMS[api]
    with pytest.raises(RefusedError, match=f"^{form.turns} must not be empty$") as refused:
        form.call({"model": "m", form.turns: []}, conversation())
    assert (refused.value.status, refused.value.param) == (400, form.turns)


@pytest.mark.parametrize("more", [{"instructions": "i"}, {"previous_response_id": "resp"}])
def test_without_input_a_response_needs_instructions_or_an_earlier_response(more: Any) -> None:
    before = conversation()
    before.add("resp", [{"role": "user", "content": "q"}])
    assert len(FORMS["responses"].call({"input": [], **more}, before).chat["messages"]) == 1


def _call(**more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **more}


UNREAD: dict[str, tuple[list[Any], list[str]]] = {
    "responses": (
        [
            {"role": "user", "content": [{"type": "input_text", "text": "q", "novel": 1}], "phase": "final_answer"},
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "of another server"},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
                {"type": "output_text", "text": "a", "annotations": [{"url": "u"}], "logprobs": [1]}]},
            _call(id="fc", status="completed", caller={"type": "direct"}, novel=1),
            {"type": "function_call_output", "call_id": "c", "output": "r", "novel": 1},
        ],
        ["message.phase", "input_text.novel", "reasoning.encrypted_content", "function_call.novel",
         "function_call_output.novel"],
    ),
    "messages": (
        [
            {"role": "user", "name": "n", "content": [
                {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s", "novel": 1},
                {"type": "text", "text": "a", "citations": [{"type": "page_location"}]},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}, "novel": 1}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "r", "is_error": True}]},
        ],
        ["message.name", "thinking.novel", "tool_use.novel", "tool_result.is_error"],
    ),
    "generate_content": (
        [
            {"role": "user", "parts": [{"text": "q", "videoMetadata": {"fps": 1}}], "novel": 1},
            {"role": "model", "parts": [
                {"functionCall": {"name": "f", "args": {}, "novel": 1}, "thoughtSignature": "s"}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {}, "scheduling": "SILENT"}}]},
        ],
        ["content.novel", "part.videoMetadata", "functionCall.novel", "functionResponse.scheduling"],
    ),
    "converse": (
        [
            {"role": "user", "content": [{"text": "q"}], "novel": 1},
            {"role": "assistant", "content": [
                {"reasoningContent": {"reasoningText": {"text": "t", "signature": "s"}, "novel": 1}},
                {"toolUse": {"toolUseId": "c", "name": "f", "input": {}, "novel": 1}}]},
            {"role": "user", "content": [
                {"toolResult": {"toolUseId": "c", "content": [{"text": "r"}], "status": "error"}}]},
        ],
        ["message.novel", "reasoningContent.novel", "toolUse.novel", "toolResult.status"],
    ),
    "ollama": (
        [
            {"role": "user", "content": "q", "novel": 1},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c", "novel": 1, "function": {"index": 0, "name": "f", "arguments": {}, "novel": 1}}]},
            {"role": "tool", "content": "r", "tool_name": "f"},
        ],
        ["message.novel", "tool_call.novel", "function.novel"],
    ),
}  # fmt: skip
TOOLS: dict[str, tuple[Any, list[str]]] = {
    "responses": (
        [
            {"type": "custom", "name": "c", "format": {"type": "grammar"}},
            {"type": "namespace", "name": "n", "description": "d", "tools": [
                {"type": "function", "name": "f", "strict": True, "defer_loading": True}]},
        ],
        ["custom.format", "namespace.description", "function.defer_loading"],
    ),
    "messages": ([{"name": "f", "input_schema": {}, "input_examples": [{}]}], ["tool.input_examples"]),
    "generate_content": (
        [{"functionDeclarations": [{"name": "f", "response": {"type": "STRING"}}]}],
        ["functionDeclaration.response"],
    ),
}  # fmt: skip


def _with(value: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "odd": value} if found else found


@pytest.mark.parametrize("api", FORMS)
def test_one_warning_names_each_field_that_has_no_effect(api: str, caplog: Any) -> None:
    warn_ignored.cache_clear()
    form, (items, names), (tools, of_tools) = FORMS[api], UNREAD[api], TOOLS.get(api, ([], []))
    named = json.dumps([items, tools])
    for value in EMPTY:  # never named
        empty = json.loads(named, object_hook=partial(_with, value))
        form.call({"model": "m", form.turns: empty[0], "tools": tools}, conversation())
    assert sorted(record.args[0] for record in caplog.records) == sorted([*names, *of_tools])
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_names_that_agents_make_up_do_not_pile_up(caplog: Any) -> None:
    warn_ignored.cache_clear()
    fields = {f"field{number}": 1 for number in range(300)}
    FORMS["messages"].call({"messages": [{"role": "user", "content": "q", **fields}]}, conversation())
    assert len(caplog.records) == 100
    warn_ignored.cache_clear()


@pytest.mark.parametrize("api", ALL)
async def test_half_of_a_character_is_replaced_in_every_api(bench: Any, api: str) -> None:
    paths = {
        "chat": "v1/chat/completions",
        "responses": "v1/responses",
        "messages": "v1/messages",
        "generate_content": f"v1beta/models/{GEMINI_MODEL}:generateContent",
        "converse": f"model/{BEDROCK_MODEL.replace('/', '%2F')}/converse",
        "ollama": "api/chat",
    }
    form, b = ALL[api], await bench("x")
    damaged = json.loads(json.dumps(form.question).replace(QUESTION, HALF + QUESTION))
    request = {"model": "m", form.turns: [form.question, damaged, form.result("c", HALF)], "stream": False}
    async with aiohttp.ClientSession() as session, session.post(f"{b.root}/{paths[api]}", json=request) as response:
        assert response.status == 200
    _, asked, result = b.server.requests[0]["messages"]
    assert (asked["content"], result["content"]) == (f"\ufffd{QUESTION}", "\ufffd")
