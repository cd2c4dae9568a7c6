"""Every format gives the same conversation: the calls as they were made, the tools, the outcome."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.base import BaseTracer
from test_traces import ANSWER, ASKED, CALL, CALLING, CHAT, RESULT, SYSTEM, TOOL, check_conversation, write_lines

from groundwire.adapters.tracing.wire.call import Conversations
from groundwire.adapters.tracing.wire.exchange import HttpExchange
from groundwire.adapters.tracing.wire.messages import MessagesCall
from groundwire.adapters.tracing.wire.responses import ResponsesCall
from groundwire.train import read_traces
from groundwire.train.traces.export import to_chats

ARGUMENTS = {"city": "Bern"}


def at(second: int) -> str:
    return f"2026-01-02T03:04:{second:02}.000Z"


def numbered(prefix: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenInference's attributes of messages."""
    flat: dict[str, Any] = {}
    for place, message in enumerate(messages):
        name = f"{prefix}.{place}.message"
        flat |= {f"{name}.{key}": message[key] for key in ("role", "content", "tool_call_id") if message.get(key)}
        for number, call in enumerate(message.get("tool_calls", ())):
            function = f"{name}.tool_calls.{number}.tool_call.function"
            flat |= {f"{function}.{key}": call["function"][key] for key in ("name", "arguments")}
            flat[f"{name}.tool_calls.{number}.tool_call.id"] = call["id"]
    return flat


def phoenix_rows() -> list[dict[str, Any]]:
    """Spans as rows of Phoenix's data frame, the root first, and an annotation."""
    rows = [{"name": "forecaster", "span_kind": "AGENT", "parent_id": None, "context.span_id": "r"}]
    for place, count in enumerate((2, 4)):
        attributes = {
            "llm.model_name": "m1",
            "llm.tools": [{"tool": {"json_schema": json.dumps(TOOL)}}],
            "llm.token_count.prompt": 10,
            **numbered("llm.input_messages", CHAT[:count]),
            **numbered("llm.output_messages", [CHAT[count]]),
        }
        row = {"name": "ChatCompletion", "span_kind": "LLM", "parent_id": "r", "context.span_id": f"c{place}"}
        rows.append(row | {f"attributes.{key}": value for key, value in attributes.items()})
    tool = {"name": "weather", "span_kind": "TOOL", "parent_id": "r", "context.span_id": "t"}
    tool |= {"attributes.tool.name": "weather", "attributes.input.value": json.dumps(ARGUMENTS)}
    rows.insert(2, tool | {"attributes.output.value": "sun"})
    for place, row in enumerate(rows):
        row |= {"context.trace_id": "t1", "start_time": at(place), "end_time": at(9), "status_code": "OK"}
    return [*rows, {"span_id": "r", "name": "right", "annotator_kind": "HUMAN", "result": {"label": "correct"}}]


def langfuse_trace() -> list[dict[str, Any]]:
    """A trace as Langfuse's API writes it."""
    parts: list[dict[str, Any]] = []
    for place, count in enumerate((2, 4)):
        asked = {"messages": CHAT[:count], "tools": [TOOL]}
        part = {"id": f"g{place}", "type": "GENERATION", "name": "chat", "model": "m1", "input": asked}
        part |= {"output": CHAT[count], "usageDetails": {"input": 10, "output": 3}}
        parts.append(
            {**part, "traceId": "t1", "startTime": at(2 * place), "endTime": at(2 * place + 1), "level": "DEFAULT"}
        )
    tool = {"id": "t", "type": "TOOL", "name": "weather", "traceId": "t1", "startTime": at(1), "endTime": at(2)}
    parts.append({**tool, "input": ARGUMENTS, "output": "sun", "level": "DEFAULT"})
    score = {"id": "s", "traceId": "t1", "name": "right", "value": 1, "dataType": "BOOLEAN", "stringValue": "True"}
    trace = {
        "id": "t1",
        "timestamp": at(0),
        "name": "forecaster",
        "sessionId": "s1",
        "input": {"question": "Rain in Bern?"},
    }
    return [{**trace, "output": "No.", "observations": parts, "scores": [score]}]


def langfuse_rows() -> list[dict[str, Any]]:
    """The same as rows of an export, with the names of Langfuse's Python client, the score first."""
    [trace] = langfuse_trace()
    names = {"traceId": "trace_id", "startTime": "start_time", "endTime": "end_time", "usageDetails": "usage_details"}
    rows = [{names.get(key, key): value for key, value in row.items()} for row in trace["observations"]]
    return [*trace["scores"], *reversed(rows)]


def langfuse_client() -> list[dict[str, Any]]:
    """The same as the callback for LangChain writes it: tools after the messages, scores in what the client sends."""
    [trace] = langfuse_trace()
    for part in trace["observations"]:
        if part["type"] == "GENERATION":
            part["input"] = [*part["input"]["messages"], {"role": "tool", "content": TOOL}]
            part["metadata"] = {"lc_agent_name": "forecaster"}
    score = {"type": "score-create", "body": trace["scores"][0]}
    return [{"batch": [score]}, *trace["observations"]]


def langsmith_runs() -> list[dict[str, Any]]:
    """What LangChain's tracer records of an agent, as LangSmith stores it."""

    class Recorder(BaseTracer):
        def _persist_run(self, run: Any) -> None:
            roots.append(run)

    roots: list[Any] = []
    calls = [{"name": "weather", "args": ARGUMENTS, "id": "c1"}]
    model = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=calls), AIMessage("No.")])).bind(tools=[TOOL])

    def forecaster(question: str) -> str:
        messages = [SystemMessage(SYSTEM["content"]), HumanMessage(question)]
        reply = model.invoke(messages)
        assert isinstance(reply, AIMessage)
        result = ToolMessage(RunnableLambda(lambda _: "sun").invoke(reply.tool_calls[0]["args"]), tool_call_id="c1")
        return str(model.invoke([*messages, reply, result]).content)

    handlers: list[BaseCallbackHandler] = [Recorder(_schema_format="original+chat")]
    config: Any = {"callbacks": handlers, "metadata": {"thread_id": "s1"}}
    RunnableLambda(forecaster).invoke(ASKED["content"], config)
    runs: list[dict[str, Any]] = []

    def add(run: Any) -> None:
        stored = {key: getattr(run, key) for key in ("id", "trace_id", "parent_run_id", "run_type", "name", "error")}
        stored |= {key: getattr(run, key).isoformat() for key in ("start_time", "end_time")}
        runs.append(stored | {key: getattr(run, key) for key in ("inputs", "outputs", "extra")})
        for child in run.child_runs:
            add(child)

    for root in roots:
        add(root)
    runs[0]["feedback_stats"] = {"right": {"n": 1, "avg": 1.0}}

    def plain(value: Any) -> Any:
        return dumpd(value) if hasattr(value, "lc_id") else str(value)

    stored: list[dict[str, Any]] = json.loads(json.dumps(runs, default=plain))
    return stored[::-1]


def trajectory() -> list[dict[str, Any]]:
    """A trajectory of ATIF."""
    call = {"tool_call_id": "c1", "function_name": "weather", "arguments": ARGUMENTS}
    observed = {"results": [{"source_call_id": "c1", "content": "sun"}]}
    metrics = {"prompt_tokens": 10, "completion_tokens": 3}
    steps = [
        {"step_id": 1, "source": "system", "message": SYSTEM["content"]},
        {"step_id": 2, "source": "user", "message": ASKED["content"], "timestamp": at(0)},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "tool_calls": [call],
            "observation": observed,
            "metrics": metrics,
        },
        {"step_id": 4, "source": "agent", "message": "No.", "timestamp": at(1), "metrics": metrics},
    ]
    agent = {"name": "forecaster", "version": "1", "model_name": "m1", "tool_definitions": [TOOL]}
    whole = {"schema_version": "ATIF-v1.7", "session_id": "s1", "agent": agent, "steps": steps}
    return [{**whole, "extra": {"scores": {"right": 1.0}}}]


def entry(path: str, body: Mapping[str, Any], reply: Any, second: int) -> dict[str, Any]:
    """An entry of an HTTP archive."""
    text = reply if isinstance(reply, str) else json.dumps(reply)
    content = {"text": base64.b64encode(text.encode()).decode(), "encoding": "base64"}
    request = {"method": "POST", "url": f"https://api.example.com/v1/{path}", "postData": {"text": json.dumps(body)}}
    response = {"status": 200, "content": content}
    return {"startedDateTime": at(second), "time": 500, "request": request, "response": response}


def archive(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    other = {"startedDateTime": at(0), "time": 1, "request": {"method": "GET", "url": "https://example.com/"}}
    return [{"log": {"version": "1.2", "entries": [*entries, {**other, "response": {"status": 200, "content": {}}}]}}]


def chunks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The deltas of a reply, a few characters in each."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    text = message["content"] or ""
    deltas += [{"content": text[place : place + 2]} for place in range(0, len(text), 2)]
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{"index": 0, "id": call["id"], "function": {"name": name, "arguments": ""}}]})
        pieces = [arguments[place : place + 3] for place in range(0, len(arguments), 3)]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
    parts = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return [*parts, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]


def chat_archive() -> list[dict[str, Any]]:
    """Chat completions, a whole one and a stream."""
    whole = {"choices": [{"message": CALLING, "finish_reason": "tool_calls"}]}
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(ANSWER)) + "data: [DONE]\n\n"
    bodies = [{"model": "m1", "messages": CHAT[:count], "tools": [TOOL]} for count in (2, 4)]
    return archive(entry("chat/completions", bodies[1], stream, 5), entry("chat/completions", bodies[0], whole, 1))


def translated(api: Any, body: Mapping[str, Any], message: Mapping[str, Any]) -> tuple[Any, str]:
    """The whole reply and the stream that an agent gets of our proxy for a chat message."""
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole_call = api(dict(body), Conversations().of("r"))
    call = api({**body, "stream": True}, Conversations().of("r"))
    whole_call.exchange = call.exchange = HttpExchange(rollout_id="r", attempt_id="a")
    whole = whole_call.reply({"choices": [choice]})
    stream = b"".join([*map(call.events, chunks(message)), call.end()])
    return whole, stream.decode()


def anthropic_archive() -> list[dict[str, Any]]:
    """Anthropic's Messages, a whole reply and a stream."""
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": ARGUMENTS}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sun"}]}
    tool = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object"}}
    bodies = [
        {"model": "m1", "max_tokens": 9, "system": SYSTEM["content"], "messages": messages, "tools": [tool]}
        for messages in ([ASKED], [ASKED, used, result])
    ]
    first, second = translated(MessagesCall, bodies[0], CALLING), translated(MessagesCall, bodies[1], ANSWER)
    return archive(entry("messages", bodies[0], first[1], 1), entry("messages", bodies[1], second[0], 2))


def responses_archive() -> list[dict[str, Any]]:
    """OpenAI's Responses, a stream and a whole reply."""
    asked = {"role": "user", "content": [{"type": "input_text", "text": ASKED["content"]}]}
    called = {"type": "function_call", "call_id": "c1", **CALL["function"]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    tool = {"type": "function", **TOOL["function"]}
    bodies = [
        {"model": "m1", "instructions": SYSTEM["content"], "input": items, "tools": [tool]}
        for items in ([asked], [asked, called, result])
    ]
    first, second = translated(ResponsesCall, bodies[0], CALLING), translated(ResponsesCall, bodies[1], ANSWER)
    return archive(entry("responses", bodies[0], first[1], 1), entry("responses", bodies[1], second[0], 2))


FORMATS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "Phoenix": phoenix_rows,
    "Langfuse": langfuse_trace,
    "Langfuse, rows": langfuse_rows,
    "Langfuse, client": langfuse_client,
    "LangSmith": langsmith_runs,
    "ATIF": trajectory,
    "HAR": chat_archive,
    "HAR, Anthropic": anthropic_archive,
    "HAR, Responses": responses_archive,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("form", ["lines", "list", "pretty"])
def test_each_format_gives_the_calls_as_they_were_made(tmp_path: Path, name: str, form: str) -> None:
    records = FORMATS[name]()
    file = tmp_path / "traces"
    if form == "lines":
        write_lines(file, records)
    else:
        value = records[0] if len(records) == 1 else records
        file.write_text(json.dumps(value, indent=2 if form == "pretty" else None), encoding="utf-8")
    traces = read_traces(file)
    [rollout] = traces
    check_conversation(rollout)
    assert rollout.metadata["source"] == name.partition(",")[0]
    assert traces.unread == ({"HAR: requests that are no LLM call": 1} if name.startswith("HAR") else {})
    if not name.startswith("HAR"):
        assert (rollout.outcome.reward, rollout.outcome.reward_components) == (1, {"right": 1})
    if name not in ("LangSmith", "HAR", "HAR, Anthropic", "HAR, Responses", "Langfuse, rows"):
        assert {call.agent for call in rollout.calls} == {"forecaster"}


def claude_line(uuid: str, parent: str | None, kind: str, content: Any, **fields: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content, **fields.pop("message", {})}
    line = {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "s1",
        "isSidechain": False,
        "message": message,
    }
    return {**line, "timestamp": at(1), **fields}


def claude_session() -> list[dict[str, Any]]:
    """A session whose reply has a line for each block, with a turn that the user took back."""
    of_reply = {
        "id": "msg_1",
        "model": "m1",
        "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 5},
    }
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": ARGUMENTS}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "no such city"}],
        "is_error": True,
    }
    return [
        {"type": "summary", "summary": "Weather", "leafUuid": "a4"},
        claude_line("u0", None, "user", ASKED["content"]),
        claude_line("a0", "u0", "assistant", [{"type": "text", "text": "Taken back."}], message={"id": "msg_0"}),
        claude_line("u1", "a0", "user", "Are you sure?"),
        claude_line("a1", "u1", "assistant", [{"type": "text", "text": "Yes."}], message={"id": "msg_x"}),
        claude_line("u2", "a0", "user", "Look it up."),
        claude_line("a2", "u2", "assistant", [{"type": "text", "text": "I look."}], message=of_reply),
        claude_line("a3", "a2", "assistant", [use], message=of_reply),
        claude_line("u3", "a3", "user", [result]),
        claude_line("a4", "u3", "assistant", [{"type": "text", "text": "I cannot."}], message={"id": "msg_2"}),
        claude_line("s0", None, "user", "Search.", isSidechain=True, agentId="x"),
        claude_line("s1", "s0", "assistant", [{"type": "text", "text": "Found."}], isSidechain=True, agentId="x"),
        claude_line("k0", "a4", "user", "This conversation was shortened.", isCompactSummary=True),
        claude_line("k1", "k0", "assistant", [{"type": "text", "text": "I go on."}], message={"id": "msg_3"}),
    ]


def test_claude_codes_sessions_have_their_branches_subagents_and_contexts(tmp_path: Path) -> None:
    traces = read_traces(write_lines(tmp_path / "s.jsonl", claude_session()))
    main, shortened, side = traces
    assert [message["role"] for message in main.calls[-1].messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    called = main.calls[1].reply
    assert (called["content"], called["tool_calls"][0]["id"]) == ("I look.", "c1")
    assert (main.calls[1].prompt_tokens, main.calls[1].response_tokens) == (7, 5)
    assert [step["ok"] for step in main.outcome.steps if step["kind"] == "tool"] == [False]
    assert (side.task["question"], side.calls[0].agent) == ("Search.", "subagent")
    assert shortened.metadata["continues"]
    assert traces.unread == {"Claude Code: turns that the user took back": 2}
    assert not main.trainable_calls


def test_codexs_sessions_keep_what_one_reply_has_together(tmp_path: Path) -> None:
    def item(**payload: Any) -> dict[str, Any]:
        return {"timestamp": at(1), "type": "response_item", "payload": payload}

    usage = {"input_tokens": 10, "output_tokens": 3}
    result = json.dumps({"output": "no such city", "metadata": {"exit_code": 1}})
    lines = [
        {"type": "session_meta", "payload": {"id": "s1", "base_instructions": {"text": "You tell the weather."}}},
        item(
            type="message",
            role="user",
            content=[{"type": "input_text", "text": "<environment_context></environment_context>"}],
        ),
        item(type="message", role="user", content=[{"type": "input_text", "text": ASKED["content"]}]),
        {"type": "turn_context", "payload": {"model": "m1"}},
        item(type="reasoning", summary=[{"type": "summary_text", "text": "Look it up."}], encrypted_content="x"),
        item(type="message", role="assistant", content=[{"type": "output_text", "text": "I look."}]),
        item(type="function_call", name="weather", arguments=CALL["function"]["arguments"], call_id="c1"),
        {"type": "event_msg", "payload": {"type": "token_count", "info": {"last_token_usage": usage}}},
        item(type="function_call_output", call_id="c1", output=result),
        item(type="message", role="assistant", content=[{"type": "output_text", "text": "I cannot."}]),
        {"type": "compacted", "payload": {"message": "", "replacement_history": [{"type": "message", **ASKED}]}},
        item(type="message", role="assistant", content=[{"type": "output_text", "text": "I go on."}]),
    ]
    first, second = read_traces(write_lines(tmp_path / "rollout.jsonl", lines))
    assert [message["role"] for message in first.calls[1].messages] == ["system", "user", "user", "assistant", "tool"]
    reply = first.calls[0].reply
    assert (reply["content"], reply["reasoning"], len(reply["tool_calls"])) == ("I look.", "Look it up.", 1)
    assert (first.calls[0].model, first.calls[0].prompt_tokens, first.calls[1].prompt_tokens) == ("m1", 10, 0)
    assert first.task["question"] == ASKED["content"]
    assert [step["ok"] for step in first.outcome.steps if step["kind"] == "tool"] == [False]
    assert second.metadata["continues"]


def test_a_stream_that_was_cut_off_is_not_learned(tmp_path: Path) -> None:
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(ANSWER)[:-1])
    body = {"model": "m1", "messages": CHAT[:2]}
    [rollout] = read_traces(write_lines(tmp_path / "t.har", archive(entry("chat/completions", body, stream, 1))))
    assert (rollout.calls[0].unread, rollout.calls[0].reply["content"]) == ("streams that were cut off", "No.")


@pytest.mark.parametrize("form", ["events", "text"])
@pytest.mark.parametrize("place", ["logged", "span"])
def test_streamed_deltas_are_one_reply_wherever_they_are_written(tmp_path: Path, place: str, form: str) -> None:
    def recorded(deltas: list[Any]) -> Any:
        response: Any = deltas
        if form == "text":
            response = "".join(f"data: {json.dumps(delta)}\n\n" for delta in deltas)
        request = {"model": "m1", "messages": CHAT[:2], "tools": [TOOL]}
        if place == "logged":
            return {"request": request, "response": response}
        attributes = {"openinference.span.kind": "LLM", "input.value": json.dumps(request)}
        attributes["output.value"] = response if form == "text" else json.dumps(response)
        context = {"trace_id": f"t{len(deltas)}", "span_id": "s"}
        return {"name": "chat", "context": context, "parent_id": None, "attributes": attributes}

    whole, cut = chunks(CALLING), chunks(ANSWER)[:-1]
    traces = read_traces(write_lines(tmp_path / "t.jsonl", [recorded(whole), recorded(cut)]))
    calls = {call.reply["content"] or "": call for rollout in traces for call in rollout.calls}
    assert (calls[""].reply["tool_calls"], calls[""].untrainable_reason) == (CALLING["tool_calls"], "")
    assert calls["No."].untrainable_reason == "streams that were cut off"
    assert traces.unread == {"streams that were cut off": 1}


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("Hello", "Hello"), ([{"index": 0, "message": ANSWER}, {"index": 1, "message": ASKED}], "No."),
        ([{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hey"}]}], "Hey"),
    ],
)  # fmt: skip
def test_a_logged_response_may_be_text_choices_or_items(tmp_path: Path, response: Any, text: str) -> None:
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [{"messages": CHAT[:2], "response": response}]))
    assert [call.reply["content"] for call in rollout.calls] == [text]


def test_logged_requests_of_any_api_have_their_system_prompt_and_the_end_of_the_reply(tmp_path: Path) -> None:
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "No."}]}
    messages = {"model": "m1", "system": SYSTEM["content"], "messages": [ASKED], "max_tokens": 3}
    responses = {"model": "m1", "instructions": SYSTEM["content"], "input": ASKED["content"]}
    records = [
        {"request": messages, "response": {"content": [{"type": "text", "text": "No."}], "stop_reason": "max_tokens"}},
        {"request": responses, "response": {"status": "completed", "output": [answer]}},
        {**responses, "output": [answer], "response": {"status": "incomplete", "output": [answer]}},
    ]
    rollouts = read_traces(write_lines(tmp_path / "t.jsonl", records))
    calls = [call for rollout in rollouts for call in rollout.calls]
    assert [[*call.messages, call.reply] for call in calls] == [[SYSTEM, ASKED, ANSWER]] * 3
    assert [bool(call.untrainable_reason) for call in calls] == [True, False, True]


def test_the_two_files_of_a_batch_are_joined(tmp_path: Path) -> None:
    asked = [{"custom_id": str(place), "body": {"model": "m1", "messages": CHAT[:4]}} for place in range(3)]
    response = {"status_code": 200, "body": {"choices": [{"message": ANSWER, "finish_reason": "stop"}]}}
    write_lines(tmp_path / "asked.jsonl", asked)
    write_lines(tmp_path / "given.jsonl", [{"custom_id": str(place), "response": response} for place in (0, 2, 9)])
    traces = read_traces(tmp_path)
    assert [rollout.outcome.answer for rollout in traces] == ["No.", "No."]
    assert traces.unread["lines of a batch without the other one: give its input file and its output file"] == 2


def test_a_reply_of_which_nothing_is_understood_is_none(tmp_path: Path) -> None:
    attributes = {"openinference.span.kind": "LLM", "input.value": "Rain?", "output.value": json.dumps([{"id": "x"}])}
    span = {"name": "chat", "context": {"trace_id": "t", "span_id": "s"}, "attributes": attributes}
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [span]))
    assert rollout.calls[0].untrainable_reason == "its tracer recorded no messages"


def test_tools_that_no_tracer_recorded_are_said(tmp_path: Path) -> None:
    attributes = {"openinference.span.kind": "LLM", "input.value": json.dumps({"messages": CHAT[:2]})}
    attributes["output.value"] = json.dumps({"choices": [{"message": CALLING}]})
    span = {"name": "chat", "context": {"trace_id": "t", "span_id": "s"}, "attributes": attributes}
    traces = read_traces(write_lines(tmp_path / "t.jsonl", [span]))
    assert len(list(traces)) == 1
    assert traces.unread == {"replies that call tools whose definitions were not recorded: their prompts lack them": 1}


def test_two_agents_whose_calls_alternate_are_two_conversations(tmp_path: Path) -> None:
    spans = []
    for number, agent in enumerate(("planner", "critic", "planner", "critic")):
        chat = [{"role": "system", "content": agent}, ASKED]
        chat += [{"role": "assistant", "content": f"{agent} 1"}, ASKED] if number > 1 else []
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.agent.name": agent}
        attributes["gen_ai.input.messages"] = json.dumps(chat)
        attributes["gen_ai.output.messages"] = json.dumps(
            [{"role": "assistant", "content": f"{agent} {number // 2 + 1}"}]
        )
        context, start = {"trace_id": "t", "span_id": f"s{number}"}, 1e9 + number
        spans.append({"name": "chat", "context": context, "start_time": start, "attributes": attributes})
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", spans))
    assert [call.agent for call in rollout.calls] == ["planner", "critic", "planner", "critic"]
    conversations = [[message["content"] for message in chat["messages"]] for chat in to_chats(rollout)]
    first, second = (
        [agent, ASKED["content"], f"{agent} 1", ASKED["content"], f"{agent} 2"] for agent in ("planner", "critic")
    )
    assert conversations == [first, second]


def test_any_language_is_read_also_in_utf_16_and_another_encoding_is_counted(tmp_path: Path) -> None:
    texts = ("北京今天天气怎么样？", "Wie ist das Wetter in Zürich?", "ما هو الطقس؟", "☔?")
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]} for text in texts
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(chat, ensure_ascii=False) for chat in chats), "utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(chat, ensure_ascii=False) for chat in chats), "utf-16")
    (tmp_path / "c.jsonl").write_bytes(json.dumps(chats[1], ensure_ascii=False).encode("latin-1") + b"\n")
    traces = read_traces(tmp_path)
    assert [rollout.task["question"] for rollout in traces] == list(texts)
    assert traces.unread == {"lines that are no JSON": 1, "records that an earlier file has, too": 4}


def test_copied_and_joined_steps_of_a_trajectory_are_not_learned(tmp_path: Path) -> None:
    [whole] = trajectory()
    whole["steps"][2]["is_copied_context"] = True
    whole["steps"][3]["llm_call_count"] = 2
    [rollout] = read_traces(write_lines(tmp_path / "t.json", [whole]))
    assert rollout.untrainable_calls == rollout.calls


def test_calls_that_a_framework_and_a_client_recorded_are_one(tmp_path: Path) -> None:
    [trace] = langfuse_trace()
    inner = trace["observations"][0]
    outer = {**inner, "id": "outer", "input": "Rain in Bern?", "startTime": at(0)}
    inner["parentObservationId"] = "outer"
    traces = read_traces(write_lines(tmp_path / "t.json", [{**trace, "observations": [*trace["observations"], outer]}]))
    [rollout] = traces
    check_conversation(rollout)
    assert traces.unread == {"LLM spans around another one of the same call": 1}


def test_an_annotation_of_an_unknown_span_is_counted(tmp_path: Path) -> None:
    rows = phoenix_rows()
    traces = read_traces(write_lines(tmp_path / "t.jsonl", [*rows, {**rows[-1], "span_id": "elsewhere"}]))
    assert len(list(traces)) == 1
    assert traces.unread == {"annotations of spans that are not there": 1}


def test_the_result_of_a_tool_may_be_any_value(tmp_path: Path) -> None:
    blob = {"type": "tool_call_response", "id": "c1", "response": {"rows": [[1, 2]], "mime": "x/y"}}
    chat = [*CHAT[:3], {"role": "tool", "parts": [blob]}, ANSWER]
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [{"messages": chat}]))
    assert json.loads(rollout.calls[-1].messages[-1]["content"]) == blob["response"]
    assert RESULT["tool_call_id"] == rollout.calls[-1].messages[-1]["tool_call_id"]


@pytest.mark.parametrize(
    ("result", "text"),
    [({"rows": [1]}, '{"rows":[1]}'), (12, "12"), (True, "true"), (None, ""), ("A" * 9000, "A" * 9000)],
)
def test_the_result_of_a_tool_is_that_of_its_call(tmp_path: Path, result: Any, text: str) -> None:
    chat = [*CHAT[:3], {**RESULT, "content": result}, ANSWER]
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [{"messages": chat}]))
    assert rollout.calls[-1].messages[-1] == {**RESULT, "content": text}
    assert not rollout.untrainable_calls


def test_a_tool_has_all_that_a_request_says_of_it_in_its_order(tmp_path: Path) -> None:
    function = {"description": "Looks.", "name": "look", "strict": True, "parameters": {"type": "object"}}
    line = {"messages": CHAT, "tools": [{"type": "function", "function": function}]}
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [line]))
    assert json.dumps(rollout.calls[0].tools) == json.dumps([{"type": "function", "function": function}])


def as_the_page_of_a_trace(asked: Any, given: Any, **attributes: Any) -> dict[str, Any]:
    """A call that reached Langfuse by OpenTelemetry, as the page of its trace downloads it."""
    part = {"id": "g", "traceId": "t", "type": "GENERATION", "name": "chat m1", "startTime": at(1), "endTime": at(2)}
    part |= {"input": asked if isinstance(asked, str) else json.dumps(asked), "output": json.dumps(given)}
    part |= {"metadata": json.dumps({"attributes": attributes})}
    trace = {"id": "t", "name": "run", "input": json.dumps("What is it?"), "output": json.dumps("sun"), "scores": []}
    return {"trace": trace, "observations": [part]}


def test_langfuse_has_the_tools_and_the_system_prompt_in_the_attributes_of_opentelemetry(tmp_path: Path) -> None:
    kept = {"gen_ai.tool.definitions": json.dumps([TOOL]), "gen_ai.usage.input_tokens": "10"}
    kept |= {"gen_ai.system_instructions": json.dumps([{"type": "text", "content": SYSTEM["content"]}])}
    kept |= {"gen_ai.agent.name": "forecaster", "gen_ai.request.model": "m1"}
    [rollout] = read_traces(write_lines(tmp_path / "t.json", [as_the_page_of_a_trace([ASKED], CALLING, **kept)]))
    [call] = rollout.trainable_calls
    assert [*call.messages, call.reply, *call.tools] == [SYSTEM, ASKED, CALLING, TOOL]
    assert (call.agent, call.model, call.prompt_tokens) == ("forecaster", "m1", 10)
    assert (rollout.task["question"], rollout.outcome.answer) == ("What is it?", "sun")


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_table_of_langfuse_has_a_column_for_each_score(tmp_path: Path, form: str) -> None:
    row = {
        "id": "g",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": at(1),
        "tags": ["x"],
        "parentObservationId": "",
    }
    row |= {"input": [SYSTEM, ASKED], "output": [ANSWER], "right": [1, 0], "tone": ["kind"], "comments": []}
    whole = {"id": "t", "timestamp": at(1), "bookmarked": False, "input": "x", "output": "y"}
    if form == "jsonl":
        write_lines(tmp_path / "t.jsonl", [row, whole])
    else:
        with open(tmp_path / "t.csv", "w", encoding="utf-8") as file:
            table = csv.DictWriter(file, row, quoting=csv.QUOTE_ALL)
            table.writeheader()
            table.writerow({key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()})
        write_lines(tmp_path / "traces.jsonl", [whole])
    traces = read_traces(tmp_path)
    [rollout] = traces
    assert [*rollout.calls[0].messages, rollout.calls[0].reply] == [SYSTEM, ASKED, ANSWER]
    assert rollout.outcome.reward_components == {"right": 0.5}
    assert rollout.metadata["labels"] == {"tone": "kind"}
    assert traces.unread == {"Langfuse traces without their observations: export observations": 1}


@pytest.mark.parametrize(
    ("asked", "attributes", "reason"),
    [
        ("system: Be kind.\nuser: What?", {}, "requests that their tracer wrote as one text"),
        (["role='user' content='What?'", "role='assistant'"], {}, "messages without roles"),
        ([ASKED, {"role": "weather", "content": "sun"}], {}, "messages with a role of their own"),
        ([{"role": "tool", "tool_call_id": "c", "content": "sun"}], {}, "the request lacks its beginning"),
        (
            None,
            {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "What?", "gen_ai.prompt.2.content": "sun"},
            "messages that are missing",
        ),
        (
            [ASKED],
            {"gen_ai.response.finish_reasons": '["tool_calls"]'},
            "the tool calls of the reply were not recorded",
        ),
    ],
)
def test_a_request_or_a_reply_that_is_not_whole_is_not_learned(
    tmp_path: Path, asked: Any, attributes: dict[str, Any], reason: str
) -> None:
    [rollout] = read_traces(write_lines(tmp_path / "t.json", [as_the_page_of_a_trace(asked, ANSWER, **attributes)]))
    assert [call.untrainable_reason for call in rollout.calls] == [reason]


def test_a_request_that_its_tracer_cut_off_is_not_learned(tmp_path: Path) -> None:
    span = {"traceId": "a1", "spanId": "b1", "name": "chat", "startTimeUnixNano": 1e18}
    text = json.dumps([SYSTEM, ASKED])
    given = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": json.dumps([ANSWER])}
    cut = {**span, "attributes": {**given, "gen_ai.input.messages": text[:-20]}}
    lost = {**span, "traceId": "a2", "droppedAttributesCount": 3}
    lost |= {"attributes": {**given, "gen_ai.input.messages": text}}
    cut_reply = {**span, "traceId": "a3"}
    cut_reply |= {"attributes": {**given, "gen_ai.input.messages": text, "gen_ai.output.messages": text[:-20]}}
    rollouts = read_traces(write_lines(tmp_path / "t.jsonl", [cut, lost, cut_reply]))
    assert [call.untrainable_reason for rollout in rollouts for call in rollout.calls] == [
        "requests that are damaged JSON",
        "attributes that are missing: their tracer's limit was reached",
        "replies that are damaged JSON",
    ]


def test_a_tool_whose_call_has_no_id_is_one_step(tmp_path: Path) -> None:
    """As Google's."""
    call = {"parts": [{"functionCall": {"name": "weather", "args": ARGUMENTS}}], "role": "model"}
    [record] = [as_the_page_of_a_trace({"contents": [{"role": "user", "parts": [{"text": "What?"}]}]}, call)]
    tool = {"id": "w", "traceId": "t", "type": "TOOL", "name": "execute_tool weather", "startTime": at(3)}
    record["observations"].append({**tool, "input": json.dumps(ARGUMENTS), "output": "sun"})
    [rollout] = read_traces(write_lines(tmp_path / "t.json", [record]))
    steps = [step for step in rollout.outcome.steps if step["kind"] == "tool"]
    assert [(step["agent"], step["output"]) for step in steps] == [("weather", "sun")]


def test_calls_of_the_ai_sdk_and_tools_of_pydantic_ai_are_read(tmp_path: Path) -> None:
    reply = [{"toolCallId": "c1", "toolName": "weather", "input": json.dumps(ARGUMENTS)}]
    function = TOOL["function"]
    tool = {"name": "weather", "description": function["description"], "parameters_json_schema": function["parameters"]}
    parameters = {"model_request_parameters": json.dumps({"function_tools": [tool], "output_tools": []})}
    [rollout] = read_traces(write_lines(tmp_path / "t.json", [as_the_page_of_a_trace([ASKED], reply, **parameters)]))
    [call] = rollout.trainable_calls
    assert (call.reply["tool_calls"][0]["function"]["name"], call.tools) == ("weather", [TOOL])


def test_the_inner_span_of_a_call_counts_only_if_it_has_as_much(tmp_path: Path) -> None:
    record = as_the_page_of_a_trace([SYSTEM, ASKED], ANSWER)
    [outer] = record["observations"]
    inner = {**outer, "id": "i", "parentObservationId": "g", "input": "system: Be kind.\nuser: What?", "output": "None"}
    record["observations"].append(inner)
    [rollout] = read_traces(write_lines(tmp_path / "t.json", [record]))
    assert [call.reply for call in rollout.trainable_calls] == [ANSWER]


@pytest.mark.parametrize("form", ["gzip", "ollama", "other", "cut"])
def test_an_archive_may_have_compressed_replies_and_lines_of_json(tmp_path: Path, form: str) -> None:
    """Those that are not understood are not learned."""
    call = {"function": {"name": "weather", "arguments": ARGUMENTS}}
    lines = [{"message": {"content": "", "tool_calls": [call]}, "done": False}]
    lines += [{"message": {"content": "sun"}, "done": True, "done_reason": "stop"}]
    text = json.dumps({"choices": [{"message": ANSWER, "finish_reason": "stop"}]})
    texts = {"ollama": "".join(json.dumps(line) + "\n" for line in lines), "other": "\x1f\x8b\x08"}
    content = {"text": texts.get(form)}
    if form in ("gzip", "cut"):
        data = gzip.compress(text.encode())[: -9 if form == "cut" else None]
        content = {"encoding": "base64", "text": base64.b64encode(data).decode()}
    body = json.dumps({"model": "m1", "messages": [ASKED]})
    url = "http://127.0.0.1:1/api/chat" if form == "ollama" else "https://x.org/v1/chat/completions"
    entry = {"startedDateTime": at(1), "time": -1, "request": {"url": url, "postData": {"text": body}}}
    entry["response"] = {"status": 200, "content": content}
    [rollout] = read_traces(write_lines(tmp_path / "t.har", [{"log": {"entries": [entry]}}]))
    [reply] = [call.reply for call in rollout.calls]
    assert len(rollout.trainable_calls) == (form in ("gzip", "ollama"))
    if form == "ollama":
        assert (reply["content"], reply["tool_calls"][0]["function"]["name"]) == ("sun", "weather")
    elif form == "gzip":
        assert reply == ANSWER


def test_a_text_about_streams_is_no_stream(tmp_path: Path) -> None:
    answer = 'Send this:\ndata: {"a": 1}\n'
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [{"messages": [ASKED], "response": answer}]))
    assert rollout.outcome.answer == answer


def test_what_langsmiths_sdk_sends_is_the_run_with_its_update(tmp_path: Path) -> None:
    order = "20260102T030401000000Zr1"
    run = {"id": "r1", "trace_id": "r1", "dotted_order": order, "run_type": "llm", "start_time": at(1)}
    posted = {**run, "inputs": {"messages": [SYSTEM, ASKED]}, "outputs": {}}
    update = {"trace_id": "r1", "dotted_order": order, "end_time": at(2), "outputs": {"choices": [{"message": ANSWER}]}}
    [rollout] = read_traces(write_lines(tmp_path / "t.json", [{"post": [posted], "patch": [update]}]))
    [call] = rollout.trainable_calls
    assert [*call.messages, call.reply] == [SYSTEM, ASKED, ANSWER]


def test_steps_of_a_trajectory_after_its_context_was_summarized_are_not_learned(tmp_path: Path) -> None:
    [whole] = trajectory()
    handed = {"results": [{f"{'sub'}agent_trajectory_ref": [{"trajectory_path": "summary.json"}]}]}
    last = len(whole["steps"]) - 1
    whole["steps"].insert(last, {"step_id": 9, "source": "system", "message": "Summarized.", "observation": handed})
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [whole]))
    assert [bool(call.untrainable_reason) for call in rollout.calls] == [False, True]


def test_a_copy_of_a_file_adds_nothing_and_equal_lines_of_one_file_stay(tmp_path: Path) -> None:
    chat = {"messages": CHAT, "tools": [TOOL]}
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [chat, chat, *trajectory(), *langfuse_trace()])
    traces, once = read_traces(tmp_path), read_traces(tmp_path / "a.jsonl")
    answers = [(rollout.metadata["source"], rollout.outcome.answer) for rollout in traces]
    assert answers == [(rollout.metadata["source"], rollout.outcome.answer) for rollout in once]
    assert [source for source, _ in answers].count("OpenAI chats") == 2
    assert traces.unread["records that an earlier file has, too"] > 3
