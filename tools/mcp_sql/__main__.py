"""``groundwire mcp-sql --database PATH``: read-only SQL for any MCP client.

Other programs start this server, so stdout carries nothing but the protocol, an error is one line on stderr, and other
machines need a token. FastMCP takes a second to import, so all options are checked before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.tools.errors import CommandError, check_layer, exit_on_user_error
from groundwire.tools.http.access_token import check_listen, given_token
from groundwire.tools.http.guard import AsgiGuard, Guard
from groundwire.tools.http.listening import listen, listen_problem
from groundwire.tools.mcp_sql.databases import Databases
from groundwire.tools.secrets import register_secret, say
from groundwire.tools.sql import DatabaseError
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import Version
from groundwire.tools.text import printable

_FIRST_REQUEST_S = 30.0
_TOKEN = "MCP_SQL_TOKEN"  # noqa: S105 - the variable's name


class _Transport(str, Enum):  # typer knows Literal from 0.19 on
    STDIO = "stdio"
    HTTP = "http"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _seconds(value: str | float) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(value)) < math.inf:
            return seconds
    raise typer.BadParameter(f"{value!r} is not a positive number")


@app.command()
def main(
    database: Annotated[Path, typer.Option(metavar="PATH", help="A SQLite file, or a folder of them")],
    timeout: Annotated[float, typer.Option(parser=_seconds, metavar="SECONDS", help="Time limit of a query")] = 5.0,
    max_rows: Annotated[int, typer.Option(metavar="N", min=1, help="Rows read for a query")] = 1000,
    max_chars: Annotated[int, typer.Option(metavar="N", min=1, help="Characters of an answer")] = 2000,
    transport: Annotated[_Transport, typer.Option(help="How clients connect")] = _Transport.STDIO,
    host: Annotated[str, typer.Option(help="For http; any but this machine's own needs a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="For http; 0 takes any free one")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the bearer token of http clients; default: {_TOKEN}")
    ] = None,
    token: Annotated[str | None, typer.Option(help="The token, visible in the process list")] = None,
    version: Version = False,
) -> None:
    """Serve read-only SQL over MCP until the client disconnects (stdio) or Ctrl-C."""
    http = transport is _Transport.HTTP
    with exit_on_user_error():
        check_layer("fastmcp")
        if token:
            hint = f"set {_TOKEN} or give --token-file FILE instead"
            say(f"warning: all users of this machine see --token in its process list; {hint}", err=True)
        token = (given_token(token_file) if token_file else token or os.environ.get(_TOKEN)) or None
        register_secret(token)
        if http:
            check_listen(host, token, f"set {_TOKEN} or give --token-file FILE")
        try:
            databases = Databases(database)
        except DatabaseError as error:
            raise CommandError(f"--database: {error}") from error
        listener = _listen(host, port) if http else None

    with contextlib.suppress(KeyboardInterrupt):
        with fast_import():
            from starlette.middleware import Middleware

            from groundwire.tools.mcp_sql.server import Limits, sql_server

        limits = Limits(timeout_s=timeout, max_rows=max_rows, max_chars=max_chars)
        server = sql_server(databases, limits=limits)
        if listener is None:
            # A thread of the server reads stdin and cannot be interrupted; there is nothing to clean up.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            server.run(transport="stdio", show_banner=False, log_level="ERROR")
        else:
            # Until the server handles Ctrl-C itself: an event loop under construction would print a traceback.
            signal.signal(signal.SIGINT, lambda *_: os._exit(0))
            for name in ("mcp.server.streamable_http", "uvicorn.error"):
                logging.getLogger(name).addFilter(_is_server_fault)
            bound_host, bound_port = listener.getsockname()[:2]
            name = f"[{bound_host}]" if ":" in bound_host else bound_host
            say(f"serving {printable(str(database))} on http://{name}:{bound_port}/mcp", err=True)
            server.run(
                transport="http",
                host=host,
                port=bound_port,
                sockets=[listener],
                middleware=[Middleware(AsgiGuard, guard=Guard(token=token, variable=_TOKEN, hosts=[host]))],
                uvicorn_config={"http": _closing_protocol(), "loop": "asyncio"},  # another accepts by itself
                host_origin_protection=False,  # it accepts the pages of all servers of this machine
                show_banner=False,
                log_level="ERROR",
            )


def _closing_protocol() -> Any:
    """Uvicorn's protocol, which closes connections that send no request: Uvicorn itself keeps them for ever."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class ClosingProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            asyncio.get_running_loop().call_later(_FIRST_REQUEST_S, self._close_unused, transport)

        def _close_unused(self, transport: Any) -> None:
            if getattr(self, "cycle", None) is None:  # no complete request so far
                transport.close()

    return ClosingProtocol


def _is_server_fault(record: logging.LogRecord) -> bool:
    """Whether a log record has another cause than a client that disconnected."""
    from h11 import LocalProtocolError
    from starlette.requests import ClientDisconnect

    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (ClientDisconnect, LocalProtocolError))


def _listen(host: str, port: int) -> socket.socket:
    """Bind here and not in the server, which would log a traceback for a taken port."""
    try:
        return listen(host, port)
    except OSError as error:
        raise CommandError(listen_problem(host, port, error, "give another --port or --host")) from error


if __name__ == "__main__":
    app()
