"""``python -m train.runner``: runs agents for a trainer somewhere else.

It knows the backend and the store; the store knows the rest. Where the proxy is comes with the resources of each
rollout, and how its agent is made with its metadata, so a runner serves any run of its backend, before, during and
after the life of any trainer. Stopped politely it gives its rollouts back; killed, it loses them to another runner.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Annotated

import typer

import adapters
import domains
from tools.plugins import PluginError, UnknownNameError
from tools.startup import importing
from tools.terminal import Version
from train.config import ConfigError
from train.store_address import StoreAddressError, check_store

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    external_store_address: Annotated[str, typer.Option(help="Where the store is", metavar="http://HOST:PORT")],
    backend: Annotated[str, typer.Option(help="Agent framework")] = "langgraph",
    agent: Annotated[
        str | None, typer.Option(help="With --backend custom: your async function", metavar="MODULE:FUNCTION")
    ] = None,
    domain: Annotated[str, typer.Option(help="What is asked")] = "spider",
    n_runners: Annotated[int, typer.Option(help="Rollouts that run at once", min=1)] = 16,
    until_eof: Annotated[
        bool, typer.Option("--until-eof", help="Stop when standard input ends, so with whoever started this")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything")] = False,
    version: Version = False,
) -> None:
    """Run agents for the trainers of a store, until stopped."""
    try:
        adapters.check(backend)
        domains.get(domain)
        check_store(external_store_address)
        asyncio.run(_run(external_store_address, backend, agent, domain, n_runners, until_eof, debug))
    except (StoreAddressError, UnknownNameError, ConfigError, PluginError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1 if isinstance(error, PluginError) else 2)


async def _run(
    address: str, backend: str, agent: str | None, domain: str, n_runners: int, until_eof: bool, debug: bool
) -> None:
    stopped = asyncio.Event()
    if until_eof:

        def read() -> None:
            if not os.read(sys.stdin.fileno(), 1):
                stopped.set()

        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with importing():
        from train.runners import POLL_S, RunnerPool
        from train.store_client import StoreClient
        from train.told import ToldAgent

    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(message)s", force=True)
    if not debug:
        logging.getLogger("agentlightning").setLevel(logging.CRITICAL)
        logging.getLogger("train").setLevel(logging.WARNING)
    with importing():  # the agent's framework
        told = ToldAgent(backend=backend, agent=agent, domain=domain)
    store = StoreClient(address)
    await store.start()
    runners = RunnerPool(store=store, agent=told, n_runners=n_runners, poll_interval=POLL_S)
    await runners.start()
    typer.echo(f"runner: {n_runners} {backend} agents for {address}")
    await stopped.wait()
    await runners.stop()
    await told.stop()
    await store.stop()


if __name__ == "__main__":
    app()
