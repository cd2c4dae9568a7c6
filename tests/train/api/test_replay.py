"""A replayed rollout goes as recorded, or one sentence names what is different."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from groundwire.tools.terminal import console
from groundwire.train import evaluate
from groundwire.train import replay as replay_in_python
from groundwire.train.api.evaluation import make_evaluation_job, run_evaluation
from groundwire.train.api.replay import ReplayedRollout, replay, replay_job
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.app import app as groundwire
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluation.replayed import Difference, TextsOfCall, _prompt_difference, first_difference

# The agent asks two questions, one with a tool's result, then the same two in tasks and two in threads at once, then
# three others at once twice, and goes on with the answers in their order. The file ``changes`` says how it differs from
# the recorded one.
AGENT = """
import asyncio, datetime, pathlib, random
import openai

CHANGES = pathlib.Path(__file__).with_name("changes").read_text().split()

async def agent(task):
    if "silent" in CHANGES:
        return "nothing"
    client, system = openai.AsyncOpenAI(), "You are very brief." if "code" in CHANGES else "You are brief."
    now = f"{datetime.datetime.now():%H:%M:%S.%f}" if "clock" in CHANGES else "12:01:02"
    system += f" It is {now} o'clock."
    system += f" Number {random.random() if 'random' in CHANGES else 0.5}."

    async def ask(*messages, **options):
        messages = [{"role": "system", "content": system}, *messages]
        reply = await client.chat.completions.create(model="gpt-5-mini", messages=messages, **options)
        return reply.choices[0].message.content

    question = {"role": "user", "content": task["question"]}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    options = {"tools": [tool]} if "tools" in CHANGES else {}
    first = await ask(question, stop=["x"] if "options" in CHANGES else ["y"], **options)
    call_id = f"call-{random.random()}"
    call = {"id": call_id, "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
    said = {"role": "assistant", "content": first, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call_id, "content": "[[2]]" if "tool" in CHANGES else "[[1]]"}
    await ask(question, said, result)
    sync = openai.OpenAI().chat.completions.create
    same = {"model": "gpt-5-mini", "messages": [question]}
    threads = [asyncio.to_thread(sync, **same) for _ in range(2)]
    equal = await asyncio.gather(ask(question, question), ask(question, question), *threads)
    equal = [*equal[:2], *[reply.choices[0].message.content for reply in equal[2:]]]
    parts = [{"role": "user", "content": f"{task['question']} Part {n}."} for n in range(3)]
    await asyncio.gather(*map(ask, parts))
    ended = [await answer for answer in asyncio.as_completed([ask(part, part) for part in parts])]
    texts = ["b a" if "order" in CHANGES else "a b", *equal, *ended]
    if "fewer" not in CHANGES:
        last = await ask({"role": "user", "content": f"Join: {texts}"})
    for _ in range("more" in CHANGES):
        await ask({"role": "user", "content": f"Join: {texts}"})
    if "raises" in CHANGES:
        raise ValueError("a fault of the agent")
    return "another answer" if "answer" in CHANGES else ended[-1]

def reward(task, answer):
    return 0.25 if "reward" in CHANGES else float(len(answer) > 0)
"""


@pytest.fixture(scope="module")
def recorded(shared_folder: Callable[..., Path]) -> Path:
    """A folder with the agent and an evaluation of it."""

    def fill(folder: Path) -> None:
        (folder / "agent.py").write_text(AGENT)
        (folder / "changes").write_text("")
        rows = [{"id": f"t{n}", "question": f"How many are older than {n}?"} for n in range(4)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = {"agent": "agent.py:agent", "domain": "tasks.jsonl", "reward": "agent.py:reward"}
        settings: dict[str, Any] = {name: str(folder / value) for name, value in names.items()}
        settings |= {"model": "starter", "max_tokens": 8, "val_temperature": 1.0, "output_dir": str(folder / "runs")}
        job = make_evaluation_job(settings, split="train")
        run_evaluation(job, samples=1, output=console(quiet=True))

    return shared_folder("replayed", fill)


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy, in which the agent may change."""
    shutil.copytree(recorded, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def replayed(folder: Path, recorded: Path, changes: str = "", **given: Any) -> list[ReplayedRollout]:
    """All rollouts of the run, with the agent in ``folder``."""
    (folder / "changes").write_text(changes)
    run = RunDir.open(folder / "runs" / "latest")
    job = replay_job(run, {"agent": f"{folder}/agent.py:agent", "reward": f"{folder}/agent.py:reward", **given})
    names = [rollout.rollout_id for rollout in run.rollouts(["rollout_id"])[0]]
    return [ended for batch in replay(job, run, names) for ended in batch]


def differences(ended: list[ReplayedRollout]) -> list[Difference | None]:
    """Without those of two calls that were answered together in the record: the agent may take either first."""
    found = [each.difference for each in ended]
    return [None if each and each.sentence.endswith("the agent may take either first") else each for each in found]


@pytest.mark.parametrize("process", ["fork", "spawn", "off"])
def test_the_same_agent_goes_as_recorded(folder: Path, recorded: Path, process: str) -> None:
    ended = replayed(folder, recorded, rollout_process=process)
    assert differences(ended) == [None] * 3
    for each in ended:
        assert len(each.again.calls) == len(each.recorded.calls) == 13
        assert each.again.trainable_calls == []
        reason = f"it is part of a replay of rollout {each.recorded.rollout_id}"
        assert {call.untrainable_reason for call in each.again.calls} == {reason}


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ("clock", "clock", r"the prompt of call 1 has a clock: '\d\d:.*' now, '12:01:02' in the record, in a s"),
        ("random", "random", r"the prompt of call 1 has a random number or id: '0\.\d+' now, '0\.5' in the record"),
        ("tool", "tool", r"before call 2 the result of lookup is another one: '2' now, '1' in the record"),
        ("code", "prompt", r"the prompt of call 1 is another one: 'very brief' now, 'brief' in the record, in a s"),
        ("order", "order", r"the prompt of call 13 has the same in another order: 'b a' now, .*, in a user message"),
        ("options", "options", r"call 1 has the recorded prompt with other options"),
        ("tools", "prompt", r"the prompt of call 1 is another one: .*look_up.* now, .* in the record"),
        ("fewer", "calls", r"the agent makes 12 of its 13 recorded calls"),
        ("more", "calls", r"after its 13 recorded calls the agent makes call 14, which asks the same as 1 of them"),
        ("silent", "calls", r"the agent makes 0 of its 13 recorded calls"),
        ("raises", "end", r"it fails of \w+ \(.*a fault of the agent.*\); in the record it succeeded"),
        ("answer", "answer", r"the answer is 'another answer' now, '.*' in the record"),
        ("reward", "reward", r"the reward of the same answer is 0\.25 now, 1\.0 in the record"),
    ],
)
def test_a_difference_is_named_in_one_sentence(
    folder: Path, recorded: Path, changes: str, kind: str, sentence: str
) -> None:
    if changes == "fewer":
        changes += " answer"
    for each in replayed(folder, recorded, changes):
        assert each.difference is not None
        assert each.difference.kind == kind
        assert re.match(sentence, each.difference.sentence), each.difference.sentence
        assert "\n" not in each.difference.sentence


def change_rows(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for file in (folder / "runs" / "latest").rglob("*.parquet"):
        rows = pq.read_table(file).to_pylist()
        for row in rows:
            change(row)
        pq.write_table(pa.Table.from_pylist(rows), file)


def change_config(folder: Path, **changed: Any) -> None:
    file = folder / "runs" / "latest" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def test_a_rollout_that_was_stopped_is_replayed_as_far_as_its_record_goes(folder: Path, recorded: Path) -> None:
    def stop(row: dict[str, Any]) -> None:
        row["status"], row["calls"] = "timeout", row["calls"][:5]
        row["calls"][4] |= {"status": 499, "error": "left", "response_ids": [], "logprobs": []}
        row["calls"][4]["untrainable_reason"] = "failed with status 499"

    change_rows(folder, stop)
    assert differences(replayed(folder, recorded)) == [None] * 3
    kinds = {each.difference and each.difference.kind for each in replayed(folder, recorded, "silent")}
    assert kinds == {"end"}


def test_an_agent_that_calls_nothing_is_replayed(folder: Path, recorded: Path) -> None:
    change_rows(folder, lambda row: row.update(calls=[], answer="nothing", agent_steps="[]"))
    assert differences(replayed(folder, recorded, "silent")) == [None] * 3


def test_a_run_with_an_external_store_is_replayed_without_it(folder: Path, recorded: Path) -> None:
    change_config(folder, external_store_address="http://127.0.0.1:9", n_runners=0)
    assert differences(replayed(folder, recorded)) == [None] * 3


def test_the_agent_of_a_replay_may_have_its_own_python(folder: Path, recorded: Path) -> None:
    assert differences(replayed(folder, recorded, runner_python=sys.executable)) == [None] * 3


def test_objects_of_a_script_are_replayed(tmp_path: Path) -> None:
    async def agent(task: Any) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": task["question"]}]}
        async with httpx.AsyncClient(timeout=600) as client:
            reply = await client.post("https://api.openai.com/v1/chat/completions", json=body)
        return f"{more}{reply.json()['choices'][0]['message']['content']}"

    def reward(task: Any, answer: str) -> float:
        return float(len(answer) > 0)

    more, tasks = "", [{"question": f"How many are older than {n}?"} for n in range(3)]
    settings: dict[str, Any] = {"model": "starter", "max_tokens": 8, "output_dir": str(tmp_path), "quiet": True}
    run_dir = evaluate(agent, tasks, reward, **settings).run_dir
    with pytest.raises(ConfigError, match=r"was started by a script, with its own agent, reward, tasks: name them"):
        replay_in_python(run_dir)
    assert differences(replay_in_python(run_dir, agent, tasks, reward)) == [None] * 3
    more = "more: "
    [ended] = replay_in_python(run_dir, agent, tasks, reward, count=1)
    assert ended.difference is not None
    assert ended.difference.kind == "answer"


def test_what_differs_first_is_shown_as_whole_values() -> None:
    assert first_difference("at 12:01:03, then", "at 12:01:47, then")[:2] == ("12:01:03", "12:01:47")
    assert first_difference("is 10.", "is 1.")[:2] == ("10", "1")
    assert first_difference("a b", "a b c") == ("b", "b c", 2)
    assert first_difference("", "new")[:2] == ("", "new")


@pytest.mark.parametrize(
    ("then", "now", "kind", "what"),
    [
        ("at 12:01:03.5", "at 12:01:47.1", "clock", "a clock: '12:01:47.1' now"),
        ("at 1764201600", "at 1764201755", "clock", "a clock"),
        ("in /tmp/tmp.qv7DcyqqHc/skills", "in /tmp/tmp.nnVTneC0VZ/skills", "random", "a temporary folder"),
        ("in /tmp/tmpabcdefgh/x", "in /tmp/tmpijklmnop/x", "random", "a temporary folder"),
        ("in /var/folders/x1/abc/T/ab", "in /var/folders/x1/abc/T/cd", "random", "a temporary folder"),
        (
            "id 3f2a91c0-77aa-4c1e-9f00-0242ac120002",
            "id 9d1b00c4-1a2b-4f3c-8a77-0242ac120003",
            "random",
            "a random number",
        ),
        ("session-3f2a91c0 is", "session-9d1b00c4 is", "random", "a random number or id: 'session-9d1b00c4' now"),
        ("call_q8Zr2LxkP01m", "call_Ab3dTT9xwQ4e", "random", "a random number or id"),
        ("table employee1", "table employee2", "prompt", "another one"),
        ("in src/first/x.py", "in src/second/x.py", "prompt", "another one"),
        ("in /tmp/x", "in /home/x", "prompt", "another one"),
    ],
)
def test_what_differs_in_every_run_is_named(then: str, now: str, kind: str, what: str) -> None:
    message = {"role": "user", "content": f"Begin {now} end"}
    difference = _prompt_difference("call 1", TextsOfCall(f"Begin {then} end", f"Begin {now} end", [message]))
    assert difference.kind == kind
    assert what in difference.sentence


@pytest.mark.parametrize(("gap_s", "is_named"), [(0.0001, True), (0.05, False)])
def test_replies_at_the_same_time_are_named_as_a_cause(
    folder: Path, recorded: Path, gap_s: float, is_named: bool
) -> None:
    """Which of them an agent had first is not in the record."""

    def end(row: dict[str, Any]) -> None:
        *calls, last = row["calls"][9:13]
        last |= {"started": last["started"] + 1, "ended": last["ended"] + 1}  # so all earlier calls ended before these
        for number, call in enumerate(calls):
            call |= {"started": calls[0]["started"], "ended": last["started"] - (3 - number) * gap_s}

    change_rows(folder, end)
    for each in replayed(folder, recorded, "order"):
        assert each.difference is not None
        named = "two calls at once before it were answered within 0.1 ms in the record" in each.difference.sentence
        assert named == is_named, each.difference.sentence


def test_the_command_says_what_differs_with_its_exit_code(folder: Path) -> None:
    def command(*options: str) -> tuple[int, str]:
        agent = ["--agent", f"{folder}/agent.py:agent", "--reward", f"{folder}/agent.py:reward"]
        done = CliRunner().invoke(groundwire, ["replay", str(folder / "runs" / "latest"), *agent, *options])
        return done.exit_code, done.output

    (folder / "changes").write_text("")
    code, printed = command()
    assert code == 0
    assert re.match(r"replayed 3 of 3 rollouts, with 39 recorded calls, in .* s: 3 as recorded, 0 not\n", printed)
    (folder / "changes").write_text("clock")
    os.utime(folder / "agent.py")
    code, printed = command("--all")
    assert code == 1
    assert "0 as recorded, 3 not\na clock: 3\n" in printed
    assert f"note: changed since the run: {folder}/agent.py\n" in printed
    assert f"note: not the run's own: agent {folder}/agent.py:agent, reward {folder}/agent.py:reward\n" in printed
    (folder / "changes").write_text("")
    change_config(folder, train_model="gpt-5")
    code, printed = command("--all")
    assert code == 0
    assert "note: calls of models that --train-model gpt-5 leaves out: their replies are not in the record" in printed
    for options, message in (
        (["--rollout", "ro-none"], "has no rollout 'ro-none'"),
        (["--failed"], "none of the 3 rollouts"),
        (["--failed", "--all"], "give one of --rollout, --failed and --all"),
    ):
        code, printed = command(*options)
        assert (code, len(printed.splitlines())) == (2, 1)
        assert message in printed


def test_a_damaged_record_is_one_sentence(folder: Path) -> None:
    for file in (folder / "runs" / "latest").rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:-100])
    done = CliRunner().invoke(groundwire, ["replay", str(folder / "runs" / "latest")])
    assert (done.exit_code, len(done.output.splitlines())) == (1, 1)
    assert "cannot be read" in done.output


def test_a_record_of_an_older_version_is_one_sentence(folder: Path) -> None:
    def forget(row: dict[str, Any]) -> None:
        for call in row["calls"]:
            del call["prompt_key"], call["reply_key"]

    change_rows(folder, forget)
    done = CliRunner().invoke(groundwire, ["replay", str(folder / "runs" / "latest")])
    assert done.exit_code == 2
    assert "was written by an older version of groundwire, which kept too little of each call" in done.output
