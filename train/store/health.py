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
STORE_WAIT_S = 120.0
"""How long a start waits for its store, over all of its checks."""
_RETRY_S, _QUIET_S, _REQUEST_S = 0.1, 1.0, 3.0
_AWAY = (502, 503, 504)


def check_store(
    address: str,
    *,
    token: str | None = None,
    timeout_s: float = 3.0,
    on_wait: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the health report of the store at ``address``.

    While no answer comes, or one of a gateway whose store is away, it is asked again for ``timeout_s`` seconds: the
    store may start later or be restarting. ``on_wait`` gets a line about it after a second. Without a ``token``, that
    of the environment or the user is sent. Raises :class:`StoreAddressError`.
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
    began, request_s, has_told = time.monotonic(), min(timeout_s or _REQUEST_S, _REQUEST_S), False
    # Proxies named in the environment are not meant for machines of the local network.
    base_url = address.rstrip("/") + API
    with httpx.Client(base_url=base_url, headers=headers, timeout=request_s, trust_env=False) as client:
        while True:
            try:
                return _read_health(client, address)
            except httpx.TransportError as error:
                reason = str(error).rpartition("] ")[2].lower() or type(error).__name__  # without [Errno N]
                if isinstance(error, httpx.TimeoutException):
                    reason = f"no answer within {request_s:g} s"
                waited_s = time.monotonic() - began
                if waited_s >= timeout_s:
                    start = f"groundwire store --path FILE --port {url.port or 4747}"
                    message = f"no store answers at {address} ({reason}); start one with: {start}"
                    raise StoreAddressError(message) from error
            if waited_s > _QUIET_S and not has_told:
                has_told = True
                on_wait(f"waiting up to {timeout_s:g} s for the store at {address} ({reason})")
            time.sleep(_RETRY_S)


def _read_health(client: httpx.Client, address: str) -> dict[str, Any]:
    reply = client.get("/health")
    _check_gateway(reply)
    try:
        health = reply.json()
    except ValueError:
        health = None
    if not reply.is_success or not isinstance(health, dict) or health.get("status") != "ok":
        answer = f"status {reply.status_code} for {reply.url}: {reply.text!r:.60}"
        raise StoreAddressError(f"the server at {address} is not a Lightning store: {answer}")
    # To take zero rollouts from the queue changes nothing, and only version 0.3 knows this request.
    reply = client.post("/queues/rollouts/dequeue", json={"limit": 0})
    _check_gateway(reply)
    if reply.status_code in (401, 403):
        raise StoreAddressError(
            f"the store at {address} refuses the token: set {VARIABLE}, or give --token-file, as for the store"
        )
    if not reply.is_success or reply.text != "[]":
        answer = f"status {reply.status_code} for {reply.url}"
        raise StoreAddressError(f"the store at {address} does not have the API of agentlightning 0.3: {answer}")
    return health


def _check_gateway(reply: httpx.Response) -> None:
    """A gateway in front of a store that is away answers for it, and so does a store whose disk fails."""
    import httpx

    if reply.status_code in _AWAY:
        raise httpx.RemoteProtocolError(f"status {reply.status_code}: {reply.text!r:.100}")
