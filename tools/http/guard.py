"""Decides which HTTP requests a server answers, from the headers alone, so that no web page can drive it.

A page that a user visits can send requests to servers of the user's machine. Browsers name the page's site (``Origin``,
``Sec-Fetch-Site``), send JSON to another site only after asking it, and send the host name of a page that points its
own name to this machine (DNS rebinding). Other users and machines are kept out by a token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from groundwire.tools.http.access_token import VARIABLE, token_place

if TYPE_CHECKING:
    from aiohttp import web

_READING = ("GET", "HEAD", "OPTIONS")
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_UNNAMED = ("", "application/octet-stream")


class Guard:
    """The rule for the requests of one server.

    Args:
        token: what clients send as ``Authorization: Bearer TOKEN``, as ``X-Api-Key`` or ``X-Goog-Api-Key`` (Anthropic's
            and Google's clients), or as password of ``http://x:TOKEN@HOST:PORT``. None: no route needs one.
        public: paths, or with a slash at the end beginnings of paths, that need no token.
        hosts: further names of this machine. IP addresses, ``localhost`` and the host name are always accepted, and a
            request with the token may use any name.
        protobuf: paths that also accept protobuf.
        variable: the environment variable of the token, for messages.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        public: Collection[str] = (),
        hosts: Collection[str] = (),
        protobuf: Collection[str] = (),
        variable: str = VARIABLE,
    ) -> None:
        self._variable = variable
        self._token = None if token is None else token.encode()
        self._public, self._protobuf = public, protobuf
        self._public_prefixes = tuple(path for path in public if path.endswith("/"))
        self._hosts = frozenset(name.lower() for name in (*hosts, "localhost", socket.gethostname()))
        self._is_own_host = lru_cache(maxsize=64)(self._find_host)

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """The status and the reason, if the request must be refused. ``headers`` are found by names in any case."""
        has_token, host = self._has_token(headers), headers.get("Host", "")
        origin = headers.get("Origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, f"refused: the page at {origin!r:.100} does not belong to this server"
        site = headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") and headers.get("Sec-Fetch-Mode") != "navigate":
            return 403, "refused: the request comes from a page of another site"
        if not has_token and not self._is_own_host(host):
            return 403, (
                f"refused: {host!r:.100} is no name of this machine; use its IP address, or send the token "
                f"({self._variable})"
            )
        if method not in _READING and (headers.get("Content-Length", "0") != "0" or headers.get("Transfer-Encoding")):
            kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
            # Some clients name no type, or that of bytes; web pages do not know the address of a rollout.
            is_known = (kind == _PROTOBUF and path in self._protobuf) or (
                kind in _UNNAMED and path.startswith(self._public_prefixes)
            )
            if kind != _JSON and not is_known:
                return 415, f"the request's content type is {kind!r:.100}; it must be {_JSON}"
        if self._token is None or has_token or path in self._public or path.startswith(self._public_prefixes):
            return None
        own = f"{token_place()}, or in the file of its --token-file"
        place = own if self._variable == VARIABLE else self._variable
        needed = "send 'Authorization: Bearer TOKEN' with the server's token"
        return 401, f"the request has no valid token: {needed}, which is in {place}"

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        if self._token is None:
            return False
        key, google_key, authorization = (
            headers.get(name, "").encode(errors="surrogateescape")
            for name in ("X-Api-Key", "X-Goog-Api-Key", "Authorization")
        )
        scheme, _, encoded = authorization.partition(b" ")
        password = b""
        if scheme.lower() == b"basic":
            with suppress(binascii.Error):
                password = base64.b64decode(encoded, validate=True).partition(b":")[2]
        sent = (
            (key, self._token),
            (google_key, self._token),
            (authorization, b"Bearer " + self._token),
            (password, self._token),
        )
        return any(value and hmac.compare_digest(value, wanted) for value, wanted in sent)

    def _find_host(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        with suppress(ValueError):
            return name.lower().rstrip(".") in self._hosts or bool(ipaddress.ip_address(name))
        return False


def middleware(guard: Guard) -> Any:
    """A middleware of aiohttp that refuses what ``guard`` refuses."""
    from aiohttp import web

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refused = guard.refusal(request.method, request.path, request.headers)
        if refused is None:
            return await handler(request)
        status, body, headers = _answer(*refused)
        return web.Response(status=status, body=body, headers=headers)

    return check


class AsgiGuard:
    """Refuses what ``guard`` refuses, before the ASGI application ``app`` sees it."""

    def __init__(self, app: Callable[..., Awaitable[None]], guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            from starlette.datastructures import Headers
            from starlette.responses import Response

            refused = self._guard.refusal(scope["method"], scope["path"], Headers(scope=scope))
            if refused is not None:
                status, body, headers = _answer(*refused)
                await Response(body, status, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _answer(status: int, reason: str) -> tuple[int, bytes, dict[str, str]]:
    # Clients of the store read "detail", those of OpenAI's API "error".
    error = {"message": reason, "type": "invalid_request_error", "code": None}
    headers = {"Content-Type": _JSON} | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})
    return status, json.dumps({"detail": reason, "error": error}).encode(), headers
