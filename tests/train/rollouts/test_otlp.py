"""``--otlp``: a rollout reaches an OTLP receiver as one trace, and a viewer that fails does not disturb the run."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from groundwire.adapters.tracing import LLMCall
from groundwire.train import export
from groundwire.train.artifacts.tracking import check_otlp
from groundwire.train.config.errors import ConfigError
from groundwire.train.rollouts.otlp import OtlpExport, traces_url
from groundwire.train.store.rollout import Outcome, Rollout

MESSAGES = [{"role": "user", "content": "Question: How many?"}]
REPLY = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "q", "arguments": "{}"}}]}


def call(sequence: int, **changes: Any) -> LLMCall:
    first = LLMCall(
        rollout_id="ro-1", attempt_id="at-1", sequence=sequence, agent="write_query", model="m", prompt_ids=[1, 2],
        response_ids=[3], logprobs=[-0.5], finish_reason="tool_calls", started=100.0 + sequence, ended=100.5 + sequence,
        messages_json=json.dumps(MESSAGES), reply_json=json.dumps(REPLY),
    )  # fmt: skip
    return replace(first, **changes)


OUTCOME = Outcome(
    reward=0.5, reward_components={"exec": 0.5}, answer="SELECT 1",
    steps=[
        {"agent": "write_query", "kind": "llm", "input": "", "output": "", "ok": True},
        {"agent": "execute_query", "kind": "tool", "input": "SELECT 1", "output": "Error: key-of-a-judge", "ok": False},
        {"agent": "check_query", "kind": "llm", "input": "", "output": "", "ok": True},
    ],
)  # fmt: skip
RESULT = Rollout(
    rollout_id="ro-1", task={"id": "t1", "question": "How many?"}, group="t1", outcome=OUTCOME,
    calls=[call(1), call(2, agent="check_query")], started=0.0, ended=3.0,
)  # fmt: skip


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Any], dict[str, int]]]:
    """The address of an OTLP receiver, the spans that it got, and the status with which it answers."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []
    answer = {"status": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(answer["status"])
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", spans, answer
    server.shutdown()
    server.server_close()


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def test_a_rollout_is_one_trace_with_its_calls_tools_and_rewards(
    receiver: tuple[str, list[Any], dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "key-of-a-judge")
    url, spans, _ = receiver
    check_otlp(url)
    export = OtlpExport(url, run="runs-1", domain="spider")
    export.export(RESULT)
    export.export(replace(RESULT, outcome=Outcome(failure="timeout", message="x", answer="SELECT 1"), calls=[]))
    export.close()
    assert len({span.trace_id for span in spans}) == 2
    [root, failed] = [span for span in spans if not span.parent_span_id]
    trace = [span for span in spans if span.trace_id == root.trace_id and span is not root]
    assert {span.parent_span_id for span in trace} == {root.span_id}
    assert [span.name for span in trace] == [
        "chat m", "chat m", "execute_tool execute_query", "gen_ai.evaluation.result", "gen_ai.evaluation.result",
    ]  # fmt: skip
    attributes = [{each.key: _value(each.value) for each in span.attributes} for span in trace]
    assert attributes[1]["gen_ai.agent.name"] == "check_query"
    assert (attributes[0]["gen_ai.usage.input_tokens"], attributes[0]["gen_ai.usage.output_tokens"]) == (2, 1)
    assert json.loads(attributes[0]["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "Question: How many?"}]}
    ]
    [reply] = json.loads(attributes[0]["gen_ai.output.messages"])
    assert reply["parts"] == [{"type": "tool_call", "id": "c", "name": "q", "arguments": "{}"}]
    assert attributes[2]["gen_ai.tool.call.result"] == "Error: $SOME_API_KEY"
    assert trace[2].status.code == 2
    first, tool, second = trace[0], trace[2], trace[1]
    assert first.end_time_unix_nano <= tool.start_time_unix_nano <= tool.end_time_unix_nano
    assert tool.end_time_unix_nano <= second.start_time_unix_nano
    assert [(each["gen_ai.evaluation.name"], each["gen_ai.evaluation.score.value"]) for each in attributes[3:]] == [
        ("reward", 0.5),
        ("exec", 0.5),
    ]
    assert (failed.status.code, failed.status.message) == (2, "timeout: x")


def test_a_viewer_that_refuses_spans_is_named_once(
    receiver: tuple[str, list[Any], dict[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    url, _, answer = receiver
    answer["status"] = 400
    export = OtlpExport(url, run="runs-1", domain="spider")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            export.export(RESULT)
            export._provider.force_flush()
    export.close()
    assert caplog.text.count(f"spans cannot be sent to {url} and are lost there; the run goes on") == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:4318", "give http://HOST:PORT"),
        ("http://me:secret@127.0.0.1:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("http://127.0.0.1:9", "nothing answers there"),
    ],
)
def test_an_unusable_address_is_an_error_before_the_run(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_otlp(url)
    assert "secret" not in str(caught.value)


def test_the_path_of_otlp_is_added_unless_there_is_one() -> None:
    assert traces_url("http://h:4318") == traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert traces_url("http://h/api/public/otel/v1/traces") == "http://h/api/public/otel/v1/traces"


def test_a_missing_package_is_said_before_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> Any:
        if name == "opentelemetry.exporter":
            return None
        assert not name.startswith("opentelemetry.exporter"), "Python raises ModuleNotFoundError"
        return object()

    monkeypatch.setattr("groundwire.train.artifacts.tracking.importlib.util.find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"--otlp: its package is not installed: pip install 'groundwire\[otlp\]'"):
        check_otlp("http://127.0.0.1:1")
    (tmp_path / "chats.jsonl").write_text("{}\n")
    output = tmp_path / "out.json"
    result = CliRunner().invoke(
        export.app, [str(tmp_path / "chats.jsonl"), "--format", "otlp", "--output", str(output)]
    )
    assert result.exit_code == 2
    assert "--format otlp: its package is not installed" in result.output
    assert not output.exists()
