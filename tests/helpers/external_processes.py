"""Real processes for the tests of the external store, forked from one that has imported everything."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fork_server import Forked

from groundwire.train.config.resolve import resolve
from groundwire.train.store.errors import StoreAddressError
from groundwire.train.store.health import check_store

AGENT = "external_processes:ask"
SETTINGS = resolve("fast", backend="custom", agent=AGENT, rollout_timeout_s=20.0).for_agents()


DEADLINE_S = 600.0
"""For what must end: on a busy machine it takes long, and a test that waits for nothing ends earlier."""


def free_port() -> int:
    """A port that is free until a program has started: none of those that the system gives to connections."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 30_000)))
            return int(probe.getsockname()[1])


def answers(address: str, token: str | None = None) -> bool:
    """Whether a store answers at ``address``."""
    try:
        check_store(address, token=token, timeout_s=1)
    except StoreAddressError:
        return False
    return True


def wait_for_store(address: str, process: Forked) -> None:
    """Wait until the store at ``address`` answers, for as long as its process runs."""
    while not answers(address):
        assert process.exitcode is None, "the store has ended"


def store(path: str, port: int) -> None:
    """The command ``train.store``, with a shorter interval between scans for unresponsive runners."""
    from groundwire.train.store.__main__ import main
    from groundwire.train.store.sqlite import SqliteStore

    SqliteStore.__init__.__kwdefaults__["scan_s"] = 0.2
    main(path=Path(path), memory=False, mongo=None, port=port, host="127.0.0.1")


def their_store(port: int) -> None:
    import agentlightning
    from agentlightning.logging import setup

    # The command imports this name from the package itself, which would import LiteLLM's server as well.
    agentlightning.setup_logging = setup  # type: ignore[attr-defined]
    from agentlightning.cli.store import main

    main(["--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"])


def their_runner(address: str, agent: str = AGENT) -> None:
    """Agent Lightning's own runner, client and tracer, with an agent of one call that returns its reward."""
    from agentlightning.litagent.litagent import LitAgent
    from agentlightning.runner.agent import LitAgentRunner
    from agentlightning.store.client_server import LightningStoreClient
    from agentlightning.tracer.otel import OtelTracer

    from groundwire.tools.http.access_token import access_token

    class Agent(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            import openai

            llm = resources["main_llm"]
            assert llm == resources["policy"]
            base_url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
            client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
            messages: Any = [{"role": "user", "content": task["question"]}]
            reply = await client.chat.completions.create(model=llm.model, messages=messages)
            return float(reply.choices[0].message.content == task["query"])

    tracer: Any = OtelTracer()
    runner: Any = LitAgentRunner(tracer, poll_interval=0.2, interval_jitter=0.05)
    store = LightningStoreClient(address.replace("://", f"://x:{access_token()}@"))
    with runner.run_context(agent=Agent(), store=store):
        asyncio.run(runner.iter())


def runner(address: str, n_runners: int, backend: str, agent: str = AGENT, data_dir: str | None = None) -> None:
    from groundwire.train.runner import app

    options = {"external-store-address": address, "backend": backend, "domain": "spider", "n-runners": n_runners}
    options |= {"agent": agent} if backend == "custom" else {}
    options |= {} if data_dir is None else {"data-dir": data_dir}
    app([text for name, value in options.items() for text in (f"--{name}", str(value))])


def trainer(address: str, policy_url: str, task: Mapping[str, Any], count: int, result: str) -> None:
    """A trainer of one batch; writes each rollout's status and reward."""
    outcomes = asyncio.run(_trainer(address, policy_url, task, count))
    Path(result).write_text(json.dumps([(o.outcome.status, o.outcome.reward) for o in outcomes]))


async def _trainer(address: str, policy_url: str, task: Mapping[str, Any], count: int) -> list[Any]:
    from groundwire.adapters.tracing.proxy import LLMProxy
    from groundwire.train.rollouts.collector import RolloutCollector
    from groundwire.train.store.remote import RemoteStore

    client = RemoteStore(address)
    await client.start()
    async with LLMProxy(upstreams=[policy_url], sink=client) as proxy:
        collector = RolloutCollector(
            store=client, proxy=proxy, model="scripted", settings=SETTINGS, resources_id="rs-a-run", poll_s=0.1
        )
        outcomes = await collector.run(jobs(task, count), deadline_s=DEADLINE_S)
    await client.stop()
    return outcomes


def jobs(task: Mapping[str, Any], count: int) -> list[Any]:
    from groundwire.train.store.rollout import Rollout

    return [Rollout(task=task, group="t1", sampling={}) for _ in range(count)]


async def ask(question: Any, endpoint: Any) -> str:
    """An agent of one call."""
    import openai

    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": question.text}]
    reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
    await client.close()
    return reply.choices[0].message.content or ""


async def show_token(question: Any, endpoint: Any) -> str:
    """An agent that looks for the store's token."""
    raise RuntimeError(f"{os.popen('echo token=$GROUNDWIRE_TOKEN.').read()}")  # noqa: ASYNC220


async def block(question: Any, endpoint: Any) -> str:
    """An agent that makes a call, and then blocks for ever."""
    await ask(question, endpoint)
    while True:
        time.sleep(1)  # noqa: ASYNC251 - on purpose


def start_a_process(task: dict[str, Any]) -> str:
    """An agent that starts a program which leaves its group and session, and waits for it."""
    process = subprocess.Popen(["sleep", str(DEADLINE_S)], start_new_session=True)
    partial = Path(task["started"] + ".part")
    partial.write_text(str(process.pid))
    partial.rename(task["started"])
    process.wait()
    return ""
