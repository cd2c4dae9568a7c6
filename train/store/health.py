"""Is there a Lightning store at this address? Asked with the standard library alone, before anything heavy is imported,
so that a wrong address is said within seconds."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from groundwire.train.store.errors import StoreAddressError

__all__ = ["API", "HEALTH", "check_store"]

API = "/v1/agl"
"""The path under which agentlightning 0.3 has its API."""
HEALTH = {"status": "ok", "api": "agentlightning 0.3", "batches": True}
"""What our own store says of itself; Agent Lightning's says the first."""
_ANSWER_BYTES = 4096
_AGAIN_S = 0.1


def check_store(address: str, *, timeout_s: float = 3.0, starting: bool = True) -> dict[str, Any]:
    """What the store at ``address`` says of its health; one that may just be ``starting`` is waited for.

    Raises :class:`StoreAddressError`, within about ``timeout_s`` seconds.
    """
    parts = _parts(address)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _checked(address, timeout_s)
        except OSError as error:
            refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
            if starting and refused and time.monotonic() < deadline:
                time.sleep(_AGAIN_S)
                continue
            why = _reason(error, timeout_s)
            start = f"python -m train.store --path FILE --port {parts.port or 4747}"
            raise StoreAddressError(f"no store answers at {address} ({why}); start one with: {start}") from error


def _checked(address: str, timeout_s: float) -> dict[str, Any]:
    try:
        health = _ask(f"{address.rstrip('/')}{API}/health", None, timeout_s)
        if not isinstance(health, dict) or health.get("status") != "ok":
            raise StoreAddressError(f"what answers at {address} is no Lightning store: its health is {health!r:.60}")
        # Taking nothing from the queue changes nothing, and only 0.3 knows how.
        if _ask(f"{address.rstrip('/')}{API}/queues/rollouts/dequeue", {"limit": 0}, timeout_s) != []:
            raise StoreAddressError(
                f"the store at {address} is not one of agentlightning 0.3, whose API is spoken here"
            )
    except urllib.error.HTTPError as error:
        health_path = error.url.endswith("/health")
        what = "no Lightning store" if health_path else "a Lightning store of another version than agentlightning 0.3"
        raise StoreAddressError(f"what answers at {address} is {what} ({error.code} for {error.url})") from error
    except ValueError as error:
        raise StoreAddressError(f"what answers at {address} is no Lightning store: it does not speak JSON") from error
    return health


def _parts(address: str) -> Any:
    parts = urlsplit(address)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, or too large
        usable = False
    if not usable:
        raise StoreAddressError(f"the store's address {address!r} is not like http://HOST:PORT")
    return parts


def _ask(url: str, body: Any, timeout_s: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})  # noqa: S310
    # A proxy of the environment is for the world outside, not for the machine next door.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as answer:
        return json.loads(answer.read(_ANSWER_BYTES))


def _reason(error: OSError, timeout_s: float) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, (TimeoutError, socket.timeout)):
        return f"silent for {timeout_s:g} s"
    if isinstance(reason, socket.gaierror):
        return "the host is not known"
    return str(getattr(reason, "strerror", None) or reason).lower()
