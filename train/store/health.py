"""Checks the address of a Lightning store within seconds, before anything heavy is imported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from groundwire.tools.http.access_token import VARIABLE, token_for
from groundwire.train.store.errors import StoreAddressError

if TYPE_CHECKING:
    import httpx


API = "/v1/agl"
"""The path prefix of agentlightning 0.3's API."""
HEALTH = {"status": "ok", "api": "agentlightning 0.3", "batches": True}
"""The health report of our store. Agent Lightning's own store reports only the status."""
_RETRY_S, _QUIET_S, _REQUEST_S = 0.1, 1.0, 3.0


def check_store(
    address: str,
    *,
    token: str | None = None,
    timeout_s: float = 3.0,
    starting: bool = True,
    on_wait: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the health report of the store at ``address``.

    While ``starting``, a refused or interrupted connection is retried for ``timeout_s`` seconds: the store may start
    later or be restarting. ``on_wait`` gets a line about it after a second. Without a ``token``, that of the
    environment or the user is sent. Raises :class:`StoreAddressError`.
    """
    import httpx

    try:
        url = httpx.URL(address)
        valid = url.scheme in ("http", "https") and url.host and (url.port is None or 0 < url.port < 1 << 16)
    except httpx.InvalidURL:
        valid = False
    if not valid:
        raise StoreAddressError(f"the store's address {address!r} is not like http://HOST:PORT")
    if url.userinfo:
        raise StoreAddressError(
            f"the store's address contains a password: give http://{url.netloc.decode()}, and the token in {VARIABLE} "
            "or with --token-file"
        )
    token = token or token_for(address)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    began, request_s, told = time.monotonic(), min(timeout_s or _REQUEST_S, _REQUEST_S), False
    deadline = began + timeout_s
    # Proxies named in the environment are not meant for machines of the local network.
    base_url = address.rstrip("/") + API
    with httpx.Client(base_url=base_url, headers=headers, timeout=request_s, trust_env=False) as client:
        while True:
            try:
                return _read_health(client, address)
            except httpx.TransportError as error:
                refused = isinstance(error, httpx.ConnectError) and "refused" in str(error)
                interrupted = isinstance(error, (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError))
                if starting and (refused or interrupted) and time.monotonic() < deadline:
                    if not told and time.monotonic() - began > _QUIET_S:
                        told = True
                        on_wait(f"waiting up to {timeout_s:g} s for the store at {address}")
                    time.sleep(_RETRY_S)
                    continue
                reason = str(error).rpartition("] ")[2].lower() or type(error).__name__  # without [Errno N]
                if isinstance(error, httpx.TimeoutException):
                    reason = f"no answer within {request_s:g} s"
                start = f"groundwire store --path FILE --port {url.port or 4747}"
                raise StoreAddressError(f"no store answers at {address} ({reason}); start one with: {start}") from error


def _read_health(client: httpx.Client, address: str) -> dict[str, Any]:
    no_store = f"the server at {address} is not a Lightning store"
    other_version = f"the store at {address} does not have the API of agentlightning 0.3"
    reply = client.get("/health")
    if not reply.is_success:
        raise StoreAddressError(f"{no_store}: status {reply.status_code} for {reply.url}")
    try:
        health = reply.json()
    except ValueError as error:
        raise StoreAddressError(f"{no_store}: {reply.url} is not JSON") from error
    if not isinstance(health, dict) or health.get("status") != "ok":
        raise StoreAddressError(f"{no_store}: its health is {health!r:.60}")
    # To take zero rollouts from the queue changes nothing, and only version 0.3 knows this request.
    reply = client.post("/queues/rollouts/dequeue", json={"limit": 0})
    if reply.status_code in (401, 403):
        raise StoreAddressError(
            f"the store at {address} refuses the token: set {VARIABLE}, or give --token-file, as for the store"
        )
    if not reply.is_success or reply.text != "[]":
        raise StoreAddressError(f"{other_version}: status {reply.status_code} for {reply.url}")
    return health
