"""Serves the report of an active run to this machine only, and rebuilds it when the run has new results.

The page polls the state of the run, and reloads itself when it changes. The open rollout is in the page's address, so
it stays open.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from multidict import CIMultiDict

from groundwire.tools.errors import CommandError
from groundwire.tools.http.guard import Guard
from groundwire.tools.secrets import mask_secrets
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.report.build import build

_HOST = "127.0.0.1"
_POLL_MS = 3000
_IDLE_S = 30.0
_RELOAD_SCRIPT = """
const shown = %r;
const place = "scroll " + location.pathname;
addEventListener("beforeunload", () => sessionStorage.setItem(place, String(scrollY)));
addEventListener("load", () => setTimeout(() => scrollTo(0, Number(sessionStorage.getItem(place) || 0)), 300));
setInterval(async () => {
  try {
    const now = await (await fetch("state", { cache: "no-store" })).text();
    if (now !== shown) location.reload();
  } catch { /* the server has stopped: keep the page */ }
}, %d);
"""


class _LivePage:
    """The page of the run's current state, built on request and then cached."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._lock = run, threading.Lock()
        self._state, self._html = "", b""

    def state(self) -> str:
        """A hash of the names, sizes and times of the run's files."""
        files = [self._run.path / "metrics.jsonl", *sorted((self._run.path / "rollouts").glob("step-*.parquet"))]
        return hashlib.blake2b("\n".join(map(_file_state, files)).encode(), digest_size=8).hexdigest()

    def html(self) -> bytes:
        with self._lock:
            state = self.state()
            if state != self._state:
                report = build(self._run, live=_RELOAD_SCRIPT % (state, _POLL_MS))
                self._html, self._state = report.html.encode(), state
            return self._html


def _file_state(file: Path) -> str:
    try:
        status = file.stat()
    except OSError:
        return f"{file.name} -"
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Connections that wait. With the usual 5 the kernel drops others, and clients try again for up to minutes."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """As the base class does, but a client that leaves is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def make_server(run: RunDir, *, port: int = 0) -> ThreadingHTTPServer:
    """The server, not yet serving; its port is ``server_port``. Raises ``OSError`` if the port is in use."""
    page, guard = _LivePage(run), Guard()

    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_S  # of a connection that sends nothing

        def do_GET(self) -> None:
            refused = guard.refusal("GET", self.path, CIMultiDict(self.headers.items()))
            if refused is not None:
                self._send(refused[0], refused[1].encode(), "text/plain; charset=utf-8")
            elif self.path == "/state":
                self._send(200, page.state().encode(), "text/plain")
            elif self.path == "/":
                try:
                    self._send(200, page.html(), "text/html; charset=utf-8")
                except RunDirError as error:
                    self._send(500, mask_secrets(str(error)).encode(), "text/plain; charset=utf-8")
            else:
                self._send(404, b"there is only one page", "text/plain")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: each open page polls."""

    return _Server((_HOST, port), Handler)


def serve(run: RunDir, *, port: int) -> None:
    """Serve until Ctrl-C."""
    try:
        server = make_server(run, port=port)
    except OSError as error:
        raise CommandError(f"{error.strerror or error} (--port {port})", 1) from error
    with server, suppress(KeyboardInterrupt):
        print(f"http://{_HOST}:{server.server_port}/ (Ctrl-C stops it)", flush=True)
        server.serve_forever(poll_interval=0.2)
