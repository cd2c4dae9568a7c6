"""Serves the report of an active run to this machine only, and rebuilds it when the run has new results.

The page polls the state of the run, and reloads itself when it changes. The open rollout is in the page's address, so
it stays open.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from groundwire.tools.errors import CommandError
from groundwire.tools.http.server import HttpServer
from groundwire.tools.secrets import mask_secrets
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.report.build import build
from groundwire.train.rollouts.event_loop import EventLoopThread

_POLL_MS = 3000
_NOT_CACHED = {"Cache-Control": "no-store"}
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


class LiveReport(HttpServer):
    """The page of the run's current state, built on request and then cached."""

    def __init__(self, run: RunDir, *, port: int = 0) -> None:
        super().__init__(port=port)
        self._run, self._lock = run, threading.Lock()
        self._shown, self._html = "", ""

    def application(self) -> web.Application:
        """The page, and the state that it polls."""
        app = web.Application()
        app.router.add_get("/", self._send_page)
        app.router.add_get("/state", self._send_state)
        return app

    def _state(self) -> str:
        """A hash of the names, sizes and times of the run's files."""
        files = [self._run.path / "metrics.jsonl", *sorted((self._run.path / "rollouts").glob("step-*.parquet"))]
        digest = hashlib.blake2b(digest_size=8)
        for file in files:
            with suppress(OSError):  # a resumed run may delete it meanwhile
                status = file.stat()
                digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def _build(self) -> str:
        with self._lock:
            state = self._state()
            if state != self._shown:
                self._html = build(self._run, live=_RELOAD_SCRIPT % (state, _POLL_MS)).html
                self._shown = state
            return self._html

    async def _send_state(self, request: web.Request) -> web.Response:
        return web.Response(text=self._state(), headers=_NOT_CACHED)

    async def _send_page(self, request: web.Request) -> web.Response:
        try:
            html = await asyncio.to_thread(self._build)
        except RunDirError as error:
            return web.Response(status=500, text=mask_secrets(str(error)), headers=_NOT_CACHED)
        return web.Response(text=html, content_type="text/html", headers=_NOT_CACHED)


@contextmanager
def served(run: RunDir, *, port: int = 0) -> Iterator[str]:
    """Serve the report of ``run`` in a thread during the block; yields its address."""
    report, loop = LiveReport(run, port=port), EventLoopThread(asyncio.new_event_loop(), max_blocked_s=float("inf"))
    loop.start()
    try:
        try:
            loop.call(report.start())
        except OSError as error:
            raise CommandError(f"{error.strerror or error} (--port {port})", 1) from error
        yield f"{report.url}/"
    finally:
        loop.stop(report.stop())
