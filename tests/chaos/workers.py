"""What the processes of the kill scenario run: store, runner and trainer, with journals of what was acknowledged.

A journal is one JSON line for each acknowledgement, written before the caller goes on. So it is complete although the
process is killed, and whatever it has must be in the store at the end.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import external_processes

from groundwire.tools.errors import exit_on_user_error
from groundwire.train.store.remote import RemoteStore

__all__ = ["append", "expected_answer", "journal", "run_runner", "run_trainer", "tasks_of_step"]

TASKS_PER_STEP = 6
DEADLINE_S = 30.0
UNRESPONSIVE_S = 2.0


def append(path: str, line: Any) -> None:
    """Add one line; a killed writer has written all of it or nothing."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


def expected_answer(number: int) -> str:
    """The policy's reply to question ``number``."""
    return f"SELECT name FROM singer WHERE id = {number}"


def tasks_of_step(step: int, database: str) -> list[dict[str, Any]]:
    """Each question has its own answer, so that an answer of another rollout is noticed."""
    numbers = range(step * TASKS_PER_STEP, (step + 1) * TASKS_PER_STEP)
    return [
        {"id": f"t{n}", "question": f"Singer number {n}?", "query": expected_answer(n), "db_path": database}
        for n in numbers
    ]


def journal(path: str) -> None:
    """Write what the store acknowledges to this process's clients."""

    def wrap(name: str, entries: Callable[..., list[Any]]) -> None:
        method = getattr(RemoteStore, name)

        @functools.wraps(method)
        async def journaled(self: Any, *arguments: Any, **options: Any) -> Any:
            result = await method(self, *arguments, **options)
            for entry in entries(result, *arguments, **options):
                append(path, entry)
            return result

        setattr(RemoteStore, name, journaled)

    def span(each: Any) -> list[str]:
        return ["span", each.rollout_id, each.attempt_id, each.span_id]

    wrap("enqueue", lambda _, rollouts: [["rollout", rollout.rollout_id] for rollout in rollouts])
    wrap("_add", lambda _, spans: [span(each) for each in spans])
    wrap(
        "_update_attempt",
        lambda _, rollout_id, attempt_id, status=None, **__: (
            [["ended", rollout_id, attempt_id, status]] if status in ("succeeded", "failed") else []
        ),
    )


def run_runner(address: str, path: str, n_runners: int) -> None:
    """The command ``train.runner``, with a journal."""
    journal(path)
    external_processes.runner(address, n_runners, "custom", data_dir=str(Path(path).parent))


def run_trainer(address: str, path: str, trained: str, database: str) -> None:
    """Steps without end, each written to ``trained`` when it is complete; goes on after the last one."""
    journal(path)
    with exit_on_user_error():
        lines = Path(trained).read_text().splitlines() if Path(trained).exists() else []
        first_step = max((json.loads(line)["step"] + 1 for line in lines), default=0)
        asyncio.run(_train(address, trained, database, first_step))


async def _train(address: str, trained: str, database: str, step: int) -> None:
    from groundwire.adapters.tracing.proxy import LLMProxy
    from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
    from groundwire.train.rollouts.collector import RolloutCollector
    from groundwire.train.store.rollout import Rollout

    client = RemoteStore(address)
    await client.start()
    async with (
        ScriptedPolicyServer(replies=_reply) as policy,
        LLMProxy(upstreams=[policy.base_url], sink=client) as proxy,
    ):
        collector = RolloutCollector(
            store=client,
            proxy=proxy,
            model=policy.model,
            settings=external_processes.SETTINGS,
            unresponsive_s=UNRESPONSIVE_S,
            resources_id="rs-chaos",
            retries=3,
            runner_command="groundwire runner",  # as of a store in another process
            poll_s=0.1,
        )
        while True:
            tasks = tasks_of_step(step, database)
            requests = [Rollout(task=task, group=task["id"], mode="train", sampling={}) for task in tasks]
            results = await collector.run(requests, deadline_s=DEADLINE_S)
            append(trained, {"step": step, "rollouts": [_summary(result) for result in results]})
            step += 1


def _reply(body: dict[str, Any]) -> str:
    found = re.search(r"number (\d+)", body["messages"][-1]["content"])
    assert found is not None
    return expected_answer(int(found[1]))


def _summary(result: Any) -> dict[str, Any]:
    return {
        "task": result.task["id"],
        "rollout_id": result.rollout_id,
        "status": result.outcome.status,
        "message": result.outcome.message,
        "reward": result.outcome.reward,
        "answer": result.outcome.answer,
        "calls": [list(call.response_ids) for call in result.calls],
    }
