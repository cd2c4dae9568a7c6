"""Serves a store over the HTTP API of Agent Lightning's store server (0.3).

Agent Lightning's ``LightningStoreClient`` and the OTLP exporter work unchanged. ``/batch`` takes any requests. One that
would fail again has a 4xx status, so clients do not repeat it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sqlite3
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pydantic
import pydantic_core
from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from groundwire.tools.http.guard import Guard, middleware
from groundwire.tools.http.listening import BACKLOG, listen, listen_problem
from groundwire.tools.http.server import Runner
from groundwire.train.store.errors import DAMAGED, StoreAddressError
from groundwire.train.store.health import API
from groundwire.train.store.intake import spans_of, store_spans
from groundwire.train.store.limits import MAX_REQUEST_BYTES, BadRequestError, Id, check_json_size, decompress, problem
from groundwire.train.store.routes import NOT_BATCHED, ROUTES, PathParameters

_log = logging.getLogger(__name__)
_SHUTDOWN_S = 2.0
_MAX_BATCH = 64  # requests in one; our client sends 32
_TRACES = "/v1/traces"
_PROTOBUF = "application/x-protobuf"
_ENCODING = "Content-Encoding"
_BODY_S = 60.0
_LIST_PARAMETERS = ("status_in", "rollout_id_in")

_Endpoint = Callable[[PathParameters, Any, bytes], Awaitable[tuple[int, bytes]]]


def bind(host: str, port: int) -> socket.socket:
    """Listen at an address, for :func:`serve`; port 0 takes any free port. Raises :class:`StoreAddressError`."""
    try:
        return listen(host, port)
    except OSError as error:
        raise StoreAddressError(listen_problem(host, port, error, "give another --port or --host")) from error


@asynccontextmanager
async def serve(store: Any, listener: socket.socket, *, token: str) -> AsyncIterator[str]:
    """Serve ``store`` on the running event loop and the socket of :func:`bind`; yields the server's URL."""
    runner = Runner(application(store, token), shutdown_timeout=_SHUTDOWN_S)
    with listener:
        await runner.setup()
        try:
            await web.SockSite(runner, listener, backlog=BACKLOG).start()
            host, port = listener.getsockname()[:2]
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            await runner.cleanup()


def application(store: Any, token: str) -> web.Application:
    """The API over ``store``, for one event loop. All requests but the health check need ``token``.

    ``store`` is a :class:`.lightning_store.LightningStore`, or has its methods, as Agent Lightning's stores have.
    """
    guard = Guard(token=token, public=[f"{API}/health"], protobuf=[_TRACES])
    app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[middleware(guard), _answer_errors])
    app.router.add_post(_TRACES, _otlp_handler(store))
    endpoints = {route: _endpoint(store, route) for route in ROUTES}
    for route, endpoint in endpoints.items():
        method, path = route.split()
        app.router.add_route(method, API + path, _handler(endpoint))
    app.router.add_post(f"{API}/batch", _batch_handler(endpoints))
    app.router.add_route("*", "/{path:.*}", _not_found)
    return app


@web.middleware
async def _answer_errors(request: web.Request, handler: Any) -> Any:
    try:
        return await handler(request)
    except (web.HTTPException, web.RequestPayloadError, ConnectionError):
        raise
    except Exception as error:
        return _json(*_failure(f"{request.method} {request.path}", error))


def _failure(request: str, error: Exception) -> tuple[int, bytes]:
    """The status and the body of the response to a request that failed.

    The client may repeat it after an error of the disk, but not after one of a damaged file.
    """
    status, detail, fields = 500, problem(error), {}
    if isinstance(error, pydantic.ValidationError):
        status = 422
    elif isinstance(error, BadRequestError):
        status = error.status
    elif isinstance(error, ValueError):  # raised by the stores for an unknown rollout or attempt
        status = 404
    elif isinstance(error, sqlite3.Error):
        _log.error("%s: %s", request, error)
        status, detail = 503, f"the store's file: {error!s:.200}"
        if not isinstance(error, sqlite3.OperationalError) or detail.startswith("the store's file: Could not decode"):
            detail += "; start the store with a copy of the file, or with a new one"
            fields = {"error_type": DAMAGED}
    else:
        _log.error("%s", request, exc_info=error)
        detail = f"the store failed: {error!r}"
    return status, pydantic_core.to_json({"detail": detail, **fields})


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _endpoint(store: Any, route: str) -> _Endpoint:
    """A function from a request's path parameters, query and body to the status and JSON body of the response."""
    success, model, call = ROUTES[route]
    adapter = None if model is None else pydantic.TypeAdapter(model)
    ids = pydantic.TypeAdapter(dict[str, Id])

    async def respond(path: PathParameters, query: Any, body: bytes) -> tuple[int, bytes]:
        path, request = ids.validate_python({**path}), None
        if adapter is not None and query is not None:
            lists = {name: query.getall(name) for name in _LIST_PARAMETERS if name in query}
            request = adapter.validate_python({**query, **lists})
        elif adapter is not None:
            check_json_size(body)
            request = adapter.validate_json(b"{}" if body in (b"", b"null") else body)
        return success, pydantic_core.to_json(await call(store, path, request))

    return respond


def _handler(endpoint: _Endpoint) -> Any:
    async def handle(request: web.Request) -> web.Response:
        query, body = request.query if request.method == "GET" else None, await _read(request)
        return _json(*await endpoint(request.match_info, query, body))

    return handle


def _batch_handler(endpoints: Mapping[str, _Endpoint]) -> Any:
    """Requests as ``[method, path, body]``, responses as ``[status, body]``; the bodies are JSON text."""
    adapter = pydantic.TypeAdapter(Annotated[list[tuple[str, str, str]], pydantic.Field(max_length=_MAX_BATCH)])
    routes = [
        (re.compile(route.replace("{", "(?P<").replace("}", ">[^/]+)")), endpoint)
        for route, endpoint in endpoints.items()
        if route not in NOT_BATCHED
    ]

    async def respond(method: str, path: str, body: str) -> tuple[int, bytes]:
        for pattern, endpoint in routes:
            if match := pattern.fullmatch(f"{method} {path}"):
                query: Any = {} if method == "GET" else None
                return await endpoint(match.groupdict(), query, body.encode())
        raise _no_route(method, path)

    async def handle(request: web.Request) -> web.Response:
        responses = []
        for method, path, body in adapter.validate_json(await _read(request)):
            try:
                status, response = await respond(method, path, body)
            except Exception as error:  # it must not affect the other requests
                status, response = _failure(f"{method} {path}", error)
            responses.append((status, response.decode()))
            await asyncio.sleep(0)  # other clients are served in between
        return _json(200, pydantic_core.to_json(responses))

    return handle


async def _not_found(request: web.Request) -> web.Response:
    raise _no_route(request.method, request.path)


def _no_route(method: str, path: str) -> BadRequestError:
    return BadRequestError(
        f"no {method} {path} here: this is a Lightning store with the API of agentlightning 0.3", 404
    )


def _otlp_handler(store: Any) -> Any:
    """OTLP over HTTP, as the OpenTelemetry exporter of Agent Lightning's tracer sends it."""

    async def handle(request: web.Request) -> web.Response:
        if request.content_type != _PROTOBUF:
            raise BadRequestError(f"the body is {request.content_type}; it must be {_PROTOBUF}")
        body, message = await _read(request, ("identity", "gzip", "deflate")), ExportTraceServiceRequest()
        try:
            message.ParseFromString(decompress(body) if _ENCODING in request.headers else body)
            stored, refused, reason = await store_spans(store, spans_of(message))
        except (ValueError, zlib.error, DecodeError) as error:
            raise BadRequestError(f"the spans were refused: {error}") from error
        if refused and not stored:
            raise BadRequestError(reason)
        response = ExportTraceServiceResponse()
        if refused:  # the exporter must not repeat the request
            response.partial_success.rejected_spans = refused
            response.partial_success.error_message = reason
        return web.Response(body=response.SerializeToString(), content_type=_PROTOBUF)

    return handle


async def _read(request: web.Request, encodings: Sequence[str] = ("identity",)) -> bytes:
    """The body, still compressed."""
    encoding = request.headers.get(_ENCODING, "identity").lower()
    if encoding not in encodings:
        raise BadRequestError(f"{_ENCODING} is {encoding!r:.60}; supported: {', '.join(encodings)}", 415)
    try:
        read = request.read()
        return await (read if request.content.is_eof() else asyncio.wait_for(read, _BODY_S))
    except web.HTTPRequestEntityTooLarge:
        raise BadRequestError(f"the request has more than {MAX_REQUEST_BYTES >> 20} MiB", 413) from None
    except asyncio.TimeoutError:
        raise BadRequestError(f"the request was not complete after {_BODY_S:g} s", 408) from None
