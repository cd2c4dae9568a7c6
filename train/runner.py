"""``groundwire runner``: runs agents for the trainers of a Lightning store.

A runner is started with a backend, an agent, a domain, a reward with its judge, and the store's address. Each rollout
brings the proxy's address, the task and the agent's settings, so one runner serves any number of trainers. It takes
from the store only what may differ between rollouts (:mod:`groundwire.train.rollouts.runner.request_check`). A runner
that is stopped by SIGINT or SIGTERM returns its rollouts to the queue; when it is killed, the store gives them to
another runner.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groundwire import adapters, domains, rewards
from groundwire.rewards import JudgeSettings
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.errors import exit_now, exit_on_user_error
from groundwire.tools.http.access_token import VARIABLE, token_for
from groundwire.tools.machine import rollouts_at_once
from groundwire.tools.secrets import mask_secrets, say
from groundwire.tools.startup import fast_import, read_env_file, setup_logging
from groundwire.tools.terminal import Debug, TokenFile, Version
from groundwire.train.cli.options import SettingsCommand, given_settings, takes_settings
from groundwire.train.config.run_config import AGENT_FUNCTIONS, OF_PROCESSES, AgentSettings
from groundwire.train.store.health import STORE_WAIT_S, check_store

if TYPE_CHECKING:
    from groundwire.train.rollouts.runner.agent import RemoteRolloutAgent
    from groundwire.train.rollouts.runner.pool import RunnerPool
    from groundwire.train.store.remote import RemoteStore

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


_SETTINGS = ("backend", "agent", *AGENT_FUNCTIONS, "train_model", "domain", "reward", *OF_PROCESSES)
"""Those of a run that its runners need; docs/several-machines.md says which must be the same."""
_STOP_S = 0.5
"""How long a runner of a trainer may take to stop at the end of its input: the trainer has ended, or is about to."""


@app.command(cls=SettingsCommand)
@takes_settings({name: name for name in _SETTINGS}, backend="langgraph, with --agent custom", domain="spider")
def main(
    settings: dict[str, Any],
    external_store_address: Annotated[str, typer.Option(help="Address of the store, http://HOST:PORT", metavar="URL")],
    data_dir: Annotated[
        str | None, typer.Option(help="Folder with the domain's data: agents read no other databases", metavar="DIR")
    ] = None,
    policy_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another host that LLM calls may go to: the trainer's --proxy-host; may be repeated", metavar="HOST"
        ),
    ] = None,
    n_runners: Annotated[int, typer.Option(help="Rollouts that run at once", metavar="N", min=1)] = 16,
    store_wait_s: Annotated[
        float, typer.Option(help="Seconds to wait for the store to start", metavar="SECONDS", min=0)
    ] = STORE_WAIT_S,
    token_file: TokenFile = None,
    until_eof: Annotated[
        bool, typer.Option("--until-eof", help="Look for rollouts at each line of standard input; stop at its end")
    ] = False,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Run agents for the trainers of a store, until stopped."""
    with exit_on_user_error(debug):
        if not until_eof:  # else the process that has started this one has read it
            read_env_file()
        given = given_settings(settings, ())
        backend = given.setdefault("backend", "custom" if "agent" in given else "langgraph")
        adapters.check(backend)
        judge = JudgeSettings(**given.pop("judge", {}))
        shortest = AgentSettings.model_fields["reward_timeout_s"].default
        own = AgentSettings(**given, judge=judge, reward_timeout_s=max(judge.deadline_s, shortest))
        domain = domains.get(own.domain)
        own = own.model_copy(update={"reward": own.reward or domain.default_reward})
        for note in rewards.notes(own.reward, judge=judge) if own.reward else ():  # a LitAgent returns its own
            say(f"reward: {note}")
        token = token_for(external_store_address, token_file)
        os.environ.pop(VARIABLE, None)  # agents and their processes do not get the token
        address = external_store_address
        began = time.monotonic()
        check_store(address, token=token, timeout_s=store_wait_s, on_wait=partial(say, err=True))
        left_s = max(0.0, began + store_wait_s - time.monotonic())
        with suppress(KeyboardInterrupt):  # the usual end
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
            with fast_import():
                from groundwire.train.rollouts.runner.agent import RemoteRolloutAgent
                from groundwire.train.rollouts.runner.pool import NOTIFIED_POLL_S, POLL_S, WORKER_ID, RunnerPool
                from groundwire.train.rollouts.runner.request_check import RequestCheck
                from groundwire.train.store.remote import RemoteStore

                setup_logging(debug)
                hosts, worker_id = policy_host or [], os.environ.pop(WORKER_ID, None)
                check = RequestCheck.of(own, domain, data_dir=data_dir, policy_hosts=hosts, store=address)
                runner_agent = RemoteRolloutAgent(check)
            n_runners, fewer = rollouts_at_once(n_runners)
            if fewer:
                say(f"runner: {fewer}", err=True)
            started = mask_secrets(f"runner: {n_runners} {backend} agents for {address}")
            store = RemoteStore(address, token=token)
            runners = RunnerPool(
                store=store,
                agent=runner_agent,
                n_runners=n_runners,
                poll_s=NOTIFIED_POLL_S if until_eof else POLL_S,
                worker_id=worker_id,
            )
            _run(store, runner_agent, runners, until_eof, started, left_s)
    exit_now(0)


def _run(
    store: RemoteStore, agent: RemoteRolloutAgent, runners: RunnerPool, until_eof: bool, started: str, wait_s: float
) -> None:
    """Run until interrupted, or until the end of standard input; ``started`` is said when the store is reached, which
    may take another ``wait_s`` seconds.
    """
    from groundwire.train.rollouts.event_loop import EventLoopThread

    async def start() -> None:
        await store.start(wait_s)
        await runners.start()

    async def stop() -> None:
        await runners.stop()
        await agent.stop()
        await store.stop()

    # No limit: the policy runs in another process, and other runners take over the rollouts of a blocked one.
    events = asyncio.new_event_loop()
    loop = EventLoopThread(events, max_blocked_s=math.inf)
    loop.start()
    try:
        loop.call(start())
        say(started)
        notify = partial(events.call_soon_threadsafe, runners.notify)
        loop.wait(in_thread(partial(_read_stdin, notify), name="stdin") if until_eof else Future[None]())
    finally:
        loop.stop(stop())


def _read_stdin(notify: Callable[[], Any]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        notify()
    threading.Timer(_STOP_S, exit_now, [0]).start()


if __name__ == "__main__":
    app()
