"""The servers, each started as a user starts it, and valid requests for each."""

from __future__ import annotations

import json
import re
import secrets
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import external_processes

from chaos.mutations import Request
from chaos.processes import END_S, Process, Processes
from groundwire.train.store.health import API, check_store

if TYPE_CHECKING:
    from chaos.requests import Server

__all__ = ["ALL", "TOKEN"]

TOKEN = secrets.token_hex(32)
"""The token of all servers of a run."""
JSON = {"Host": "127.0.0.1", "Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
Wait = Callable[[], "list[Server]"]
"""Waits until the servers of a process answer."""


def store(folder: Path, processes: Processes) -> Wait:
    """``groundwire store``, with a rollout in each state."""
    port = external_processes.free_port()
    arguments = ("-m", "groundwire.train.store", "--path", str(folder / "fuzzed.db"), "--port", str(port))
    process = processes.python("store under requests", *arguments)

    def wait() -> list[Server]:
        from chaos.requests import Server

        check_store(f"http://127.0.0.1:{port}", timeout_s=END_S)
        probe = Request("GET", f"{API}/health".encode(), JSON)
        return [Server(process.name, process, port, probe, _store_requests(port))]

    return wait


def _store_requests(port: int) -> list[Request]:
    import httpx

    def post(path: str, body: Any, waits: bool = False) -> Request:
        return Request("POST", (API + path).encode(), JSON, body, waits)

    config = {"timeout_seconds": 60.0, "unresponsive_seconds": 5.0, "max_attempts": 2, "retry_condition": ["failed"]}
    policy = {
        "resource_type": "proxy_llm",
        "endpoint": "http://127.0.0.1:1/v1",
        "model": "m",
        "sampling_parameters": {},
    }
    rollout = {"input": {"id": "t", "question": "q"}, "mode": "train", "resources_id": "rs", "config": config}
    rollout["metadata"] = {"group": "g", "sampling": {"temperature": 1.0}, "settings": {"backend": "langgraph"}}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}{API}", headers=JSON, timeout=60, trust_env=False) as client:
        client.post("/resources/rs", json={"policy": policy}).raise_for_status()
        client.post("/queues/rollouts/enqueue", json={"rollouts": [rollout] * 20}).raise_for_status()
        taken = client.post("/queues/rollouts/dequeue", json={"limit": 3, "worker_id": "w"}).raise_for_status().json()
    ids = [(each["rollout_id"], each["attempt"]["attempt_id"]) for each in taken]
    (rollout_id, attempt_id), *_ = ids
    span = {
        **{"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": 1, "trace_id": "0" * 32},
        **{"span_id": "1" * 16, "parent_id": None, "name": "a call", "attributes": {"a": 1, "b": "text", "c": [0.5]}},
        **{"status": {"status_code": "OK", "description": None}, "start_time": 1.0, "end_time": 2.0, "events": []},
        **{"links": [], "context": None, "parent": None, "resource": {"attributes": {}, "schema_url": ""}},
    }
    this, attempts = f"/rollouts/{rollout_id}", f"/rollouts/{rollout_id}/attempts"
    gets = ["/health", "/rollouts", this, attempts, f"{attempts}/latest", "/workers", "/workers/w", "/statistics"]
    gets += ["/resources", "/resources/latest", "/resources/rs", f"/spans?rollout_id={rollout_id}&limit=10"]
    search = {"status_in": ["running"], "limit": 10, "offset": 0, "sort_by": "start_time", "sort_order": "desc"}
    batch = [["POST", "/spans/next", json.dumps({"rollout_id": rollout_id, "attempt_id": attempt_id})]] * 3
    return [
        *(Request("GET", (API + path).encode(), JSON) for path in gets),
        post("/queues/rollouts/enqueue", {"rollouts": [rollout]}),
        post("/queues/rollouts/dequeue", {"limit": 1, "worker_id": "w"}),
        post("/rollouts", rollout),
        post("/rollouts/search", {**search, "rollout_id_in": [rollout_id]}),
        post(this, {"status": "running", "metadata": {}, "config": config}),
        post(attempts, {"worker_id": "w"}),
        post(f"{attempts}/search", search),
        post(f"{attempts}/{attempt_id}", {"status": "running", "worker_id": "w", "last_heartbeat_time": time.time()}),
        post("/workers/search", {"limit": 5}),
        post("/workers/w", {"heartbeat_stats": {"cpu": 1.0}}),
        post("/resources", {"policy": policy}),
        post("/resources/rs", {"policy": policy}),
        post("/spans", span),
        post("/spans/batch", [span, {**span, "span_id": "2" * 16}]),
        post("/spans/search", {"rollout_id": rollout_id, "attempt_id": attempt_id, "name": "a call"}),
        post("/spans/next", {"rollout_id": rollout_id, "attempt_id": attempt_id}),
        post("/spans/next/batch", [[rollout_id, attempt_id]] * 3),
        post("/waits/rollouts", {"rollout_ids": [rollout_id], "timeout": 0}, waits=True),
        post("/batch", batch),
        Request(
            "POST", b"/v1/traces", {**JSON, "Content-Type": "application/x-protobuf"}, _otlp(rollout_id, attempt_id)
        ),
    ]


def _otlp(rollout_id: str, attempt_id: str) -> bytes:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add()
    for key, value in (("agentlightning.rollout_id", rollout_id), ("agentlightning.attempt_id", attempt_id)):
        attribute = spans.resource.attributes.add()
        attribute.key, attribute.value.string_value = key, value
    for number in range(3):
        span = spans.scope_spans.add().spans.add()
        span.name, span.trace_id, span.span_id = "a call", b"1" * 16, bytes([number] * 8)
        span.start_time_unix_nano, span.end_time_unix_nano = 10**18, 10**18 + 5
    return message.SerializeToString()


def models(folder: Path, processes: Processes) -> Wait:
    """The policy server and the proxy, in one process."""
    process = processes.python("policy server and proxy", "-m", "chaos.model_server")

    def wait() -> list[Server]:
        from chaos.requests import Server

        found = _printed(process, r"^(\d+) (\d+) (\S+)$")
        policy, proxy, attempt = int(found[1]), int(found[2]), found[3].encode()
        get = Request("GET", b"/v1/models", JSON)
        served = [get, Request("GET", b"/health", JSON), *_chats(b"/v1")]
        traced = [get, Request("GET", attempt + b"/models", JSON), *_chats(attempt)]
        return [
            Server("policy server", process, policy, get, served),
            Server("proxy", process, proxy, get, traced),
        ]

    return wait


def _chats(prefix: bytes) -> list[Request]:
    messages = [{"role": "system", "content": "select"}, {"role": "user", "content": "the name of a singer"}]
    call = {"id": "c", "type": "function", "function": {"name": "query", "arguments": '{"sql": "select"}'}}
    turn = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turn.append({"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "result"}]})
    parameters = {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]}
    tool = {"type": "function", "function": {"name": "query", "description": "Run it", "parameters": parameters}}
    plain = {"model": "policy", "messages": messages, "max_tokens": 4}
    bodies: list[dict[str, Any]] = [
        plain,
        {
            **plain,
            "temperature": 0.5,
            "top_p": 0.9,
            "logprobs": True,
            "return_token_ids": True,
            "seed": 1,
            "stop": ["a"],
        },
        {**plain, "stream": True, "stream_options": {"include_usage": True}},
        {**plain, "messages": turn, "tools": [tool], "tool_choice": "auto", "n": 1, "presence_penalty": 0},
        {**plain, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "stop_token_ids": [5]},
        {**plain, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": parameters}}},
    ]
    chats = [Request("POST", prefix + b"/chat/completions", {**JSON, "X-Agent": "writer"}, body) for body in bodies]
    return [*chats, *_other_apis(prefix, parameters)]


def _other_apis(prefix: bytes, parameters: dict[str, Any]) -> list[Request]:
    question = {"role": "user", "content": "the name of a singer"}
    call = {"type": "function_call", "call_id": "c", "name": "query", "arguments": '{"sql": "select"}'}
    output = {"type": "function_call_output", "call_id": "c", "output": "result"}
    function = {"type": "function", "name": "query", "parameters": parameters}
    use = {"type": "tool_use", "id": "c", "name": "query", "input": {"sql": "select"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "result"}]}
    turns = [question, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tool = {"name": "query", "input_schema": parameters}
    responses = {"model": "policy", "instructions": "select", "max_output_tokens": 4, "input": [question, call, output]}
    messages = {"model": "policy", "system": "select", "max_tokens": 4, "messages": turns, "tools": [tool]}
    bodies: list[tuple[bytes, dict[str, Any]]] = [
        (b"/responses", {**responses, "tools": [function], "tool_choice": "auto"}),
        (b"/responses", {**responses, "input": "name", "previous_response_id": None, "stream": True}),
        (b"/messages", messages),
        (b"/messages", {**messages, "stream": True, "stop_sequences": ["a"], "tool_choice": {"type": "auto"}}),
        (b"/completions", {"model": "policy", "prompt": "select", "max_tokens": 4, "logprobs": 0}),
        (b"/completions", {"model": "policy", "prompt": [5, 6], "max_tokens": 4, "stream": True}),
    ]
    return [Request("POST", prefix + path, JSON, body) for path, body in bodies]


def mcp(folder: Path, processes: Processes) -> Wait:
    """``groundwire mcp-sql`` over HTTP, with two databases."""
    databases = folder / "databases"
    databases.mkdir(parents=True)
    for name in ("songs", "films"):
        with closing(sqlite3.connect(databases / f"{name}.sqlite")) as conn, conn:
            conn.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT)")
            conn.executemany("INSERT INTO item VALUES (?, ?)", ((n, f"item {n}") for n in range(1000)))
    arguments = ("-m", "groundwire.tools.mcp_sql", "--database", str(databases), "--transport", "http", "--port", "0")
    process = processes.python("MCP server", *arguments, "--timeout", "2")

    def wait() -> list[Server]:
        from chaos.requests import Server

        port = int(_printed(process, r"http://[^/]*:(\d+)/mcp")[1])
        requests = _mcp_requests(port)
        # The first request needs no session; DELETE would end that of the others.
        return [Server(process.name, process, port, requests[0], requests, excluded=["DELETE"])]

    return wait


def _mcp_requests(port: int) -> list[Request]:
    import httpx

    headers = {**JSON, "Accept": "application/json, text/event-stream"}
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "chaos", "version": "1"}}
    start = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}
    deadline = time.monotonic() + END_S
    while True:
        try:
            reply = httpx.post(f"http://127.0.0.1:{port}/mcp", json=start, headers=headers, trust_env=False)
            break
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    reply.raise_for_status()
    if session := reply.headers.get("mcp-session-id"):
        headers["Mcp-Session-Id"] = session
    headers["Mcp-Protocol-Version"] = client["protocolVersion"]

    def post(method: str, **parameters: Any) -> Request:
        return Request("POST", b"/mcp", headers, {"jsonrpc": "2.0", "id": 2, "method": method, "params": parameters})

    calls: dict[str, dict[str, Any]] = {
        "list_databases": {},
        "list_tables": {"database": "songs"},
        "describe_table": {"database": "songs", "table": "item"},
        "query_database_by_sql": {"database": "films", "sql": "SELECT name FROM item WHERE id < 5"},
    }
    return [
        Request("POST", b"/mcp", {name: value for name, value in headers.items() if name != "Mcp-Session-Id"}, start),
        post("ping"),
        *(post("tools/call", name=name, arguments=arguments) for name, arguments in calls.items()),
        post("tools/list"),
        post("resources/list"),
        post("resources/templates/list"),
        Request("GET", b"/mcp", headers, waits=True),
    ]


def report(folder: Path, processes: Processes) -> Wait:
    """``groundwire report --watch`` of a short run."""
    from groundwire.train.artifacts.run_dir import RunDir
    from groundwire.train.config.resolve import resolve

    rows = json.loads((Path(__file__).parents[1] / "data" / "rollouts.json").read_text())["langgraph"]
    run = RunDir.create(folder / "runs", backend="langgraph", domain="spider", config=resolve("fast").to_dict())
    seconds = dict.fromkeys(("update", "sampling", "sql", "reward", "agent", "waiting"), 1.0)
    for step in (1, 2):
        run.write_rows(step, [{**rows, "mode": "train", "step": step, "rollout_id": f"ro-{step}"}])
        run.append_metrics({"step": step, "reward": 0.5, "failures": {}, "seconds": seconds, "wall_time_s": step})
    arguments = ("-m", "groundwire.train.report", str(run.path), "--watch", "--port", "0")
    process = processes.python("live report", *arguments)

    def wait() -> list[Server]:
        from chaos.requests import Server

        port = int(_printed(process, r"http://[^/]*:(\d+)/")[1])
        headers = {**JSON, "Host": f"127.0.0.1:{port}"}
        gets = [Request("GET", path, headers) for path in (b"/state", b"/")]
        return [Server(process.name, process, port, gets[0], gets)]

    return wait


def _printed(process: Process, pattern: str) -> re.Match[str]:
    """Wait until the process has printed ``pattern``."""
    deadline = time.monotonic() + END_S
    while (found := re.search(pattern, process.output, re.MULTILINE)) is None:
        if process.status is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.name} does not start: {process.output}")
        time.sleep(0.1)
    return found


ALL: tuple[Callable[[Path, Processes], Wait], ...] = (store, models, mcp, report)
