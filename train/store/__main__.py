"""``groundwire store``: a Lightning store in a separate process, durable in one file."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import socket
import sqlite3
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.http.access_token import access_token, check_listen, given_token
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file
from groundwire.tools.terminal import TokenFile, Version

_log = logging.getLogger(__name__)
_MONGO = "GROUNDWIRE_MONGO_URI"
"""The variable for a URI with a password, because options are visible in the process list."""
_MIN_KEEP_H = 0.1
"""A trainer reads a rollout within seconds of its end."""
_PRUNE_INTERVAL_S, _PRUNE_PAUSE_S = 60.0, 0.05

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    path: Annotated[Path | None, typer.Option(help="Keep it in this SQLite file")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Keep it in memory; lost at the end")] = False,
    mongo: Annotated[
        str | None, typer.Option(envvar=_MONGO, help="Agent Lightning's MongoDB store at this URI of a replica set")
    ] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one")] = 4747,
    host: Annotated[str, typer.Option(help="Address; any but this machine's own needs a token")] = ("127.0.0.1"),
    token_file: TokenFile = None,
    keep: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Delete rollouts that ended this many hours ago")
    ] = None,
    version: Version = False,
) -> None:
    """Serve rollouts, spans and resources to trainers and runners."""
    with exit_on_user_error():
        read_env_file()
        if sum((path is not None, memory, mongo is not None)) != 1:
            raise CommandError("give one of --path FILE, --memory and --mongo URI")
        if keep is not None and not keep >= _MIN_KEEP_H:
            raise CommandError(f"--keep is {keep:g}; it must be at least {_MIN_KEEP_H} hours")
        if keep is not None and mongo is not None:
            raise CommandError("--keep works with --path and --memory only; let MongoDB's own tools delete old data")
        check_listen(host, given_token(token_file))
        token = access_token(token_file)
        from groundwire.train.store.server import bind

        listener = bind(host, port)
        asyncio.run(_serve(_open_store(path, mongo), listener, token, keep))


def _open_store(path: Path | None, mongo: str | None) -> Any:
    if mongo is not None:
        # LiteLLM, which Agent Lightning imports, would download a list of prices.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        try:
            from groundwire.train.store.mongo import MongoStore
        except ImportError as error:
            raise CommandError(
                f"--mongo needs Agent Lightning with MongoDB ({error}): pip install 'groundwire[agentlightning]'"
            ) from error
        return MongoStore(mongo)
    from groundwire.train.store.lightning_store import LightningStore
    from groundwire.train.store.sqlite import MEMORY

    return LightningStore(path or MEMORY)


async def _serve(store: Any, listener: socket.socket, token: str, keep: float | None = None) -> None:
    from groundwire.train.store.server import serve

    stopped = asyncio.Event()
    try:
        async with serve(store, listener, token=token) as url:
            say(f"store: {url}")
            gc.freeze()  # what was imported is collected no more, which would hold up all clients for 40 ms
            pruning = None if keep is None else asyncio.create_task(_prune(store, keep * 3600))
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            await stopped.wait()
            if pruning is not None:
                pruning.cancel()
    finally:
        if inspect.isawaitable(closing := store.close()):
            await closing


async def _prune(store: Any, keep_s: float) -> None:
    while True:
        try:
            more = store.prune(keep_s=keep_s)
        except sqlite3.Error as error:  # for example a full disk
            _log.warning("old rollouts cannot be deleted: %s", error)
            more = False
        await asyncio.sleep(_PRUNE_PAUSE_S if more else _PRUNE_INTERVAL_S)


if __name__ == "__main__":
    app()
