"""Serves a store over the HTTP API of Agent Lightning's store server (0.3).

Agent Lightning's ``LightningStoreClient`` and the OTLP exporter work unchanged. ``/batch`` takes any requests. One that
would fail again has a 4xx status, so clients do not repeat it.
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
from groundwire.tools.http.server import Runner
from groundwire.train.store.errors import DAMAGED, StoreAddressError
from groundwire.train.store.health import API
from groundwire.train.store.intake import SpanIntake
from groundwire.train.store.limits import (
    MAX_REQUEST_BYTES,
    RefusedValueError,
    check_json_size,
    check_request,
    decompress,
    first_problem,
)
from groundwire.train.store.routes import CHECKS_ITEMS, NOT_BATCHED, ROUTES, PathParameters

_log = logging.getLogger(__name__)
_SHUTDOWN_S = 2.0
_MAX_BATCH = 64  # requests in one; our client sends 32
_BACKLOG = 1024  # a hundred runners connect at the same moment
_TRACES = "/v1/traces"
_PROTOBUF = "application/x-protobuf"
_ENCODING, _ENCODINGS = "Content-Encoding", ("identity", "gzip", "deflate")
_BODY_S = 60.0
_LARGE_BYTES = 256 << 10
_LIST_PARAMETERS = ("status_in", "rollout_id_in")

_Endpoint = Callable[[PathParameters, Any, bytes], Awaitable[tuple[int, bytes]]]


class _UnreadableError(web.HTTPException):
    """The body cannot be read."""

    def __init__(self, status: int, reason: str) -> None:
        self.status_code = status
        super().__init__(text=_error_body(reason).decode(), content_type="application/json")


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
    """Serve ``store`` on the running event loop and the socket of :func:`bind`; yields the server's URL."""
    runner = Runner(application(store, token), shutdown_timeout=_SHUTDOWN_S)
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
    app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[middleware(guard)])
    app.router.add_post(_TRACES, _otlp_handler(store))
    endpoints = {route: _endpoint(store, route) for route in ROUTES}
    for route, endpoint in endpoints.items():
        method, path = route.split()
        app.router.add_route(method, API + path, _handler(endpoint))
    app.router.add_post(f"{API}/batch", _batch_handler(endpoints))
    app.router.add_route("*", "/{path:.*}", _not_found)
    return app


def _endpoint(store: Any, route: str) -> _Endpoint:
    """A function from a request's path parameters, query and body to the status and JSON body of the response."""
    success, model, call = ROUTES[route]
    adapter = None if model is None else pydantic.TypeAdapter(model)

    async def respond(path: PathParameters, query: Any, body: bytes) -> tuple[int, bytes]:
        try:
            # The thread leaves the event loop to other clients, for most of the time.
            parse = functools.partial(_parse_request, adapter, path, query, body, check=route != CHECKS_ITEMS)
            request = await asyncio.to_thread(parse) if len(body) > _LARGE_BYTES else parse()
            return success, pydantic_core.to_json(await call(store, path, request))
        except pydantic.ValidationError as error:
            status, detail = 422, first_problem(error)
        except RefusedValueError as error:
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


def _batch_handler(endpoints: Mapping[str, _Endpoint]) -> Any:
    """Requests as ``[method, path, body]``, responses as ``[status, body]``; the bodies are JSON text."""
    adapter = pydantic.TypeAdapter(Annotated[list[tuple[str, str, str]], pydantic.Field(max_length=_MAX_BATCH)])
    routes = [
        (re.compile(route.replace("{", "(?P<").replace("}", ">[^/]+)")), endpoint)
        for route, endpoint in endpoints.items()
        if route not in NOT_BATCHED
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
        for request_of_batch in requests:
            responses.append(await respond(*request_of_batch))
            await asyncio.sleep(0)  # other clients are served in between
        return _json_response(200, pydantic_core.to_json(responses))

    return handle


def _parse_request(
    adapter: pydantic.TypeAdapter[Any] | None, path: PathParameters, query: Any, body: bytes, *, check: bool
) -> Any:
    request = None
    if adapter is not None and query is not None:
        lists = {name: query.getall(name) for name in _LIST_PARAMETERS if name in query}
        request = adapter.validate_python({**query, **lists})
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
