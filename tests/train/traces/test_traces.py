"""Exported traces become rollouts: what a tracer wrote is there, and what could not be read is counted."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, Status, StatusCode, set_span_in_context

from groundwire.train import read_traces
from groundwire.train.traces.masking import Masker
from groundwire.train.traces.read import TraceError

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}},
}
SYSTEM, ASKED = {"role": "system", "content": "You tell the weather."}, {"role": "user", "content": "Rain in Bern?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT, ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "sun"}, {"role": "assistant", "content": "No."}
CHAT = [SYSTEM, ASKED, CALLING, RESULT, ANSWER]


def parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message in the form of the GenAI conventions."""
    if message["role"] == "tool":
        inner = [{"type": "tool_call_response", "id": message["tool_call_id"], "response": message["content"]}]
    else:
        inner = [{"type": "text", "content": message["content"]}] if message["content"] else []
        for call in message.get("tool_calls", ()):
            inner.append({"type": "tool_call", "id": call["id"], **call["function"]})
    return {"role": message["role"], "parts": inner}


def record_spans(*, agent: str = "forecaster", fails: bool = False) -> list[ReadableSpan]:
    """What OpenTelemetry's SDK records of an agent with two calls and a tool."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    root = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent, "gen_ai.conversation.id": "s1"}
    with tracer.start_as_current_span(f"invoke_agent {agent}", attributes=root):
        for count in (2, 4):
            request = {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": "m1",
                "gen_ai.input.messages": json.dumps([parts(message) for message in CHAT[:count]]),
                "gen_ai.output.messages": json.dumps([parts(CHAT[count])]),
                "gen_ai.tool.definitions": json.dumps([TOOL]),
                "gen_ai.usage.input_tokens": 10 * count,
                "gen_ai.usage.output_tokens": 3,
                "gen_ai.response.finish_reasons": ["stop"],
            }
            with tracer.start_as_current_span("chat m1", attributes=request):
                pass
            if count == 2:
                tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"}
                tool |= {"gen_ai.tool.call.id": "c1", "gen_ai.tool.call.arguments": CALL["function"]["arguments"]}
                with tracer.start_as_current_span("execute_tool weather", attributes=tool) as span:
                    span.set_attribute("gen_ai.tool.call.result", "sun")
                    if fails:
                        span.set_status(Status(StatusCode.ERROR, "no such city"))
        score = {"gen_ai.evaluation.name": "right", "gen_ai.evaluation.score.value": 0.75}
        with tracer.start_as_current_span("gen_ai.evaluation.result", attributes=score):
            pass
    return list(exporter.get_finished_spans())


def as_otlp(spans: list[ReadableSpan]) -> bytes:
    return encode_spans(spans).SerializeToString()


def as_json(spans: list[ReadableSpan]) -> list[dict[str, Any]]:
    """Each span as a line of OTLP JSON."""
    return [MessageToDict(encode_spans([span])) for span in spans]


def write_lines(file: Path, records: list[Any]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def check_conversation(rollout: Any) -> None:
    """The calls are those that the agent made."""
    assert [call.messages for call in rollout.calls] == [CHAT[:2], CHAT[:4]]
    assert [call.reply for call in rollout.calls] == [CALLING, ANSWER]
    assert [call.tools for call in rollout.calls] == [[TOOL], [TOOL]]
    assert rollout.untrainable_calls == []
    assert (rollout.task["question"], rollout.outcome.answer) == ("Rain in Bern?", "No.")
    tools = [step for step in rollout.outcome.steps if step["kind"] == "tool"]
    assert [(step["agent"], step["input"], step["output"]) for step in tools] == [
        ("weather", '{"city": "Bern"}', "sun")
    ]


@pytest.mark.parametrize("form", ["lines", "document", "pretty", "protobuf", "framed", "gzip", "printed"])
def test_otlp_in_any_form_gives_the_calls_as_they_were_made(tmp_path: Path, form: str) -> None:
    spans, file = record_spans(), tmp_path / "traces"
    if form == "printed":
        file.write_text("\n".join(span.to_json() for span in spans))
    elif form in ("protobuf", "framed"):
        body = as_otlp(spans)
        file.write_bytes(body if form == "protobuf" else len(body).to_bytes(4, "big") + body)
    elif form == "lines":
        write_lines(file, as_json(spans))
    else:
        text = json.dumps(MessageToDict(encode_spans(spans)), indent=1 if form == "pretty" else None).encode()
        file.write_bytes(gzip.compress(text) if form == "gzip" else text)
    traces = read_traces(file)
    [rollout] = traces
    check_conversation(rollout)
    assert [call.agent for call in rollout.calls] == ["forecaster", "forecaster"]
    assert [(call.model, call.prompt_tokens, call.response_tokens) for call in rollout.calls] == [
        ("m1", 20, 3),
        ("m1", 40, 3),
    ]
    assert (rollout.outcome.reward, rollout.metadata["session"]) == (0.75, "s1")
    assert not traces.unread


def record_logs(spans: list[ReadableSpan], style: str) -> tuple[list[ReadableSpan], list[Any]]:
    """Spans without their messages, and the log records that have these: one with all, or one for each message."""
    exporter, provider, bare = InMemoryLogRecordExporter(), LoggerProvider(), []
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    logger = provider.get_logger("test")
    logger.emit(body="started", severity_text="INFO")
    for span in spans:
        kept = dict(span.attributes or {})
        said = {key: kept.pop(key) for key in list(kept) if key.endswith(("messages", "definitions"))}
        bare.append(copy.copy(span))
        bare[-1]._attributes = kept
        if not said:
            continue
        context = set_span_in_context(NonRecordingSpan(span.context))
        if style == "details":
            logger.emit(event_name="gen_ai.client.inference.operation.details", attributes=said, context=context)
            continue
        bare[-1]._attributes = kept | {"gen_ai.tool.definitions": said["gen_ai.tool.definitions"]}
        count = len(json.loads(said["gen_ai.input.messages"]))
        for place, message in enumerate(CHAT[: count + 1]):
            body = {"content": message["content"], "tool_calls": message.get("tool_calls")}
            event, body = f"gen_ai.{message['role']}.message", {key: value for key, value in body.items() if value}
            if place == count:
                event, body = "gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": body}
            if "tool_call_id" in message:
                body["id"] = message["tool_call_id"]
            logger.emit(event_name=event, body=body, context=context)
    return bare, list(exporter.get_finished_logs())


@pytest.mark.parametrize("form", ["lines", "protobuf", "framed", "printed"])
@pytest.mark.parametrize("style", ["details", "messages"])
def test_messages_in_log_records_belong_to_their_spans(tmp_path: Path, style: str, form: str) -> None:
    spans, logs = record_logs(record_spans(), style)
    files = [tmp_path / "logs", tmp_path / "spans"]
    if form == "printed":
        files[0].write_text("\n".join(log.to_json() for log in logs))
        files[1].write_text("\n".join(span.to_json() for span in spans))
    for file, encoded in zip(files, [encode_logs(logs), encode_spans(spans)], strict=True):
        body = encoded.SerializeToString()
        if form == "lines":
            write_lines(file, [MessageToDict(encoded)])
        elif form != "printed":
            file.write_bytes(body if form == "protobuf" else len(body).to_bytes(4, "big") + body)
    traces = read_traces(*files)
    [rollout] = traces
    check_conversation(rollout)
    assert traces.unread == {"log records that are no events of the GenAI conventions": 1}


@pytest.mark.parametrize("style", ["details", "messages"])
def test_log_records_without_their_spans_are_calls_and_counted(tmp_path: Path, style: str) -> None:
    _, logs = record_logs(record_spans(), style)
    traces = read_traces(write_lines(tmp_path / "logs.jsonl", [MessageToDict(encode_logs([log])) for log in logs]))
    [rollout] = traces
    assert [call.messages for call in rollout.calls] == [CHAT[:2], CHAT[:4]]
    assert [call.reply for call in rollout.calls] == [CALLING, ANSWER]
    assert traces.unread["log records whose spans are missing, read without them"] == len(logs) - 1


@pytest.mark.parametrize(("name", "agent"), [("invoke_agent planner", "planner"), ("invoke_agent", "outer")])
def test_a_span_without_an_agents_name_has_the_one_of_its_name_or_of_the_span_around_it(
    tmp_path: Path, name: str, agent: str
) -> None:
    def span(number: int, name: str, **attributes: Any) -> dict[str, Any]:
        pairs = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
        ids = {"traceId": "0" * 31 + "1", "spanId": f"{number:016x}", "parentSpanId": f"{number - 1:016x}"}
        return {**ids, "name": name, "startTimeUnixNano": str(number), "attributes": pairs}

    operation = "gen_ai.operation.name"
    spans = [
        span(1, "invoke_agent outer", **{operation: "invoke_agent", "gen_ai.agent.name": "outer"}),
        span(2, name, **{operation: "invoke_agent"}),
        span(3, "chat m1", **{operation: "chat", "gen_ai.input.messages": json.dumps([parts(CHAT[1])])}),
    ]
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", spans))
    assert [call.agent for call in rollout.calls] == [agent]


def test_spans_in_any_order_in_several_files_are_one_trace_each(tmp_path: Path) -> None:
    lines = as_json(record_spans()) + as_json(record_spans(agent="other"))
    random.Random(1).shuffle(lines)
    files = [write_lines(tmp_path / f"{place}.jsonl", lines[place::3]) for place in range(3)]
    rollouts = list(read_traces(*files))
    for rollout in rollouts:
        check_conversation(rollout)
    assert sorted({call.agent for rollout in rollouts for call in rollout.calls}) == ["forecaster", "other"]


def test_ids_in_base64_are_those_in_hexadecimal(tmp_path: Path) -> None:
    lines = as_json(record_spans())
    known = lines[0]["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"]
    ids = {known: base64.b64encode(bytes.fromhex("d31f" * 8)).decode()}
    assert ids[known].startswith("0x")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "a.jsonl").write_text(text.replace(known, ids[known]))
    (tmp_path / "b.jsonl").write_text(text.replace(known, "d31f" * 8))
    for file in ("a.jsonl", "b.jsonl"):
        [rollout] = read_traces(tmp_path / file)
        check_conversation(rollout)
        assert rollout.rollout_id == "d31f" * 8


def test_a_missing_parent_is_counted_and_loses_no_call(tmp_path: Path) -> None:
    lines = [line for line in as_json(record_spans()) if "invoke_agent" not in json.dumps(line)]
    traces = read_traces(write_lines(tmp_path / "cut.jsonl", lines))
    [rollout] = traces
    check_conversation(rollout)
    assert traces.unread == {"spans whose parents are missing, read without them": 3}


def test_a_tool_that_failed_is_said(tmp_path: Path) -> None:
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", as_json(record_spans(fails=True))))
    assert [step["ok"] for step in rollout.outcome.steps if step["kind"] == "tool"] == [False]


def test_a_cut_file_loses_its_last_record_alone(tmp_path: Path) -> None:
    text = "".join(json.dumps({"messages": CHAT, "tools": [TOOL]}) + "\n" for _ in range(3))
    (tmp_path / "cut.jsonl").write_text(text[:-40])
    (tmp_path / "cut.json").write_text(json.dumps([{"messages": CHAT, "tools": [TOOL]}] * 3)[:-40])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text.encode() * 99, mtime=0)[:-40])
    for name in ("cut.jsonl", "cut.json"):
        traces = read_traces(tmp_path / name)
        assert len(list(traces)) == 2
        assert traces.unread == {"files that end in the middle of a record": 1}
    traces = read_traces(tmp_path / "cut.gz")
    assert len(list(traces)) < 3 * 99
    assert traces.unread == {"files that end in the middle of a record": 1}


def test_a_damaged_line_loses_itself_alone(tmp_path: Path) -> None:
    chat = json.dumps({"messages": CHAT, "tools": [TOOL]})
    lines = [chat, '{"messages": [', "not JSON", "\0\0" + chat]  # as a log that was cut while it was written
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    traces = read_traces(tmp_path / "t.jsonl")
    assert len(list(traces)) == 2
    assert traces.unread == {"lines that are no JSON": 2}


def test_formats_may_be_mixed_and_unknown_records_are_counted(tmp_path: Path) -> None:
    records = [{"messages": CHAT, "tools": [TOOL]}, *as_json(record_spans()), {"level": "info"}, 3]
    traces = read_traces(write_lines(tmp_path / "mixed.jsonl", records))
    rollouts = list(traces)
    for rollout in rollouts:
        check_conversation(rollout)
    assert sorted(rollout.metadata["source"] for rollout in rollouts) == ["OpenAI chats", "OpenTelemetry"]
    assert traces.unread["records of no known format"] == 1


def test_a_call_with_a_part_that_is_no_text_is_not_learned(tmp_path: Path) -> None:
    audio = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}
    traces = read_traces(write_lines(tmp_path / "t.jsonl", [{"messages": [audio, ANSWER]}]))
    [rollout] = traces
    assert rollout.untrainable_calls == rollout.calls
    assert traces.unread == {"message parts of type input_audio": 1}


def test_replies_of_weight_0_are_not_learned(tmp_path: Path) -> None:
    chat = [ASKED, {**ANSWER, "weight": 0}, ASKED, ANSWER]
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [{"messages": chat}]))
    assert rollout.trainable_calls == rollout.calls[1:]


def test_a_correction_in_the_next_turn_is_an_outcome(tmp_path: Path) -> None:
    chats = [
        [ASKED, ANSWER, {"role": "user", "content": text}, ANSWER] for text in ("No, that is wrong.", "Und morgen?")
    ]
    rollouts = read_traces(write_lines(tmp_path / "t.jsonl", [{"messages": chat} for chat in chats]))
    assert [rollout.metadata["corrected"] for rollout in rollouts] == [True, False]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mail a.b+c@example.co.uk now", "mail [email] now"),
        ("key sk-proj-abcdefghijklmnop1234 end", "key [key] end"),
        ("card 4111 1111 1111 1111", "card [card]"),
        ("call +49 (151) 2345-6789 or 030 1234567", "call [phone] or [phone]"),
        ("from 192.168.10.7", "from [ip]"),
        ("IBAN DE89 3704 0044 0532 0130 00.", "IBAN [iban]."),
        ("call 1-800-555-2671, 06 12 34 56 78 or 138 1234 5678", "call [phone], [phone] or [phone]"),
        ("from fe80::1ff:fe23:4567:890a, id 11010519491231002X", "from [ip], id [ssn]"),
        ("r8_5ZbhKVaIs9RWUPieGxKZtBGRwWHuahC xai-LUS59VeFVpO9PsObAUOjOX7z", "[key] [key]"),
        ("https://hooks.slack.com/services/T0HMZNMFK/B0ETPGDNT/IA6hQsrpyVJa", "https://hooks.slack.com/services/[key]"),
        (
            '{"password": "S3cr3t!pass"} and MISTRAL_API_KEY=k40WPjY6bayj4QIdKy',
            '{"password": "[key]"} and MISTRAL_API_KEY=[key]',
        ),
        ("it sent Bearer abcd1234efgh5678ijkl and got 401", "it sent Bearer [key] and got 401"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEvA2eqeQP2ubl6uouq10q", "[key]"),
        ("password: required, api_key=os.environ['K1'], max_tokens: 4096, page_token=CAUQAA2bcd", None),
        (
            "1735787045123 ms, order 100-200-3000, 1 000 000 000, 12:30:45, git@github.com:x/y, sk-learn-contrib-pack",
            None,
        ),
        ("order 12345678 of 01.02.2024 12:30, 3.14159, 4111 1111 1111 1112", None),
        ("2025-10-16T14:30:00Z, v1.2.3, 100,000 and 5/6/2023", None),
    ],
)
def test_keys_and_personal_data_are_masked_and_other_numbers_stay(text: str, masked: str | None) -> None:
    masker = Masker()
    assert masker.mask(text) == (masked or text)
    assert sum(masker.replaced.values()) == (0 if masked is None else masked.count("["))


def test_a_field_whose_name_says_so_is_a_secret() -> None:
    assert Masker().mask({"api_key": "k40WPjY6bayj4", "keys": "k40WPjY6bayj4"}) == {
        "api_key": "[key]",
        "keys": "k40WPjY6bayj4",
    }


def test_masking_is_the_default_reaches_all_texts_and_can_be_left_out(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "I am a@b.org"}, {"role": "assistant", "content": "Hello a@b.org"}]
    file = write_lines(tmp_path / "t.jsonl", [{"messages": chat}])
    traces = read_traces(file)
    [rollout] = traces
    assert "a@b.org" not in f"{rollout} {rollout.calls[0].messages} {rollout.calls[0].reply}"
    assert traces.masked == {"email": 2}
    [plain] = read_traces(file, mask=False)
    assert plain.calls[0].messages == chat[:1]


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_traces(tmp_path / "none.jsonl")
