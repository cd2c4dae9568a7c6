"""Records of any kind are replayed: choices, models of other providers, an external store, no tokenizer."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import external_processes as processes
import pytest
from fork_server import Forked
from recorded_runs import CLIENT, recorded_run
from scripted_policy import scripted_policy
from typer.testing import CliRunner

from groundwire.adapters.tracing.scripted_server import Reply
from groundwire.tools.errors import CommandError
from groundwire.train.api.replay import Branch, ReplayedRollout, Replayer, branch_job, replay, replay_job
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.app import app as groundwire
from groundwire.train.policy import STARTER

ONE_CALL = (
    CLIENT
    + """
async def agent(task):
    return (await ask("writer", task["question"])).content or ""
"""
)
# Three choices of one request, then a call with all of them.
CHOICES = (
    CLIENT
    + """
async def agent(task):
    message = {"role": "user", "content": task["question"]}
    async with openai.AsyncOpenAI(max_retries=0) as client:
        reply = await client.chat.completions.create(model="gpt-5-mini", messages=[message], n=3)
    texts = [choice.message.content or "" for choice in reply.choices]
    return (await ask("", f"Join: {texts}")).content or ""
"""
)
# A judge at its own provider says what follows.
JUDGED = (
    CLIENT
    + """
async def agent(task):
    text = (await ask("writer", task["question"])).content
    message = {"role": "user", "content": text}
    async with openai.AsyncOpenAI(base_url=URL, api_key="own", max_retries=0) as client:
        judged = await client.chat.completions.create(model="judge-1", messages=[message])
    return (await ask("writer", judged.choices[0].message.content)).content
"""
)


def chosen(text: str, chance: random.Random) -> str | list[Reply]:
    if text.startswith("Join: "):
        return "right" if chance.random() < 0.5 else "wrong"
    return [Reply(text=chance.choice("abc")) for _ in range(3)]


def right_or_wrong(text: str, chance: random.Random) -> str:
    return "right" if chance.random() < 0.5 else "wrong"


def replayed(run: RunDir, **given: Any) -> list[ReplayedRollout]:
    names = [rollout.rollout_id for rollout in run.rollouts(["rollout_id"])[0]]
    return [ended for batch in replay(replay_job(run, given), run, names) for ended in batch]


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(groundwire, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


def test_choices_of_one_request_are_sampled_together_and_replaced_one_at_a_time(tmp_path: Path) -> None:
    with recorded_run(tmp_path, CHOICES, chosen, tasks=2, model="starter") as run:
        rollout = run.rollouts()[0][0]
        assert [call.choice for call in rollout.calls] == [0, 1, 2, None]
        with Replayer(branch_job(run, {}), run) as replayer:
            [whole] = replayer.run([Branch(rollout)])
            [sampled] = replayer.run([Branch(rollout, rollout.calls[1])])
            [replaced] = replayer.run([Branch(rollout, rollout.calls[1])], reply="what I say")
        texts = [[ended.reply(call)["content"] for call in rollout.calls[:3]] for ended in (whole, sampled, replaced)]
        assert whole.difference is None
        assert all(then != now for then, now in zip(texts[0], texts[1], strict=True))
        assert texts[2] == [texts[0][0], "what I say", texts[0][2]]
        code, printed = command(
            *("replay", str(run.path), "--rollout", rollout.rollout_id, "--from", "2", "--samples", "1"),
        )
        assert code == 0
        assert "\ncalls 1, 2, 3 are choices of one request: all are sampled\n" in printed
        assert f"recorded reply, which did not succeed: {' '.join(texts[0][1].split())!r}" in printed
        assert "does not begin with call" not in command("why", str(run.path), rollout.rollout_id)[1].partition("4")[0]


def test_choices_of_an_endpoint_go_as_recorded_and_none_is_replaced(tmp_path: Path) -> None:
    with recorded_run(tmp_path, CHOICES, chosen, tasks=12) as run:
        assert [each.difference for each in replayed(run)] == [None] * len(run.rollouts()[0])
        code, printed = command("why", str(run.path), "--turns", "--budget", "16")
        assert code == 0, printed
        rollout = run.rollouts()[0][0]
        with (
            Replayer(branch_job(run, {}), run) as replayer,
            pytest.raises(CommandError, match="3 choices as one reply"),
        ):
            replayer.run([Branch(rollout, rollout.calls[1])], reply="what I say")


def test_calls_that_are_left_to_their_provider_are_made_again(tmp_path: Path) -> None:
    asked = list[Any]()

    def judge(body: dict[str, Any]) -> str:
        asked.append(body)
        return f"{body['messages'][-1]['content']}, says the judge"

    with scripted_policy(judge, model="judge-1") as url:
        code = JUDGED.replace("URL", repr(url))
        with recorded_run(tmp_path, code, right_or_wrong, tasks=2, train_model="^gpt") as run:
            rollouts = run.rollouts()[0]
            assert [[call.agent for call in rollout.calls] for rollout in rollouts] == [["writer"] * 2] * len(rollouts)
            made = len(asked)
            assert [each.difference for each in replayed(run)] == [None] * len(rollouts)
            assert len(asked) == 2 * made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The address of a store in a process of its own."""
    port = processes.free_port()
    process = Forked(processes.store, str(tmp_path / "store.db"), port)
    try:
        processes.wait_for_store(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


def test_a_run_of_an_external_store_is_replayed_and_sampled_without_it(tmp_path: Path, store: str) -> None:
    kept = tmp_path / "store.db"
    given = {"external_store_address": store, "n_runners": 2}
    with recorded_run(tmp_path, ONE_CALL, right_or_wrong, tasks=12, **given) as run:
        assert run.config()["external_store_address"] == store
        size = kept.stat().st_size
        assert [each.difference for each in replayed(run)] == [None] * len(run.rollouts()[0])
        code, printed = command("why", str(run.path), "--turns", "--budget", "16")
        assert code == 0, printed
        assert kept.stat().st_size == size


def test_without_texts_of_prompts_a_difference_names_the_call(tmp_path: Path) -> None:
    """An endpoint's tokenizer is not known."""
    with recorded_run(tmp_path, ONE_CALL, right_or_wrong, tasks=2) as run:
        file = tmp_path / "agent.py"
        file.write_text(file.read_text().replace('task["question"]', '"Please: " + task["question"]'))
        for each in replayed(run):
            assert each.difference is not None
            assert each.difference.sentence == "call 1 (writer) has messages that are not in the record"


def test_a_record_without_its_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    shutil.copytree(STARTER, tmp_path / "model")
    with recorded_run(tmp_path, ONE_CALL, right_or_wrong, tasks=2, model=str(tmp_path / "model")) as run:
        shutil.rmtree(tmp_path / "model")
        code, printed = command("replay", str(run.path))
        assert code == 2
        assert re.fullmatch(r"error: .* cannot be replayed without its tokenizer, which is not in .*\n", printed)
