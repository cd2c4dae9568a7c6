"""Serves a store over the HTTP API of Agent Lightning's store server (0.3).

A route is an entry of a table: the status, the model of the request, the store's method. Agent Lightning's
``LightningStoreClient`` and the OTLP exporter work unchanged. Three routes are added, for our client: ``/spans/batch``,
``/spans/next/batch``, and ``/batch`` for any requests. A request that would fail again has a 4xx status, so clients do
not repeat it.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import re
import socket
import sqlite3
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_core
from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from groundwire.tools.http.guard import Guard, middleware
from groundwire.tools.http.server import make_runner
from groundwire.train.store.agent_lightning import Config, Request, SpanFields
from groundwire.train.store.errors import DAMAGED, StoreAddressError
from groundwire.train.store.health import API, HEALTH
from groundwire.train.store.intake import SpanIntake
from groundwire.train.store.lightning_store import FIELDS
from groundwire.train.store.limits import (
    MAX_ITEMS,
    MAX_REQUEST_BYTES,
    RefusedValueError,
    check_json_size,
    check_request,
    decompress,
    first_problem,
)
from groundwire.train.store.rollout import AttemptStatus, RolloutStatus

__all__ = ["application", "bind", "serve"]

_log = logging.getLogger(__name__)
_SHUTDOWN_S = 2.0
_MAX_PAGE = 1000  # items of a list; "total" says how many there are
_MAX_BATCH = 64  # requests in one; our client sends 32
_BACKLOG = 1024  # a hundred runners connect at the same moment
_TRACES = "/v1/traces"
_PROTOBUF = "application/x-protobuf"
_ENCODING, _ENCODINGS = "Content-Encoding", ("identity", "gzip", "deflate")
_BODY_S = 60.0
_NOT_NULL = ("status", "config", "worker_id", "last_heartbeat_time", "heartbeat_stats")
_LARGE_BYTES = 256 << 10
_LIST_PARAMETERS = ("status_in", "rollout_id_in")

_PathParameters = Mapping[str, str]
_Call = Callable[[Any, _PathParameters, Any], Awaitable[Any]]
_Endpoint = Callable[[_PathParameters, Any, bytes], Awaitable[tuple[int, bytes]]]


_T = TypeVar("_T")
_Items = Annotated[list[_T], pydantic.Field(max_length=MAX_ITEMS)]


class _Model(pydantic.BaseModel):
    """The body of a request, or its query."""


class _Enqueue(_Model):
    rollouts: _Items[Request]


class _Dequeue(_Model):
    limit: int = 1
    worker_id: str | None = None


class _Worker(_Model):
    worker_id: str | None = None


class _Start(Request):
    worker_id: str | None = None


class _UpdateRollout(_Model):
    input: Any = None
    mode: Literal["train", "val", "test"] | None = None
    resources_id: str | None = None
    status: RolloutStatus | None = None
    config: Config | None = None
    metadata: dict[str, Any] | None = None


class _UpdateAttempt(_Model):
    status: AttemptStatus | None = None
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None


class _UpdateWorker(_Model):
    heartbeat_stats: dict[str, Any] | None = None


class _Next(_Model):
    rollout_id: str
    attempt_id: str


class _Wait(_Model):
    rollout_ids: list[str]
    timeout: float | None = None


class _Resource(_Model):
    model_config = pydantic.ConfigDict(extra="allow")
    resource_type: Literal["llm", "proxy_llm", "prompt_template"]


class _Query(_Model):
    limit: int = -1
    offset: int = 0
    sort_by: str | None = None
    sort_order: Literal["asc", "desc"] = "asc"


class _FilteredQuery(_Query):
    filter_logic: Literal["and", "or"] = "and"


class _QueryRollouts(_FilteredQuery):
    status_in: list[RolloutStatus] | None = None
    rollout_id_in: list[str] | None = None
    rollout_id_contains: str | None = None


class _QueryWorkers(_FilteredQuery):
    status_in: list[Literal["idle", "busy", "unknown"]] | None = None
    worker_id_contains: str | None = None


class _QueryResources(_Query):
    resources_id: str | None = None
    resources_id_contains: str | None = None


class _QuerySpans(_FilteredQuery):
    rollout_id: str
    attempt_id: str | None = None
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None


class _UnreadableError(Exception):
    """The body cannot be read; with the status and the reason."""


class _BadRequestError(Exception):
    """The request can never be served."""


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address for :func:`serve`; port 0 takes any free port. Raises :class:`StoreAddressError`."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use: stop the server there, or give another --port"
        else:
            message = f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}"
        raise StoreAddressError(message) from error
    return listener


@asynccontextmanager
async def serve(store: Any, listener: socket.socket, *, token: str) -> AsyncIterator[str]:
    """Serve ``store`` to clients with ``token``, on the running event loop and the socket of :func:`bind`.

    Yields the server's URL.
    """
    runner = make_runner(application(store, token), shutdown_timeout=_SHUTDOWN_S)
    with listener:
        await runner.setup()
        try:
            await web.SockSite(runner, listener, backlog=_BACKLOG).start()
            host, port = listener.getsockname()[:2]
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            await runner.cleanup()


def application(store: Any, token: str) -> web.Application:
    """The API over ``store``, for one event loop. All requests but the health check need ``token``.

    ``store`` is a :class:`.lightning_store.LightningStore`, or has its methods, as Agent Lightning's stores have.
    """
    guard = Guard(token=token, public=[f"{API}/health"], protobuf=[_TRACES])
    app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[middleware(guard), _report_unreadable])
    app.router.add_post(_TRACES, _otlp_handler(store))
    endpoints = {route: _endpoint(store, route) for route in _ROUTES}
    for route, endpoint in endpoints.items():
        method, path = route.split()
        app.router.add_route(method, API + path, _handler(endpoint))
    app.router.add_post(f"{API}/batch", _batch_handler(endpoints))
    app.router.add_route("*", "/{path:.*}", _not_found)
    return app


def _with_fields(method: str) -> _Call:
    """Call the store's method with the fields that the request sets."""

    async def call(store: Any, path: _PathParameters, body: Any) -> Any:
        fields = {name: getattr(body, name) for name in body.model_fields_set} if body is not None else {}
        if method in FIELDS:
            _check_query(fields, FIELDS[method])
            limit = fields.get("limit", -1)
            fields["limit"] = _MAX_PAGE if limit == -1 else min(limit, _MAX_PAGE)
        if method.startswith("update"):
            for name in _NOT_NULL:
                if name in fields and fields[name] is None:
                    raise _BadRequestError(f"{name} is null; leave it out to keep its value")
        return await getattr(store, method)(**path, **fields)

    return call


def _with_body(method: str) -> _Call:
    """Call the store's method with the request's body as its last argument."""

    async def call(store: Any, path: _PathParameters, body: Any) -> Any:
        return await getattr(store, method)(*path.values(), body)

    return call


def _check_query(fields: Mapping[str, Any], names: Sequence[str]) -> None:
    if (sort := fields.get("sort_by")) is not None and sort not in names:
        raise _BadRequestError(f"sort_by is {sort!r}; allowed: {', '.join(names)}")
    if (limit := fields.get("limit", -1)) < 1 and limit != -1:
        raise _BadRequestError(f"limit is {limit}; it must be above 0, or -1 for no limit")
    if fields.get("offset", 0) < 0:
        raise _BadRequestError(f"offset is {fields['offset']}; it must not be negative")


async def _health(store: Any, path: _PathParameters, body: Any) -> Any:
    return HEALTH


async def _enqueue(store: Any, path: _PathParameters, body: Any) -> Any:
    return list(await store.enqueue_many_rollouts(body.rollouts)) if body.rollouts else []


async def _dequeue(store: Any, path: _PathParameters, body: Any) -> Any:
    limit = min(body.limit, _MAX_PAGE)
    return list(await store.dequeue_many_rollouts(limit=limit, worker_id=body.worker_id)) if limit > 0 else []


async def _add_span(store: Any, path: _PathParameters, body: Any) -> Any:
    return body if await store.add_many_spans([body.model_dump()]) else None  # None: it is there already


async def _add_spans(store: Any, path: _PathParameters, body: Any) -> Any:
    intake = SpanIntake(store)
    await intake.add_json(body)
    if intake.refused:
        raise _BadRequestError(intake.message())
    return intake.new_ids  # the client has the rest


async def _next_sequence_id(store: Any, path: _PathParameters, body: Any) -> Any:
    [number] = await store.get_many_span_sequence_ids([(body.rollout_id, body.attempt_id)])
    return {"sequence_id": number}


async def _put_resources(store: Any, path: _PathParameters, body: Any) -> Any:
    resources = {name: resource.model_dump() for name, resource in body.items()}
    return await (store.update_resources(*path.values(), resources) if path else store.add_resources(resources))


_ROLLOUT, _ATTEMPTS = "/rollouts/{rollout_id}", "/rollouts/{rollout_id}/attempts"
_ROUTES: dict[str, tuple[int, Any, _Call]] = {
    "GET /health": (200, None, _health),
    "POST /queues/rollouts/enqueue": (201, _Enqueue, _enqueue),
    "POST /queues/rollouts/dequeue": (200, _Dequeue, _dequeue),
    "POST /rollouts": (201, _Start, _with_fields("start_rollout")),
    "GET /rollouts": (200, _QueryRollouts, _with_fields("query_rollouts")),
    "POST /rollouts/search": (200, _QueryRollouts, _with_fields("query_rollouts")),
    f"GET {_ROLLOUT}": (200, None, _with_fields("get_rollout_by_id")),
    f"POST {_ROLLOUT}": (200, _UpdateRollout, _with_fields("update_rollout")),
    f"GET {_ATTEMPTS}": (200, _Query, _with_fields("query_attempts")),
    f"POST {_ATTEMPTS}": (201, _Worker, _with_fields("start_attempt")),
    f"POST {_ATTEMPTS}/search": (200, _Query, _with_fields("query_attempts")),
    f"GET {_ATTEMPTS}/latest": (200, None, _with_fields("get_latest_attempt")),
    f"POST {_ATTEMPTS}/{{attempt_id}}": (200, _UpdateAttempt, _with_fields("update_attempt")),
    "GET /workers": (200, _QueryWorkers, _with_fields("query_workers")),
    "POST /workers/search": (200, _QueryWorkers, _with_fields("query_workers")),
    "GET /workers/{worker_id}": (200, None, _with_fields("get_worker_by_id")),
    "POST /workers/{worker_id}": (200, _UpdateWorker, _with_fields("update_worker")),
    "GET /statistics": (200, None, _with_fields("statistics")),
    "GET /resources": (200, _QueryResources, _with_fields("query_resources")),
    "POST /resources": (201, dict[str, _Resource], _put_resources),
    "GET /resources/latest": (200, None, _with_fields("get_latest_resources")),
    "GET /resources/{resources_id}": (200, None, _with_fields("get_resources_by_id")),
    "POST /resources/{resources_id}": (200, dict[str, _Resource], _put_resources),
    "GET /spans": (200, _QuerySpans, _with_fields("query_spans")),
    "POST /spans": (201, SpanFields, _add_span),
    "POST /spans/batch": (201, _Items[Any], _add_spans),
    "POST /spans/search": (200, _QuerySpans, _with_fields("query_spans")),
    "POST /spans/next": (200, _Next, _next_sequence_id),
    "POST /spans/next/batch": (200, _Items[tuple[str, str]], _with_body("get_many_span_sequence_ids")),
    "POST /waits/rollouts": (200, _Wait, _with_fields("wait_for_rollouts")),
}


def _endpoint(store: Any, route: str) -> _Endpoint:
    """A function from a request's path parameters, query and body to the status and JSON body of the response."""
    success, model, call = _ROUTES[route]
    adapter = None if model is None else pydantic.TypeAdapter(model)

    async def respond(path: _PathParameters, query: Any, body: bytes) -> tuple[int, bytes]:
        try:
            # The thread leaves the event loop to other clients, for most of the time.
            parse = functools.partial(_parse_request, adapter, path, query, body, check=call is not _add_spans)
            request = await asyncio.to_thread(parse) if len(body) > _LARGE_BYTES else parse()
            return success, pydantic_core.to_json(await call(store, path, request))
        except pydantic.ValidationError as error:
            status, detail = 422, first_problem(error)
        except (_BadRequestError, RefusedValueError) as error:
            status, detail = 400, str(error)
        except ValueError as error:  # raised by the stores for an unknown rollout or attempt
            status, detail = 404, str(error)
        except sqlite3.Error as error:
            _log.error("%s: %s", route, error)
            return 503, _file_error_body(error)
        except Exception as error:  # it must not affect the other requests of a batch
            _log.exception(route)
            status, detail = 500, f"the store failed: {error!r}"
        return status, _error_body(detail)

    return respond


def _handler(endpoint: _Endpoint) -> Any:
    async def handle(request: web.Request) -> web.Response:
        query, body = request.query if request.method == "GET" else None, await _read(request)
        return _json_response(*await endpoint(request.match_info, query, body))

    return handle


def _is_list(model: Any) -> bool:
    """A batch of lists would hold up all other clients, and its answer would have no limit."""
    return isinstance(model, type) and issubclass(model, (_Query, _Wait))


def _batch_handler(endpoints: Mapping[str, _Endpoint]) -> Any:
    """Requests as ``[method, path, body]``, responses as ``[status, body]``; the bodies are JSON text."""
    adapter = pydantic.TypeAdapter(Annotated[list[tuple[str, str, str]], pydantic.Field(max_length=_MAX_BATCH)])
    routes = [
        (re.compile(route.replace("{", "(?P<").replace("}", ">[^/]+)")), endpoint)
        for route, endpoint in endpoints.items()
        if not _is_list(_ROUTES[route][1])
    ]

    async def respond(method: str, path: str, body: str) -> tuple[int, str]:
        status, response = 404, _error_body(_no_route(method, path))
        for pattern, endpoint in routes:
            if found := pattern.fullmatch(f"{method} {path}"):
                query: Any = {} if method == "GET" else None
                status, response = await endpoint(found.groupdict(), query, body.encode())
                break
        return status, response.decode()

    async def handle(request: web.Request) -> web.Response:
        try:
            requests = adapter.validate_json(await _read(request))
        except pydantic.ValidationError as error:
            return _error_response(422, first_problem(error))
        responses = []
        for each in requests:
            responses.append(await respond(*each))
            await asyncio.sleep(0)  # other clients are served in between
        return _json_response(200, pydantic_core.to_json(responses))

    return handle


def _parse_request(
    adapter: pydantic.TypeAdapter[Any] | None, path: _PathParameters, query: Any, body: bytes, *, check: bool
) -> Any:
    request = None
    if adapter is not None and query is not None:
        request = adapter.validate_python(
            {name: query.getall(name) if name in _LIST_PARAMETERS else query[name] for name in query}
        )
    elif adapter is not None:
        check_json_size(body)
        request = adapter.validate_json(b"{}" if body in (b"", b"null") else body)
    if check:  # the spans of a list are checked one by one
        check_request(path, request)
    return request


def _json_response(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _error_body(detail: str, **fields: str) -> bytes:
    return pydantic_core.to_json({"detail": detail, **fields})


def _file_error_body(error: sqlite3.Error) -> bytes:
    """The client may repeat the request after an error of the disk, but not after one of a damaged file."""
    detail = f"the store's file: {error!s:.200}"
    if isinstance(error, sqlite3.OperationalError) and not str(error).startswith("Could not decode"):
        return _error_body(detail)
    return _error_body(f"{detail}; start the store with a copy of the file, or with a new one", error_type=DAMAGED)


def _error_response(status: int, detail: str) -> web.Response:
    return _json_response(status, _error_body(detail))


@web.middleware
async def _report_unreadable(request: web.Request, handler: Any) -> Any:
    try:
        return await handler(request)
    except _UnreadableError as error:
        return _error_response(*error.args)


async def _not_found(request: web.Request) -> web.Response:
    return _error_response(404, _no_route(request.method, request.path))


def _no_route(method: str, path: str) -> str:
    return f"no {method} {path} here: this is a Lightning store with the API of agentlightning 0.3"


def _otlp_handler(store: Any) -> Any:
    """OTLP over HTTP, as the OpenTelemetry exporter of Agent Lightning's tracer sends it."""

    async def handle(request: web.Request) -> web.Response:
        if request.content_type != _PROTOBUF:
            return _error_response(400, f"the body is {request.content_type}; it must be {_PROTOBUF}")
        body, message, intake = await _read(request, _ENCODINGS), ExportTraceServiceRequest(), SpanIntake(store)
        try:
            message.ParseFromString(decompress(body) if _ENCODING in request.headers else body)
            await intake.add_otlp(message)
        except (ValueError, zlib.error, DecodeError) as error:
            return _error_response(400, f"the spans were refused: {error}")
        except sqlite3.Error as error:
            _log.error("%s: %s", _TRACES, error)
            return _json_response(503, _file_error_body(error))
        if intake.refused and not intake.stored:
            return _error_response(400, intake.message())
        response = ExportTraceServiceResponse()
        if intake.refused:  # the exporter must not repeat the request
            response.partial_success.rejected_spans = intake.refused
            response.partial_success.error_message = intake.message()
        return web.Response(body=response.SerializeToString(), content_type=_PROTOBUF)

    return handle


async def _read(request: web.Request, encodings: Sequence[str] = ("identity",)) -> bytes:
    """The body, still compressed. Raises :class:`_UnreadableError`."""
    encoding = request.headers.get(_ENCODING, "identity").lower()
    status, reason = 415, f"{_ENCODING} is {encoding!r:.60}; supported: {', '.join(encodings)}"
    if encoding in encodings:
        try:
            read = request.read()
            return await (read if request.content.is_eof() else asyncio.wait_for(read, _BODY_S))
        except web.HTTPRequestEntityTooLarge:
            status, reason = 413, f"the request has more than {MAX_REQUEST_BYTES >> 20} MiB"
        except asyncio.TimeoutError:
            status, reason = 408, f"the request was not complete after {_BODY_S:g} s"
    raise _UnreadableError(status, reason)
