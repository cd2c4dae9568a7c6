"""An agent may have any name: it reaches the proxy through the headers of real clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import requests
from hypothesis import example, given, settings
from hypothesis import strategies as st

from groundwire.adapters import AGENT_HEADER, Endpoint
from groundwire.adapters.tracing.wire.request import calling_agent
from groundwire.tools.text import valid_text

HTTPX, REQUESTS = httpx.Client(trust_env=False), requests.Session()
REQUESTS.trust_env = False


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = calling_agent({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), max_size=300))
@example("Senior Software Engineer\n")
@example("客服")
@example("  \t ")
@example("a: b\r\nx-injected: 1\0\x7f\ud83d")
@example("n" * 1_000_000)
def test_a_name_arrives_without_spaces_around_it_and_cut(echo: str, name: str) -> None:
    headers = Endpoint(base_url="http://h/v1", model="m").agent_headers(name)
    usual = valid_text(name).strip()[:200].strip()
    for sent in (headers, {AGENT_HEADER: headers[AGENT_HEADER]}, {"baggage": headers["baggage"]}):
        assert HTTPX.post(echo, headers=sent).text == usual
    assert REQUESTS.post(echo, headers=headers).content.decode() == usual
