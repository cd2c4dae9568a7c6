"""``python -m train.store``: a Lightning store as a process of its own, durable in one file.

The port is taken before anything heavy is imported, so that a port in use is said at once; clients are let in when the
store is ready.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import signal
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.tools.errors import CommandError
from groundwire.tools.exit import exit_on_user_error
from groundwire.tools.terminal import Version

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_KEEPALIVE_S = 75.0
_BACKLOG = 1024


@app.command()
def main(
    path: Annotated[Path | None, typer.Option(help="The file that keeps everything")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Keep nothing: all is gone when the store stops")] = False,
    mongo: Annotated[
        str | None, typer.Option(help="Agent Lightning's MongoDB store, at the URI of a replica set")
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any that is free")] = 4747,
    host: Annotated[str, typer.Option(help="Address to listen on. The store trusts whoever reaches it")] = "127.0.0.1",
    version: Version = False,
) -> None:
    """Serve rollouts, spans and resources to trainers and runners."""
    with exit_on_user_error():
        if sum((path is not None, memory, mongo is not None)) != 1:
            raise CommandError("give one of --path FILE, --memory and --mongo URI")
        with _bound(host, port) as listener:
            asyncio.run(_serve(_open(path, mongo), listener))


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise CommandError(
                f"port {port} on {host} is in use: stop what listens there, or give another --port"
            ) from error
        raise CommandError(
            f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return listener


def _open(path: Path | None, mongo: str | None) -> Any:
    if mongo is not None:
        try:
            from groundwire.train.store.mongo import MongoStore
        except ImportError as error:
            raise CommandError(
                f"--mongo needs MongoDB's driver ({error}): pip install 'agentlightning[mongo]'"
            ) from error
        return MongoStore(mongo)
    from groundwire.train.store.sqlite import MEMORY, SqliteLightningStore

    return SqliteLightningStore(path or MEMORY)


async def _serve(store: Any, listener: socket.socket) -> None:
    from aiohttp import web

    from groundwire.train.store.server import application

    runner = web.AppRunner(application(store), access_log=None, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        host, port = listener.getsockname()[:2]
        typer.echo(f"store: http://{f'[{host}]' if ':' in host else host}:{port}")
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()
    finally:
        await runner.cleanup()
        if inspect.isawaitable(closing := store.close()):
            await closing


if __name__ == "__main__":
    app()
