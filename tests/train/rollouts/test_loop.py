"""An agent that blocks the event loop is reported with its line, and neither the run nor its end hangs."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from jobs import job_of
from programs import ROOT, Program, until

from groundwire import domains
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.schema import table_info
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.evaluator import try_tasks
from groundwire.train.rollouts import event_loop
from groundwire.train.rollouts.errors import EventLoopError
from groundwire.train.rollouts.event_loop import EventLoopThread


async def _nothing() -> None:
    pass


@pytest.fixture
def started() -> Iterator[Callable[[float], EventLoopThread]]:
    """Starts loops, and stops them after the test."""
    all_of_them: list[EventLoopThread] = []

    def start(max_blocked_s: float) -> EventLoopThread:
        loop = EventLoopThread(asyncio.SelectorEventLoop(), max_blocked_s=max_blocked_s)
        loop.start()
        all_of_them.append(loop)
        return loop

    yield start
    for loop in all_of_them:
        loop.stop(_nothing())


def _sleeps(seconds: float) -> None:
    time.sleep(seconds)


async def _blocks(seconds: float) -> None:
    _sleeps(seconds)


def test_a_blocked_loop_is_given_up_with_the_blocking_line(started: Any) -> None:
    place = rf"{__file__}:{inspect.getsourcelines(_sleeps)[1] + 1} \(_sleeps\)"
    with pytest.raises(EventLoopError, match=f"the agents' event loop is blocked at {place} for 2 s"):
        started(2.0).call(_blocks(60))


def test_a_loop_that_is_blocked_for_a_while_is_only_logged(
    started: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "_TICK_S", 0.4)  # a second; logged after five
    started(math.inf).call(_blocks(3.2))
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "(_sleeps) for 2 s" in record.getMessage()


def test_many_short_steps_are_not_a_blocked_loop(started: Any) -> None:
    async def all_at_once() -> None:
        await asyncio.gather(*(_blocks(0.2) for _ in range(25)))

    started(3.0).call(all_at_once())


def test_stop_does_not_wait_for_a_blocked_loop(started: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = started(math.inf)
    begun = asyncio.run_coroutine_threadsafe(_blocks(60), loop.loop)
    loop.stop(_nothing())
    assert not begun.done()
    assert "(_sleeps)" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_system_exit_in_a_task_ends_the_task_and_not_the_loop(started: Any, error: BaseException) -> None:
    async def ends() -> None:
        raise error

    async def awaits() -> str:
        with pytest.raises(type(error)):
            await asyncio.create_task(ends())
        return "went on"

    loop = started(math.inf)
    assert loop.call(awaits()) == "went on"
    assert loop.call(awaits()) == "went on"


def test_a_loop_that_has_ended_is_given_up(started: Any) -> None:
    def select(timeout: float | None) -> Any:
        raise OSError("somebody closed its files")

    async def breaks_its_loop() -> None:
        loop: Any = asyncio.get_running_loop()
        loop._selector.select = select
        await asyncio.sleep(60)

    with pytest.raises(EventLoopError, match=r"the agents' event loop ended: OSError.'somebody closed its files'"):
        started(math.inf).call(breaks_its_loop())


def _dev(agent: str, folder: Path) -> list[Any]:
    domain = domains.get("spider")
    config = resolve("fast", backend="custom", agent=f"{__name__}:{agent}", n_runners=4, retries=0)
    return try_tasks(job_of(config, domain), run=RunDir(folder), callback=ProgressCallback(), count=4)[0]


def synchronous(question: Any, endpoint: Any) -> str:
    schema = table_info(question.database, example_values=0, show_keys=False).text
    with openai.OpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:
        messages: Any = [
            {"role": "system", "content": prompts.write("system", schema)},
            {"role": "user", "content": prompts.write("write", question.text)},
        ]
        reply = client.chat.completions.create(model=endpoint.model, messages=messages, **endpoint.sampling)
    return prompts.extract_sql(reply.choices[0].message.content or "")


async def exits_in_a_task(question: Any, endpoint: Any) -> str:
    async def node() -> str:
        raise SystemExit(f"no more of {question.id}")

    return await asyncio.create_task(node())  # as agent frameworks do


def test_a_synchronous_client_in_a_plain_def_is_traced_as_any_other(tmp_path: Path) -> None:
    outcomes = _dev("synchronous", tmp_path)
    assert [ended.outcome.status for ended in outcomes] == ["succeeded"] * 4
    assert all(len(ended.calls) == 1 and ended.calls[0].response_ids for ended in outcomes)


async def hangs_in_the_loops_threads(question: Any, endpoint: Any) -> str:
    await asyncio.to_thread(time.sleep, 3600)
    return ""


def test_an_agent_that_exits_in_its_own_task_fails_alone(tmp_path: Path) -> None:
    outcomes = _dev("exits_in_a_task", tmp_path)
    assert [ended.outcome.status for ended in outcomes] == ["setup"] * 4
    assert "SystemExit: no more of " in outcomes[0].outcome.message


async def waits_for_itself(question: Any, endpoint: Any) -> str:
    """Blocks the event loop of the proxy that it waits for."""
    Path("begun").touch()  # noqa: ASYNC240
    return synchronous(question, endpoint)


def _program(folder: Path, *, agent: str = "waits_for_itself", rollout_timeout_s: float) -> Program:
    """A run of an agent that never ends."""
    config = resolve(
        "fast",
        backend="custom",
        agent=f"{__name__}:{agent}",
        rollout_process="off",
        n_runners=4,
        val_tasks=2,
        retries=0,
        rollout_timeout_s=rollout_timeout_s,
    )
    run = RunDir.create(str(folder / "runs"), backend="custom", domain="spider", config=config.to_dict())
    folders = ROOT, ROOT / "src", ROOT / "tests" / "helpers", Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    return Program("-m", "train.run", "--resume", str(run.path), folder=folder, environment=environment)


def test_a_run_with_a_deadlocked_agent_ends_with_the_blocking_line(tmp_path: Path) -> None:
    lines, first = inspect.getsourcelines(synchronous)
    line = next(number for number, text in enumerate(lines, first) if "completions.create(" in text)
    ended = _program(tmp_path, rollout_timeout_s=1.0).wait(600)
    assert ended.returncode == 1
    printed = f"error: the agents' event loop is blocked at {__file__}:{line} (synchronous) for 10 s: "
    assert ended.stderr.splitlines()[-1].startswith(printed)
    assert "a plain `def`, which runs in a thread" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_one_ctrl_c_ends_a_run_that_is_blocked(tmp_path: Path) -> None:
    program = _program(tmp_path, rollout_timeout_s=600.0)
    until((tmp_path / "begun").exists, program)
    program.send_signal(signal.SIGINT)
    stopped = program.wait(600)
    assert stopped.returncode == 130
    assert "stopped" in stopped.stderr
    assert "Traceback" not in stopped.stderr


def test_the_end_of_a_run_does_not_wait_for_threads(tmp_path: Path) -> None:
    ended = _program(tmp_path, agent="hangs_in_the_loops_threads", rollout_timeout_s=1.0).wait(600)
    assert ended.returncode == 1
    assert "no answer within 1 s" in ended.stderr
