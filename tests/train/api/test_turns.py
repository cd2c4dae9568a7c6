"""What follows from a recorded call is sampled anew: the value of a turn, and the call that lost the chance.

The policy is a server that chooses its replies at random by the seed of each request, with chances that a test knows.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.tools.terminal import console
from groundwire.train.api.branches import Branch, Brancher, branch_job
from groundwire.train.api.evaluation import make_evaluation_job, run_evaluation
from groundwire.train.api.turns import lost_chances
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.app import app as groundwire
from groundwire.train.evaluation.turn_values import FIRST_SAMPLES, Turn, Value, losses, next_values
from groundwire.train.job.job import ModelEndpoint
from groundwire.train.report.turns import FILE
from groundwire.train.store.rollout import Rollout

CLIENT = """
import json, openai

async def ask(agent, text, **options):
    client = openai.AsyncOpenAI(max_retries=0)
    message = {"role": "user", "content": text}
    reply = await client.chat.completions.create(
        model="gpt-5-mini", messages=[message], extra_headers={"x-agent-name": agent}, **options
    )
    return reply.choices[0].message

def reward(task, answer):
    return float(answer == "right")
"""
# A writer is nearly always right; its check replaces many right answers.
CHECK = (
    CLIENT
    + """
async def agent(task):
    text = (await ask("writer", task["question"])).content
    return (await ask("check", f"{task['question']} Check: {text}")).content
"""
)
# The first of three calls decides; the others say what they are told.
ROUTER = (
    CLIENT
    + """
async def agent(task):
    way = (await ask("router", task["question"])).content
    text = (await ask("worker", f"Go {way}: {task['question']}")).content
    return (await ask("writer", f"Write: {text}")).content
"""
)
# One agent plans, calls a tool, and answers; its tool call sometimes lacks the unit.
TOOL = (
    CLIENT
    + """
async def agent(task):
    plan = (await ask("helper", f"Plan: {task['question']}")).content
    call = (await ask("helper", f"Do: {plan}: {task['question']}")).tool_calls[0].function
    found = "right" if "unit" in json.loads(call.arguments) else "wrong"
    return (await ask("helper", f"Say: {found} {task['question']}")).content
"""
)


def lookup(**arguments: str) -> Reply:
    function = {"name": "lookup", "arguments": json.dumps(arguments)}
    return Reply(tool_calls=[{"id": "call-1", "type": "function", "function": function}])


def checked(text: str, chance: random.Random) -> str | Reply:
    if "Check:" in text:
        return "right" if "Check: right" in text and chance.random() < 0.4 else "wrong"
    return "right" if chance.random() < 0.9 else "wrong"


def routed(text: str, chance: random.Random) -> str | Reply:
    if text.startswith("Go "):
        return "right" if "Go left" in text else "wrong"
    return text.removeprefix("Write: ") if "Write:" in text else chance.choice(("left", "away"))


def with_tool(text: str, chance: random.Random) -> str | Reply:
    if text.startswith("Do: "):
        return lookup(city="Bern", unit="m") if chance.random() < 0.5 else lookup(city="Bern")
    return text.split()[1] if text.startswith("Say: ") else chance.choice(("look it up", "ask the tool"))


AGENTS = {"check": (CHECK, checked), "router": (ROUTER, routed), "tool": (TOOL, with_tool)}


@contextmanager
def policy(choose: Callable[[str, random.Random], str | Reply]) -> Iterator[str]:
    """The address of a policy."""

    def reply(body: Mapping[str, Any]) -> str | Reply:
        return choose(body["messages"][-1]["content"], random.Random(body["seed"]))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ScriptedPolicyServer(reply, model="random")
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield server.base_url
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def recorded(folder: Path, name: str, tasks: int = 24) -> Iterator[RunDir]:
    """An evaluation of an agent, whose policy still answers."""
    code, choose = AGENTS[name]
    (folder / "agent.py").write_text(code)
    rows = [{"id": f"t{n}", "question": f"Where is city {n}?"} for n in range(tasks)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"agent": "agent.py:agent", "domain": "tasks.jsonl", "reward": "agent.py:reward"}
    settings: dict[str, Any] = {key: str(folder / value) for key, value in names.items()}
    settings |= {"model": "random", "val_temperature": 1.0, "output_dir": str(folder / "runs")}
    with policy(choose) as url:
        job = make_evaluation_job({**settings, "rollout_process": "off"}, ModelEndpoint(url), split="train")
        yield run_evaluation(job, samples=1, output=console(quiet=True))[0]


def files(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "key", "weak"), [("check", "agents", "check"), ("router", "agents", "router"), ("tool", "tools", "lookup")]
)
def test_the_planted_weak_call_has_the_loss(name: str, key: str, weak: str, tmp_path: Path) -> None:
    with recorded(tmp_path, name) as run:
        before = files(run)
        done = CliRunner().invoke(groundwire, ["why", str(run.path), "--turns", "--budget", "160"])
        assert done.exit_code == 0, done.output
        lost = json.loads((run.path / FILE).read_text())
        assert lost[key][0]["name"] == weak
        assert lost[key][0]["share"] > 0.6
        assert f"of the loss is {'in' if key == 'agents' else 'in replies that call'} {weak}" in done.output
        assert lost["samples"] <= 160
        assert lost["turns"][0]["drop"] == max(turn["drop"] for turn in lost["turns"])
        assert {**before, str(run.path / FILE): (run.path / FILE).read_bytes()} == files(run)  # no rollout was added
        again = lost_chances(branch_job(run, {}), run, budget=160)
        assert json.loads(json.dumps(again)) == lost
        done = CliRunner().invoke(groundwire, ["report", str(run.path)])
        assert done.exit_code == 0, done.output
        assert "of the loss is in" in (run.path / "report.html").read_text()
        assert (run.path / "report" / "loss.png").stat().st_size > 0


def test_continuations_are_marked_and_never_trained(tmp_path: Path) -> None:
    with recorded(tmp_path, "router", 4) as run:
        [rollout, *_] = run.rollouts()[0]
        job = branch_job(run, {})
        with Brancher(job, run) as brancher:
            branches = [Branch(rollout, rollout.calls[1], number) for number in range(3)]
            ended = brancher.run(branches)
            given = brancher.run(branches[:1], reply="what I say")
        for continuation in [*ended, *given]:
            calls = continuation.rollout.calls
            assert continuation.difference is None
            assert continuation.rollout.rollout_id != rollout.rollout_id
            assert [call.replayed for call in calls] == [rollout.rollout_id] * 3
            assert continuation.rollout.trainable_calls == []
            assert calls[0].response_ids == rollout.calls[0].response_ids
        assert given[0].rollout.outcome.answer == "what I say"


def test_a_seed_repeats_the_samples_and_another_has_others(tmp_path: Path) -> None:
    def replies(run: RunDir, rollout: Rollout, seed: int) -> list[list[list[int]]]:
        with Brancher(branch_job(run, {"seed": seed}), run) as brancher:
            ended = brancher.run([Branch(rollout, rollout.calls[0], number) for number in range(12)])
        return [[call.response_ids for call in continuation.rollout.calls] for continuation in ended]

    with recorded(tmp_path, "tool", 4) as run:
        [rollout, *_] = run.rollouts()[0]
        first = replies(run, rollout, 1)
        assert first == replies(run, rollout, 1)
        assert first != replies(run, rollout, 2)
        assert len({str(calls) for calls in first}) > 1


def test_the_value_of_a_turn_is_printed_with_its_alternatives(tmp_path: Path) -> None:
    with recorded(tmp_path, "router", 8) as run:
        rollout = next(rollout for rollout in run.rollouts()[0] if rollout.outcome.reward == 0)

        def command(*options: str) -> tuple[int, str]:
            done = CliRunner().invoke(groundwire, ["replay", str(run.path), *options])
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
            return done.exit_code, done.output

        one = ["--rollout", rollout.rollout_id, "--from"]
        code, printed = command(*one, "1", "--samples", "20")
        assert code == 0, printed
        assert re.search(r"from here on 0\.\d\d \[0\.\d\d, 0\.\d\d\] \(\d+ of 20\) succeed", printed)
        assert re.search(r"1\.00 \[0\.\d\d, 1\.00\] \((\d+) of \1\): 'left'\n", printed)
        assert re.search(r"0\.00 \[0\.00, 0\.\d\d\] \(0 of \d+\): 'away' \(as recorded\)", printed)
        code, printed = command(*one, "1", "--samples", "4", "--reply", "left")
        assert "with the reply 'left' 1.00 [0.51, 1.00] (4 of 4) succeed" in printed
        for options, message in (
            ([*one, "4"], "has no call 4; its calls are 1 router, 2 worker, 3 writer"),
            (["--rollout", "ro-none", "--from", "1"], "has no rollout 'ro-none'"),
            ([*one, "1", "--samples", "0"], "--samples 0: at least 1 is sampled"),
            ([*one, "1", "--model", "/nowhere"], "no model in /nowhere: there is no such file or folder"),
            ([*one, "1", "--base-url", "http://127.0.0.1:9/v1"], "needs the name of its model: --model NAME"),
            (["--from", "1"], "--from is about one rollout: give its id with --rollout ID"),
            (["--reply", "left"], "--reply needs --from CALL"),
        ):
            code, printed = command(*options)
            assert (code, len(printed.splitlines())) == (2, 1), printed
            assert message in printed


def test_samples_go_where_the_sum_of_the_drops_is_least_certain() -> None:
    certain, uncertain, shared = Value(0, 4), Value(2, 4), Value(2, 4)
    call: Any = None
    turns = [
        Turn(Rollout(task={"id": "t"}), call, 1, "", value) for value in (Value(), certain, uncertain, shared, shared)
    ]
    chosen = [turn.value for turn in next_values(turns, FIRST_SAMPLES + 3)]
    assert chosen[:FIRST_SAMPLES] == [turns[0].value] * FIRST_SAMPLES
    assert chosen[FIRST_SAMPLES:] == [shared] * 3
    assert next_values([Turn(Rollout(task={"id": "t"}), call, 1, "", Value(0, 1000))], 5) == []
    turns[1].after = uncertain
    assert [loss.amount for loss in losses(turns[1:3], lambda _: "all")] == [0.0]
