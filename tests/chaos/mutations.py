"""HTTP requests, and random changes of them: of JSON values, bytes, headers, paths, encodings and sizes."""

from __future__ import annotations

import copy
import gzip
import json
import random
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

__all__ = ["Request", "gzip_bomb", "mutate"]

_DEEP = 3000
_MAX_COPIED, _MAX_COPIES = 1_000_000, 20_000_000
"""Bytes of JSON that are repeated, before and after: or a few changes would make a request larger than the memory."""
_BOMB_MB = 2000
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**40, 0.1, 1e308, -0.0),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "\x00", "\ud800", "\u202e", "a\nb\r\nc", "\x1b[2J", "é" * 300, "../../etc/passwd", "%s%n", "{{7*7}}"),
    *("x" * 100_000, "latest", "null", "-1", "1e999", "' OR 1=1 --", "$.a", "[" * 500, "\ufeff", "NaN"),
    *([], {}, [[]], [None], {"": None}, [0] * 10_000, {"a": {"a": {"a": {}}}}, {str(n): n for n in range(1000)}),
)
_PATHS = (
    b"/..",
    b"/%2e%2e/%2e%2e/etc/passwd",
    b"/%00",
    b"/%0d%0aX-A:%20b",
    b"/%ff%fe",
    b"/" + b"a" * 9000,
    b"//",
    b"/%",
)
_QUERIES = (
    b"limit=-1",
    b"limit=1e9",
    b"offset=-1",
    b"sort_by=body",
    b"status_in=x",
    b"limit=" + b"9" * 30,
    b"a=%ff&=&&",
)
_HEADERS: tuple[tuple[str, str], ...] = (
    *(("Host", host) for host in ("evil.example", "", "localhost:1", "[::1]", "127.0.0.1.evil.example", "a" * 5000)),
    *(("Origin", origin) for origin in ("http://evil.example", "null", "http://localhost:1", "\xff")),
    *(("Content-Type", kind) for kind in ("text/plain", "", "application/json; charset=utf-16", "multipart/form-data")),
    *(("Content-Encoding", coding) for coding in ("gzip", "deflate", "br", "zstd", "identity", "gzip, gzip")),
    *(("Authorization", value) for value in ("", "Bearer", "Bearer x", "Basic eA==", "Basic \xff", "Digest a=b")),
    *(("X-Agent", name) for name in ("", "a" * 8000, "\xe9\xff", "%0a", "../..")),
    *(("Expect", "100-continue"), ("Upgrade", "websocket"), ("Accept", "text/html"), ("Range", "bytes=0-")),
    *(
        ("Cookie", "a=" + "b" * 7000),
        ("X-Forwarded-For", "1.2.3.4"),
        ("Accept-Encoding", "gzip;q=nan"),
        ("X", "y" * 20000),
    ),
)
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "G\x00T", "get", "X" * 500)


@dataclass(frozen=True)
class Request:
    """A request as it is sent. ``waits`` is true if no answer is due: it is incomplete, or asks the server to wait."""

    method: str
    path: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    """JSON, or bytes."""
    waits: bool = False

    def encode(self) -> bytes:
        """The bytes to send."""
        body = b"" if self.body is None else self.body if isinstance(self.body, bytes) else _dump(self.body)
        headers = {"Content-Length": str(len(body)), "Connection": "close", **self.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (
            self.method.encode("latin-1"),
            self.path,
            head.encode("latin-1", "replace"),
            body,
        )


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def mutate(request: Request, rng: random.Random) -> Request:
    """A copy with one to three changes."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        request = rng.choices((_json, _bytes, _headers, _path, _method, _framing), (12, 4, 4, 3, 1, 2))[0](request, rng)
    return request


def _json(request: Request, rng: random.Random) -> Request:
    """Change values of the body."""
    if request.body is None or isinstance(request.body, bytes):
        return _bytes(request, rng)
    if rng.random() < 0.05:
        return replace(request, body=_raw_json(request, rng))
    body = copy.deepcopy(request.body)
    for _ in range(rng.choice([1, 1, 2, 5])):
        places = list(_places(body))
        if not places:
            break
        parent, key = rng.choice(places)
        change = rng.randrange(10)
        if change < 6 or len(_dump(body)) > _MAX_COPIED:
            parent[key] = copy.deepcopy(rng.choice(_ODD))
        elif change == 6:
            del parent[key]
        elif change == 7:
            parent[key] = copy.deepcopy(rng.choice(places)[0])  # part of another place
        elif change == 8 and isinstance(parent, list):
            times = min(rng.choice([1, 50, 2000]), _MAX_COPIES // len(_dump(parent[key])))
            parent.extend(copy.deepcopy(parent[key]) for _ in range(times))
        else:
            parent[key] = [parent[key]]
    return replace(request, body=body)


def _raw_json(request: Request, rng: random.Random) -> bytes:
    """JSON that ``json.dumps`` does not write."""
    text = _dump(request.body)
    deep = rng.choice([100, 980, _DEEP, 100_000])
    return rng.choice(
        [
            b"[" * deep + b"]" * deep,
            b'{"a":' * deep + b"1" + b"}" * deep,
            text[:-1] + b"," + text[1:] if text[:1] == b"{" else text + text,  # each key twice
            text.decode().encode("utf-16"),
            b"\xef\xbb\xbf" + text,
            text.replace(b'"', b'"\\ud800', 1),
            b'{"a": 1' + b"0" * 100_000 + b"}",
            b" " * 1_000_000 + text,
        ]
    )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items)[:50]:
        yield value, key
        yield from _places(child)


def _bytes(request: Request, rng: random.Random) -> Request:
    """Change bytes of the body."""
    body = request.body if isinstance(request.body, bytes) else b"" if request.body is None else _dump(request.body)
    changed, place = bytearray(body), rng.randrange(len(body) + 1)
    change = rng.randrange(6)
    if change == 0:
        del changed[place:]
    elif change == 1:
        changed[place:place] = rng.randbytes(rng.choice([1, 4, 1000]))
    elif change == 2:
        changed = bytearray(rng.randbytes(rng.choice([0, 1, 100, 100_000])))
    elif change == 3 and changed:
        for _ in range(rng.choice([1, 10])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif change == 4:
        headers = {**request.headers, "Content-Encoding": "gzip"}
        damaged = bytearray(gzip.compress(bytes(body), mtime=0))
        if rng.random() < 0.5:
            del damaged[rng.randrange(len(damaged)) :]
        return replace(request, body=bytes(damaged), headers=headers)
    else:
        changed = bytearray(body * min(rng.choice([2, 30]), _MAX_COPIES // (len(body) + 1)))
    return replace(request, body=bytes(changed))


def _headers(request: Request, rng: random.Random) -> Request:
    name, value = rng.choice(_HEADERS)
    headers = {**request.headers, name: value}
    if rng.random() < 0.3:
        headers.pop(rng.choice(sorted(headers)))
    return replace(request, headers=headers, waits=request.waits or "100-continue" in headers.get("Expect", ""))


def _path(request: Request, rng: random.Random) -> Request:
    change = rng.randrange(4)
    parts = request.path.split(b"/")
    if change == 0:
        path = request.path + rng.choice(_PATHS)
    elif change == 1:
        path = request.path + b"?" + b"&".join(rng.choices(_QUERIES, k=rng.choice([1, 3])))
    elif change == 2:
        parts[rng.randrange(len(parts))] = rng.choice(
            [b"", b"%00", b"latest", b"%F0%9F%92%A9", b"a" * 3000, b"%0a", b"x"]
        )
        path = b"/".join(parts) or b"/"
    else:
        path = rng.choice([b"*", b"http://evil.example/", b"/" * 2000, b"x", b"/?" + b"a=1&" * 3000, b"/\xff"])
    return replace(request, path=path)


def _method(request: Request, rng: random.Random) -> Request:
    method = rng.choice(_METHODS)
    streams = method == "GET" and "event-stream" in request.headers.get("Accept", "")  # an answer without end
    return replace(request, method=method, waits=request.waits or streams)


def _framing(request: Request, rng: random.Random) -> Request:
    """Change what says where the body ends. The server may wait for the rest."""
    header = rng.choice(
        [
            ("Content-Length", str(rng.choice([0, 1, 10**6, -1, 10**30, "x", "1, 2"]))),
            ("Transfer-Encoding", rng.choice(["chunked", "gzip, chunked", "identity", "xchunked"])),
        ]
    )
    return replace(request, headers={**request.headers, header[0]: header[1]}, waits=True)


@cache
def gzip_bomb(megabytes: int = _BOMB_MB, start: bytes = b"[") -> bytes:
    """``start`` and spaces, compressed a thousand times. Each block is the same, so that it takes no time to make."""
    compressor, spaces = zlib.compressobj(9, wbits=-15), b" " * 1_000_000
    first = compressor.compress(start) + compressor.flush(zlib.Z_FULL_FLUSH)
    block = compressor.compress(spaces) + compressor.flush(zlib.Z_FULL_FLUSH)
    end, crc = compressor.flush(), zlib.crc32(start)
    for _ in range(megabytes):
        crc = zlib.crc32(spaces, crc)
    length = (megabytes * len(spaces) + len(start)) & 0xFFFFFFFF
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + first + block * megabytes + end + struct.pack("<II", crc, length)
