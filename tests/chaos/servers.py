"""The servers, each started as a user starts it, and valid requests for each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import external_processes

from chaos.mutations import Request
from chaos.processes import Processes
from groundwire.tools.access_token import access_token
from groundwire.train.store.health import API, check_store

if TYPE_CHECKING:
    from chaos.requests import Server

__all__ = ["ALL"]

JSON = {"Host": "127.0.0.1", "Content-Type": "application/json"}
Start = Callable[[Path, Processes], Callable[[], "Server"]]


def store(folder: Path, processes: Processes) -> Callable[[], Server]:
    """``python -m train.store``, with a rollout in each state."""
    port = external_processes.free_port()
    arguments = ("-m", "groundwire.train.store", "--path", str(folder / "fuzzed.db"), "--port", str(port))
    process = processes.python("store under requests", *arguments)

    def wait() -> Server:
        from chaos.requests import Server

        check_store(f"http://127.0.0.1:{port}", timeout_s=60)
        probe = Request("GET", f"{API}/health".encode(), JSON)
        return Server(process.name, process, port, probe, _store_requests(port))

    return wait


def _store_requests(port: int) -> list[Request]:
    import httpx

    authorization = {"Authorization": f"Bearer {access_token()}"}
    headers = {**JSON, **authorization}

    def post(path: str, body: Any, waits: bool = False) -> Request:
        return Request("POST", (API + path).encode(), headers, body, waits)

    config = {"timeout_seconds": 60.0, "unresponsive_seconds": 5.0, "max_attempts": 2, "retry_condition": ["failed"]}
    policy = {
        "resource_type": "proxy_llm",
        "endpoint": "http://127.0.0.1:1/v1",
        "model": "m",
        "sampling_parameters": {},
    }
    rollout = {"input": {"id": "t", "question": "q"}, "mode": "train", "resources_id": "rs", "config": config}
    rollout["metadata"] = {"group": "g", "sampling": {"temperature": 1.0}, "settings": {"backend": "langgraph"}}
    address = f"http://127.0.0.1:{port}{API}"
    with httpx.Client(base_url=address, headers=authorization, timeout=60, trust_env=False) as client:
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
        *(Request("GET", (API + path).encode(), headers) for path in gets),
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
            "POST", b"/v1/traces", {**headers, "Content-Type": "application/x-protobuf"}, _otlp(rollout_id, attempt_id)
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


ALL: tuple[Start, ...] = (store,)
