"""What follows from a recorded call is sampled anew: the value of a turn, and the call that lost the chance.

The policy is a server that chooses its replies at random by the seed of each request, with chances that a test knows.
"""

from __future__ import annotations

import json
import random
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import CLIENT, recorded_run
from typer.testing import CliRunner

from groundwire.adapters.tracing.scripted_server import Reply
from groundwire.train.api.replay import Branch, Replayer, branch_job
from groundwire.train.api.turns import FIRST_SAMPLES, FailedTurn, TurnValue, losses, lost_chances, next_values
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.app import app as groundwire
from groundwire.train.report.turns import FILE
from groundwire.train.store.rollout import Rollout

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
    function = {"name": "lookup", "parameters": {"type": "object", "properties": {"city": {}, "unit": {}}}}
    tools = [{"type": "function", "function": function}]
    call = (await ask("helper", f"Do: {plan}: {task['question']}", tools=tools)).tool_calls[0].function
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


# Three calls at once, then one with their sorted answers; with a streamed reply to it.
AT_ONCE = (
    CLIENT
    + """
import asyncio

async def agent(task):
    parts = await asyncio.gather(*(ask("part", f"{task['question']} Part {n}.") for n in range(3)))
    text = " ".join(sorted(part.content or "" for part in parts))
    message = {"role": "user", "content": f"Say: {text}"}
    async with openai.AsyncOpenAI(max_retries=0) as client:
        chunks = await client.chat.completions.create(model="gpt-5-mini", messages=[message], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
"""
)


def at_once(text: str, chance: random.Random) -> str | Reply:
    return text.removeprefix("Say: ") if text.startswith("Say: ") else chance.choice(("a", "b", "c"))


AGENTS = {
    "at_once": (AT_ONCE, at_once),
    "check": (CHECK, checked),
    "router": (ROUTER, routed),
    "tool": (TOOL, with_tool),
}


def recorded(folder: Path, name: str, tasks: int = 24, **given: Any) -> AbstractContextManager[RunDir]:
    return recorded_run(folder, *AGENTS[name], tasks=tasks, **given)


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
        assert lost[key][0][0] == weak
        assert lost[key][0][1] > 0.5  # of few samples: in most runs 0.7 to 1
        assert f"of the loss is {'in' if key == 'agents' else 'in replies that call'} {weak}" in done.output
        assert lost["samples"] <= 160
        assert lost["turns"][0]["drop"] == max(turn["drop"] for turn in lost["turns"])
        assert {**before, str(run.path / FILE): (run.path / FILE).read_bytes()} == files(run)  # no rollout was added
        again = lost_chances(branch_job(run, {}), run, budget=160)
        assert json.loads(json.dumps(again)) == lost
        failed = lost["turns"][0]["rollout"]
        done = CliRunner().invoke(groundwire, ["why", str(run.path), failed])
        assert lost["turns"][0]["text"] in done.output
        done = CliRunner().invoke(groundwire, ["report", str(run.path)])
        assert done.exit_code == 0, done.output
        assert "of the loss is in" in (run.path / "report.html").read_text()
        assert (run.path / "report" / "loss.png").stat().st_size > 0
        (run.path / FILE).write_text('{"turns": 3}')
        for command in (["why", str(run.path), failed], ["report", str(run.path)]):
            done = CliRunner().invoke(groundwire, command)
            assert done.exit_code == 0, done.output
        assert f"{FILE} is damaged" in (run.path / "report.html").read_text()


def test_continuations_are_marked_and_never_trained(tmp_path: Path) -> None:
    with recorded(tmp_path, "router", 4) as run:
        [rollout, *_] = run.rollouts()[0]
        job = branch_job(run, {})
        with Replayer(job, run) as replayer:
            branches = [Branch(rollout, rollout.calls[1], number) for number in range(3)]
            ended = replayer.run(branches)
            given = replayer.run(branches[:1], reply="what I say")
        for continuation in [*ended, *given]:
            calls = continuation.again.calls
            assert continuation.difference is None
            assert continuation.again.rollout_id != rollout.rollout_id
            assert [call.replayed for call in calls] == [rollout.rollout_id] * 3
            assert continuation.again.trainable_calls == []
            assert calls[0].response_ids == rollout.calls[0].response_ids
        assert given[0].again.outcome.answer == "what I say"


@pytest.mark.parametrize(
    "given", [{}, {"model": "starter", "rollout_process": "fork"}], ids=["at an endpoint", "in this process"]
)
def test_calls_at_once_are_left_at_any_call(given: dict[str, Any], tmp_path: Path) -> None:
    with recorded(tmp_path, "at_once", 2, **given) as run:
        [rollout, *_] = run.rollouts()[0]
        with Replayer(branch_job(run, {}), run) as replayer:
            for place, call in enumerate(rollout.calls):
                for ended in replayer.run([Branch(rollout, call, number) for number in range(4)]):
                    assert ended.difference is None
                    assert all(ended.reply(earlier) for earlier in rollout.calls[:place])
                    kept = {tuple(earlier.response_ids) for earlier in rollout.calls[:place]}
                    assert kept <= {tuple(again.response_ids) for again in ended.again.calls}
                    assert len(ended.again.calls) == 4
            [given_last] = replayer.run([Branch(rollout, rollout.calls[3])], reply="über <b>\n all")
        assert given_last.again.outcome.answer == "über <b>\n all"


def test_a_record_goes_on_with_another_policy(tmp_path: Path) -> None:
    """In this process or at an endpoint, wherever the record comes from."""
    with recorded(tmp_path, "at_once", 2) as run:
        at_endpoint = run.rollouts()[0][0]
        with Replayer(branch_job(run, {"model": "starter"}), run) as replayer:
            [ended] = replayer.run([Branch(at_endpoint, at_endpoint.calls[3])])
        assert ended.difference is None
        assert [call.reply["content"] for call in ended.again.calls[:3]] != [""] * 3
        assert replayer.model == "starter"
        own = tmp_path / "own"
        own.mkdir()
        with recorded(own, "at_once", 2, model="starter") as here:
            [rollout, *_] = here.rollouts()[0]
            url = run.config()["evaluation"]["base_url"]
            with Replayer(branch_job(here, {"model": "random"}, base_url=url), here) as replayer:
                [ended] = replayer.run([Branch(rollout, rollout.calls[3])])
            assert ended.difference is None
            texts = sorted(call.reply["content"] or "" for call in ended.again.calls[:3])
            assert ended.again.outcome.answer == " ".join(texts).strip()
            assert replayer.model == f"random at {url}"


def test_a_reply_of_ones_own_may_call_a_tool(tmp_path: Path) -> None:
    with recorded(tmp_path, "tool", 12) as run:
        rollout = next(rollout for rollout in run.rollouts()[0] if rollout.outcome.reward == 0)
        with Replayer(branch_job(run, {}), run) as replayer:
            [whole] = replayer.run([Branch(rollout)])
            call = rollout.calls[1]
            written = replayer.written(call, whole.reply(call))
            assert written.strip() == '<tool_call>{"name": "lookup", "arguments": {"city": "Bern"}}</tool_call>'
            [ended] = replayer.run([Branch(rollout, call)], reply=written.replace('"Bern"', '"Bern", "unit": "m"'))
        assert ended.is_success


def test_a_seed_repeats_the_samples_and_another_has_others(tmp_path: Path) -> None:
    def replies(run: RunDir, rollout: Rollout, seed: int) -> list[list[list[int]]]:
        with Replayer(branch_job(run, {"seed": seed}), run) as replayer:
            ended = replayer.run([Branch(rollout, rollout.calls[0], number) for number in range(12)])
        return [[call.response_ids for call in continuation.again.calls] for continuation in ended]

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


def test_what_cannot_be_sampled_is_one_sentence(tmp_path: Path) -> None:
    def command(*options: str) -> str:
        done = CliRunner().invoke(groundwire, [*options])
        assert (done.exit_code, len(done.output.splitlines())) == (2, 1), done.output
        return done.output

    with recorded(tmp_path, "router", 12) as run:
        path, rollouts = str(run.path), run.rollouts()[0]
        name = rollouts[0].rollout_id
        assert "takes at least 12 samples" in command("why", path, "--turns", "--budget", "5")
        assert "leave out the rollout's id" in command("why", path, name, "--turns")
        (tmp_path / "agent.py").write_text(CLIENT + "async def agent(task):\n    return 'wrong'\n")
        assert "no failed rollout of" in (said := command("why", path, "--turns"))
        assert "not as recorded: the agent makes 0 of its 3 recorded calls" in said
        said = command("replay", path, "--rollout", name, "--from", "2")
        assert "no continuation has a reward: 16 the agent makes 0 of its 3 recorded calls" in said
        for rollout in rollouts:
            rollout.calls = []
        run.write_rollouts(0, rollouts, kind="val-1-001")
        said = command("replay", path, "--rollout", name, "--from", "1")
        assert f"rollout {name} has no LLM call in its record, so none can be sampled anew" in said
        said = command("why", path, "--turns")
        assert "failed after a call that was trained: " in said
        assert "made no call that was or could be trained" in said


def test_samples_go_where_the_sum_of_the_drops_is_least_certain() -> None:
    certain, uncertain, shared = TurnValue(0, 4), TurnValue(2, 4), TurnValue(2, 4)
    call: Any = None
    turns = [
        FailedTurn(Rollout(task={"id": "t"}), call, 1, "", value)
        for value in (TurnValue(), certain, uncertain, shared, shared)
    ]
    chosen = [turn.value for turn in next_values(turns, FIRST_SAMPLES + 3)]
    assert chosen[:FIRST_SAMPLES] == [turns[0].value] * FIRST_SAMPLES
    assert chosen[FIRST_SAMPLES:] == [shared] * 3
    assert next_values([FailedTurn(Rollout(task={"id": "t"}), call, 1, "", TurnValue(0, 1000))], 5) == []


def test_a_gain_is_no_loss_and_takes_from_the_losses_of_the_same_name() -> None:
    half, none, all_right = TurnValue(2, 4), TurnValue(0, 4), TurnValue(4, 4)
    task: Any = {"id": "t"}
    chances = [(1, all_right, half), (2, half, all_right), (3, all_right, None), (4, none, half)]
    turns = [
        FailedTurn(Rollout(task=task), call=task, number=n, tools="", value=v, after=after) for n, v, after in chances
    ]
    assert losses(turns, lambda turn: "ab"[turn.number % 2]) == [("b", 1.0), ("a", 0.0)]
