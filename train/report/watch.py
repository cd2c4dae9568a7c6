"""A run's report while it goes on: served to this machine only, and made again when the run has written something.

The page asks every few seconds which state of the run it shows, and loads itself again when there is a newer one. What
is open on it is in its address, so a reader is not thrown back.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.report.build import build

__all__ = ["make_server", "serve"]

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
_EVERY_MS = 3000
_RELOAD = """
const shown = %r;
const place = "scroll " + location.pathname;
addEventListener("beforeunload", () => sessionStorage.setItem(place, String(scrollY)));
addEventListener("load", () => setTimeout(() => scrollTo(0, Number(sessionStorage.getItem(place) || 0)), 300));
setInterval(async () => {
  try {
    const now = await (await fetch("state", { cache: "no-store" })).text();
    if (now !== shown) location.reload();
  } catch { /* the server has stopped: what is shown stays */ }
}, %d);
"""


class _Report:
    """The page of the run's newest state, made when it is asked for and then kept."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._lock = run, threading.Lock()
        self._state, self._html = "", b""

    def state(self) -> str:
        """A name for what the run's files are now."""
        files = [self._run.path / "metrics.jsonl", *sorted((self._run.path / "rollouts").glob("step-*.parquet"))]
        marks = [f"{file.name} {_mark(file)}" for file in files]
        return hashlib.blake2b("\n".join(marks).encode(), digest_size=8).hexdigest()

    def html(self) -> bytes:
        with self._lock:
            state = self.state()
            if state != self._state:
                live = _RELOAD % (state, _EVERY_MS)
                self._html, self._state = build(self._run, live=live).html.encode(), state
            return self._html


def _mark(file: Any) -> str:
    try:
        status = file.stat()
    except OSError:
        return "-"
    return f"{status.st_size} {status.st_mtime_ns}"


def make_server(run: RunDir, *, port: int = 0) -> ThreadingHTTPServer:
    """The server, not yet serving; ``server_port`` is where. Raises ``OSError`` where the port is taken."""
    report = _Report(run)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site's page may reach this port through a name of its own; it is not answered.
            if self.headers.get("Host", "").rpartition(":")[0] not in _NAMES:
                self._send(403, b"this page is for this machine only", "text/plain")
            elif self.path == "/state":
                self._send(200, report.state().encode(), "text/plain")
            elif self.path == "/":
                try:
                    self._send(200, report.html(), "text/html; charset=utf-8")
                except RunDirError as error:
                    self._send(500, str(error).encode(), "text/plain; charset=utf-8")
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
            """Nothing: each open page asks every few seconds."""

    server = ThreadingHTTPServer((_HOST, port), Handler)
    server.daemon_threads = True
    return server


def serve(run: RunDir, *, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C."""
    with make_server(run, port=port) as server:
        say(f"http://{_HOST}:{server.server_port}/ (Ctrl-C stops it)")
        server.serve_forever(poll_interval=0.2)
