"""``python -m tools.mcp_sql --database PATH``: read-only SQL for any agent that speaks MCP.

It is embedded in programs of others, so it says nothing on stdout but the protocol, ends in one sentence when it cannot
serve, and listens to this machine only unless it is told a token. FastMCP takes a second to import: everything that can
be wrong is looked at before that.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from groundwire.tools.fast_import import fast_import
from groundwire.tools.mcp_sql.databases import Databases, database_names
from groundwire.tools.sql import DatabaseError

__all__ = ["database_names", "main"]

_TOKEN = "MCP_SQL_TOKEN"  # noqa: S105 - the variable's name


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until the client goes away (stdio) or Ctrl-C. Exits with 2 and one sentence when it cannot."""
    options = _parser().parse_args(arguments)
    token = options.token or os.environ.get(_TOKEN)
    http = options.transport == "http"
    if http and not token and not _is_loopback(options.host):
        _give_up(f"listening on {options.host} needs a token: pass --token or set {_TOKEN}")
    try:
        databases = Databases(options.database)
    except DatabaseError as error:
        _give_up(f"--database: {error}")
    listener = _listen(options.host, options.port) if http else None

    with contextlib.suppress(KeyboardInterrupt):
        with fast_import():
            from groundwire.tools.mcp_sql.server import Limits, sql_server

        limits = Limits(timeout_s=options.timeout, max_rows=options.max_rows, max_chars=options.max_chars)
        server = sql_server(databases, limits=limits, token=token)
        if listener is None:
            # A thread of the server waits for stdin and cannot be woken; nothing has to be put in order at the end.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            server.run(transport="stdio", show_banner=False, log_level="ERROR")
        else:
            # For as long as the server does not handle Ctrl-C itself: there is nothing to put in order, and an event
            # loop that is only half made would complain.
            signal.signal(signal.SIGINT, lambda *_: os._exit(0))
            host, port = listener.getsockname()[:2]
            print(f"serving {options.database} on {_url(host, port)}", file=sys.stderr, flush=True)
            server.run(
                transport="http",
                host=options.host,
                port=port,
                sockets=[listener],
                host_origin_protection="auto",
                show_banner=False,
                log_level="ERROR",
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mcp_sql", description="An MCP server for read-only SQL.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and stop")
    parser.add_argument("--database", required=True, metavar="PATH", help="a SQLite file, or a folder of them")
    parser.add_argument("--timeout", type=_positive(float), default=5.0, help="seconds for a query (%(default)s)")
    parser.add_argument("--max-rows", type=_positive(int), default=1000, help="rows read for a query (%(default)s)")
    parser.add_argument("--max-chars", type=_positive(int), default=2000, help="characters of an answer (%(default)s)")
    parser.add_argument("--transport", choices=("stdio", "http"), default="stdio", help="(%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="for http; others than this machine need a token")
    parser.add_argument("--port", type=_port, default=8000, help="for http; 0 is any that is free (%(default)s)")
    parser.add_argument("--token", help=f"bearer token that http clients must send; or set {_TOKEN}")
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from groundwire.tools.terminal import version

        print(version())
        parser.exit()


class _positive:
    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def __call__(self, text: str) -> int | float:
        try:
            value = self._kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
        return value


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    """Bound here and not by the server, which would answer a taken port with a page of log."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=256)
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        _give_up(f"cannot listen on {host}:{port}: {'the port is taken, choose another --port' if taken else error}")


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/mcp"


def _give_up(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
