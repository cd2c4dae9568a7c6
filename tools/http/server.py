"""An aiohttp application with the life cycle that our servers share."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from groundwire.tools.http.access_token import check_listen, given_token
from groundwire.tools.http.guard import Guard, middleware
from groundwire.tools.http.listening import BACKLOG, connections_wait, listen

Server = TypeVar("Server", bound="HttpServer")
_KEEPALIVE_S = 75.0
_FIRST_REQUEST_S = 15.0  # a connection without a request is closed after this time
_log = logging.getLogger(__name__)


_log.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], (HttpProcessingError, ConnectionError)))
)


class Runner(web.AppRunner):
    """A runner with what all our servers need.

    Bodies are not decompressed: two megabytes can become gigabytes before a handler sees them. A request that is not
    HTTP, and a client that leaves, are not logged; aiohttp would log a traceback for each. Connections that have sent
    no request are closed; aiohttp closes those that send no further one.
    """

    def __init__(self, app: web.Application, **options: Any) -> None:
        options = {"keepalive_timeout": _KEEPALIVE_S, **options}
        super().__init__(app, access_log=None, auto_decompress=False, logger=_log, **options)
        self._waiting: set[Any] = set()  # the connections whose first request has not come
        app.middlewares.insert(0, self._note_use)

    async def setup(self) -> None:
        """Accept connections, each of which is closed unless a request comes in time."""
        await super().setup()
        server: Any = self.server
        connection_made = server.connection_made

        def connect(connection: Any, transport: Any) -> None:
            connection_made(connection, transport)
            self._waiting.add(connection)
            asyncio.get_running_loop().call_later(_FIRST_REQUEST_S, self._close_waiting, connection)

        server.connection_made = connect

    def _close_waiting(self, connection: Any) -> None:
        if connection in self._waiting:
            self._waiting.remove(connection)
            connection.force_close()

    @web.middleware
    async def _note_use(self, request: web.Request, handler: Any) -> Any:
        self._waiting.discard(request.protocol)
        response = await handler(request)
        if connections_wait():
            response.force_close()
        return response


class HttpServer(ABC):
    """Listens from :meth:`start` to :meth:`stop` on the running event loop; also an async context manager.

    ``port`` 0 takes any free port. Requests still running ``drain_timeout_s`` after :meth:`stop` are cancelled, and so
    is a request whose client disconnects. Without a ``token``, here or in the environment, only this machine is served.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, drain_timeout_s: float = 1.0, token: str | None = None
    ) -> None:
        self.host, self.port, self.drain_timeout_s = host, port, drain_timeout_s
        self.token = token or given_token()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its address without a path, such as ``http://127.0.0.1:43210``."""
        return f"http://{self.host}:{self.port}"

    @abstractmethod
    def application(self) -> web.Application:
        """The application to serve."""

    def guard(self) -> Guard:
        """Which requests are refused: here those of web pages."""
        return Guard(hosts=[self.host])

    async def start(self) -> None:
        """Listen; ``port`` is the real one afterwards. Raises ``OSError``, and :class:`TokenError` if it needs one."""
        check_listen(self.host, self.token)
        application = self.application()
        application.middlewares.insert(0, middleware(self.guard()))
        # aiohttp waits twice as long: for the reply, and, when no more of the request is read, for the handler.
        runner = Runner(application, handler_cancellation=True, shutdown_timeout=self.drain_timeout_s / 2)
        await runner.setup()
        try:
            await web.SockSite(runner, listen(self.host, self.port), backlog=BACKLOG).start()
        except OSError:
            await runner.cleanup()
            raise
        self.port, self._runner = runner.addresses[0][1], runner

    async def stop(self) -> None:
        """Stop listening and wait for the running requests. Does nothing unless started."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def __aenter__(self: Server) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
