"""The HTTP API of Agent Lightning's store server (0.3), for any of its stores.

Agent Lightning's own server spends most of a request in layers: two middlewares that start tasks, a validation of the
answer, an HTTP parser in Python. Here a route is a line in a table: the request's model, the store's method, the
answer as JSON. ``LightningStoreClient`` and the OTLP exporter find what they know; two routes more carry spans and
their numbers in batches, and one any requests at all, which a hundred runners of one process make at the same moment.
What cannot succeed when it is tried again is a 4xx, so that clients do not try.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pydantic
import pydantic_core
from agentlightning.store import client_server as wire
from agentlightning.store.base import LightningStore
from agentlightning.types import Attempt, NamedResources, ResourcesUpdate, Rollout, Span, Worker
from agentlightning.utils.otlp import spans_from_proto
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from groundwire.train.store.health import API, HEALTH

__all__ = ["application"]

_log = logging.getLogger(__name__)
_MAX_REQUEST_BYTES = 256 << 20
_PROTOBUF = "application/x-protobuf"
_NOT_NULL = ("status", "config", "worker_id", "last_heartbeat_time", "heartbeat_stats")
_SEARCHED = {
    "query_rollouts": Rollout,
    "query_attempts": Attempt,
    "query_resources": ResourcesUpdate,
    "query_spans": Span,
    "query_workers": Worker,
}
_LISTS = ("status_in", "rollout_id_in")

Handler = Callable[[LightningStore, Mapping[str, str], Any], Awaitable[Any]]
_Answer = Callable[[Mapping[str, str], Any, bytes], Awaitable[tuple[int, bytes]]]


class _Refused(Exception):
    """The request cannot be served, now or later."""


def application(store: LightningStore) -> web.Application:
    """The API over ``store``, to be run on one event loop."""
    app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
    app.router.add_get(f"{API}/health", _health)
    app.router.add_post("/v1/traces", _traces(store))
    answers: dict[str, _Answer] = {}
    for line in _ROUTES:
        method, path = line.split()
        answers[line] = _answering(store, line)
        app.router.add_route(method, API + path, _handler(answers[line]))
    app.router.add_post(f"{API}/batch", _batch(answers))
    app.router.add_route("*", "/{path:.*}", _unknown)
    return app


def _fields(method: str, **renamed: str) -> Handler:
    """Call the store with what the request says, and nothing about what it does not mention."""

    async def call(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
        given = {name: getattr(body, name) for name in body.model_fields_set} if body is not None else {}
        if method in _SEARCHED:
            _check_search(given, _SEARCHED[method])
        for name in _NOT_NULL:
            if name in given and given[name] is None and method.startswith("update"):
                raise _Refused(f"{name} is null; leave it out where it is not to change")
        return await getattr(store, method)(**path, **given)

    return call


def _check_search(given: Mapping[str, Any], model: type[pydantic.BaseModel]) -> None:
    if (sort := given.get("sort_by")) is not None and sort not in model.model_fields:
        raise _Refused(f"sort_by is {sort!r}; allowed: {', '.join(model.model_fields)}")
    if (limit := given.get("limit", -1)) < 1 and limit != -1:
        raise _Refused(f"limit is {limit}; it must be above 0, or -1 for no limit")
    if given.get("offset", 0) < 0:
        raise _Refused(f"offset is {given['offset']}; it must not be negative")


async def _enqueue(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
    return list(await store.enqueue_many_rollouts(body.rollouts)) if body.rollouts else []


async def _dequeue(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
    if body is None:
        body = wire.DequeueManyRolloutsRequest()
    if body.limit <= 0:
        return []
    return list(await store.dequeue_many_rollouts(limit=body.limit, worker_id=body.worker_id))


async def _add_span(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
    return await store.add_span(body)


async def _add_spans(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
    # The ids of those that were new: the sender has the rest.
    return [span.span_id for span in await store.add_many_spans(body)]


async def _next_number(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
    return {"sequence_id": await store.get_next_span_sequence_id(body.rollout_id, body.attempt_id)}


async def _next_numbers(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
    return await store.get_many_span_sequence_ids(body)


async def _set_resources(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
    return await store.update_resources(path["resources_id"], body)


async def _add_resources(store: LightningStore, path: Mapping[str, str], body: Any) -> Any:
    return await store.add_resources(body)


_ROLLOUT, _ATTEMPTS = "/rollouts/{rollout_id}", "/rollouts/{rollout_id}/attempts"
_ROUTES: dict[str, tuple[int, Any, Handler]] = {
    "POST /queues/rollouts/enqueue": (201, wire.EnqueueManyRolloutsRequest, _enqueue),
    "POST /queues/rollouts/dequeue": (200, wire.DequeueManyRolloutsRequest, _dequeue),
    "POST /rollouts": (201, wire.RolloutRequest, _fields("start_rollout")),
    "GET /rollouts": (200, wire.QueryRolloutsRequest, _fields("query_rollouts")),
    "POST /rollouts/search": (200, wire.QueryRolloutsRequest, _fields("query_rollouts")),
    f"GET {_ROLLOUT}": (200, None, _fields("get_rollout_by_id")),
    f"POST {_ROLLOUT}": (200, wire.UpdateRolloutRequest, _fields("update_rollout")),
    f"GET {_ATTEMPTS}": (200, wire.QueryAttemptsRequest, _fields("query_attempts")),
    f"POST {_ATTEMPTS}": (201, wire.StartAttemptRequest, _fields("start_attempt")),
    f"POST {_ATTEMPTS}/search": (200, wire.QueryAttemptsRequest, _fields("query_attempts")),
    f"GET {_ATTEMPTS}/latest": (200, None, _fields("get_latest_attempt")),
    f"POST {_ATTEMPTS}/{{attempt_id}}": (200, wire.UpdateAttemptRequest, _fields("update_attempt")),
    "GET /workers": (200, wire.QueryWorkersRequest, _fields("query_workers")),
    "POST /workers/search": (200, wire.QueryWorkersRequest, _fields("query_workers")),
    "GET /workers/{worker_id}": (200, None, _fields("get_worker_by_id")),
    "POST /workers/{worker_id}": (200, wire.UpdateWorkerRequest, _fields("update_worker")),
    "GET /statistics": (200, None, _fields("statistics")),
    "GET /resources": (200, wire.QueryResourcesRequest, _fields("query_resources")),
    "POST /resources": (201, NamedResources, _add_resources),
    "GET /resources/latest": (200, None, _fields("get_latest_resources")),
    "GET /resources/{resources_id}": (200, None, _fields("get_resources_by_id")),
    "POST /resources/{resources_id}": (200, NamedResources, _set_resources),
    "GET /spans": (200, wire.QuerySpansRequest, _fields("query_spans")),
    "POST /spans": (201, Span, _add_span),
    "POST /spans/batch": (201, list[Span], _add_spans),
    "POST /spans/search": (200, wire.QuerySpansRequest, _fields("query_spans")),
    "POST /spans/next": (200, wire.NextSequenceIdRequest, _next_number),
    "POST /spans/next/batch": (200, list[tuple[str, str]], _next_numbers),
    "POST /waits/rollouts": (200, wire.WaitForRolloutsRequest, _fields("wait_for_rollouts")),
}


def _answering(store: LightningStore, line: str) -> _Answer:
    """What a route does, whichever way the request came: its status and its JSON."""
    status, model, call = _ROUTES[line]
    adapter = None if model is None else pydantic.TypeAdapter(model)

    async def answer(path: Mapping[str, str], query: Any, body: bytes) -> tuple[int, bytes]:
        try:
            asked = None if adapter is None else _parse(adapter, query, body)
            return status, pydantic_core.to_json(await call(store, path, asked))
        except pydantic.ValidationError as error:
            return 422, _detail(_in_words(error))
        except _Refused as error:
            return 400, _detail(str(error))
        except ValueError as error:  # the store's word for "there is no such thing"
            return 404, _detail(str(error))
        except sqlite3.Error as error:  # a full disk, say: the client may try again
            _log.error("%s: %s", line, error)
            return 503, _detail(f"the store's file: {error}")
        except Exception as error:  # the other requests of a batch are answered all the same
            _log.exception(line)
            return 500, _detail(f"the store failed: {error!r}")

    return answer


def _handler(answer: _Answer) -> Any:
    async def handle(request: web.Request) -> web.Response:
        query = request.query if request.method == "GET" else None
        status, body = await answer(request.match_info, query, await request.read())
        return web.Response(status=status, body=body, content_type="application/json")

    return handle


def _batch(answers: Mapping[str, _Answer]) -> Any:
    """Requests as ``[method, path, body]``, answered with ``[status, body]``; bodies are JSON text."""
    adapter = pydantic.TypeAdapter(list[tuple[str, str, str]])
    routes = [
        (re.compile(line.replace("{", "(?P<").replace("}", ">[^/]+)")), answer) for line, answer in answers.items()
    ]

    async def one(method: str, path: str, body: str) -> tuple[int, bytes]:
        for pattern, answer in routes:
            if found := pattern.fullmatch(f"{method} {path}"):
                return await answer(found.groupdict(), {} if method == "GET" else None, body.encode())
        return 404, _detail(_no_route(method, path))

    async def handle(request: web.Request) -> web.Response:
        try:
            asked = adapter.validate_json(await request.read())
        except pydantic.ValidationError as error:
            return _error(422, _in_words(error))
        answered = await asyncio.gather(*(one(*each) for each in asked))
        body = pydantic_core.to_json([(status, data.decode()) for status, data in answered])
        return web.Response(body=body, content_type="application/json")

    return handle


def _parse(adapter: pydantic.TypeAdapter[Any], query: Any, body: bytes) -> Any:
    if query is not None:
        return adapter.validate_python({n: query.getall(n) if n in _LISTS else query[n] for n in query})
    return adapter.validate_json(body) if body and body != b"null" else None


def _in_words(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "the body"
    return f"the request does not fit agentlightning 0.3: {where}: {first['msg']}"


def _detail(said: str) -> bytes:
    return pydantic_core.to_json({"detail": said})


def _error(status: int, detail: str) -> web.Response:
    return web.Response(status=status, body=_detail(detail), content_type="application/json")


async def _health(request: web.Request) -> web.Response:
    return web.json_response(HEALTH)


async def _unknown(request: web.Request) -> web.Response:
    return _error(404, _no_route(request.method, request.path))


def _no_route(method: str, path: str) -> str:
    return f"no {method} {path} here: this is a Lightning store with the API of agentlightning 0.3"


def _traces(store: LightningStore) -> Any:
    """OTLP over HTTP, as the OpenTelemetry exporter of Agent Lightning's tracer sends it."""

    async def handle(request: web.Request) -> web.Response:
        if request.content_type != _PROTOBUF:
            return _error(400, f"the body is {request.content_type}; it must be {_PROTOBUF}")
        message = ExportTraceServiceRequest()
        try:
            message.ParseFromString(await _inflated(request))
            await store.add_many_spans(await spans_from_proto(message, store.get_many_span_sequence_ids))
        except (ValueError, OSError, EOFError) as error:
            return _error(400, f"the spans were not taken: {error}")
        except Exception as error:
            if type(error).__name__ != "DecodeError":
                raise
            return _error(400, f"the body is no OTLP request: {error}")
        return web.Response(body=ExportTraceServiceResponse().SerializeToString(), content_type=_PROTOBUF)

    return handle


async def _inflated(request: web.Request) -> bytes:
    body = await request.read()
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
