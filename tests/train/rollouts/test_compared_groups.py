"""A reward that compares answers is completed when a group has ended, wherever its agents ran, and fails closed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from judges import compared_answers, comparing
from no_data import NoData
from typer.testing import CliRunner

from groundwire import rewards
from groundwire.adapters import AgentError, Answer, Endpoint, EndpointError, Question
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.rewards import JudgeSettings
from groundwire.train import evaluate, fit, look
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.rescore import app as rescore_app
from groundwire.train.rescore import rescore
from groundwire.train.rollouts.runtime import RolloutRuntime, Upstream
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout

NAME = "judge:compare"


class _Backend:
    """An agent of one call, which cannot use "wrong", and whose tools are broken if the policy says "down"."""

    agents = ("solo",)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": question.text}]
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages, **endpoint.sampling)
        text = reply.choices[0].message.content or ""
        if text == "wrong":
            raise AgentError("cannot parse this")
        if text == "down":
            raise EndpointError("the search service is down")
        return Answer(text=text)


def by_length(answer: str) -> float:
    return len(answer) / 10


def group(task: str, count: int, **fields: Any) -> list[Rollout]:
    fields = {"sampling": {"temperature": 1.0}, "step": 1, **fields}
    return [Rollout(task={"id": task, "question": f"{task}?"}, group=task, **fields) for _ in range(count)]


def judge_at(server: ScriptedPolicyServer, tmp_path: Path) -> JudgeSettings:
    return JudgeSettings(model="judge", base_url=server.base_url, cache=str(tmp_path / "judge.sqlite"))


async def ended(
    tmp_path: Path,
    replies: Callable[[dict[str, Any]], str] | Sequence[str],
    *batches: list[Rollout],
    judge: Any = None,
    reward: Any = NAME,
    write: bool = False,
    **settings: Any,
) -> tuple[list[Rollout], list[list[str]]]:
    """The rollouts of the batches, one after the other, and what the judge was asked to compare."""
    async with (
        ScriptedPolicyServer(replies=replies) as policy,
        ScriptedPolicyServer(replies=judge or comparing(by_length)) as server,
    ):
        made = rewards.get(reward, judge=judge_at(server, tmp_path)) if isinstance(reward, str) else reward
        run = RunDir(tmp_path)
        with RolloutRuntime(
            engine=Upstream(base_url=policy.base_url, model=policy.model),
            backend=_Backend(),
            domain=NoData(),
            reward=made,
            timer=StepTimer(),
            config=resolve("fast", n_runners=8, retries=0, **settings),
            run=run,
        ) as runtime:
            for batch in batches:
                await asyncio.to_thread(runtime.run, batch, deadline_s=60)
                if write:
                    run.write_rollouts(batch[0].step, batch, kind=str(batch[0].mode))
        return [rollout for batch in batches for rollout in batch], [compared_answers(made) for made in server.requests]


def values(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    return {rollout.outcome.answer or rollout.outcome.failure: rollout.outcome.reward for rollout in rollouts}


async def test_a_group_is_ranked_when_all_have_ended_and_a_failure_of_the_policy_is_below_all(tmp_path: Path) -> None:
    rollouts, compared = await ended(tmp_path, ["a", "bb", "wrong", "ccc"], group("q", 4))
    assert values(rollouts) == {"agent": 0.0, "a": pytest.approx(1 / 3), "bb": pytest.approx(2 / 3), "ccc": 1.0}
    assert [sorted(answers) for answers in compared] == [["a", "bb", "ccc"]] * 2
    [best] = [rollout.outcome for rollout in rollouts if rollout.outcome.answer == "ccc"]
    assert best.reward_components == {NAME: 1.0, f"metric/{NAME}.contradicted": 0.0}


async def test_what_is_dropped_takes_no_part(tmp_path: Path) -> None:
    rollouts, _ = await ended(tmp_path, ["a", "bb", "down"], group("q", 3))
    assert values(rollouts) == {"endpoint": None, "a": 0.0, "bb": 1.0}
    rollouts, _ = await ended(tmp_path, ["a", "bb", "wrong"], group("q", 3), failures="agent=drop")
    assert values(rollouts) == {"agent": None, "a": 0.0, "bb": 1.0}


async def test_groups_are_compared_apart(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> str:
        answers = left[body["messages"][-1]["content"]]
        return answers.pop()

    left = {"p?": ["a", "bb"], "q?": ["ccc", "dddd"]}
    rollouts, compared = await ended(tmp_path, reply, [*group("p", 2), *group("q", 2)])
    assert values(rollouts) == {"a": 0.0, "bb": 1.0, "ccc": 0.0, "dddd": 1.0}
    assert len(compared) == 4


async def test_an_abstaining_judge_fails_the_groups_answers_and_never_scores_them(tmp_path: Path) -> None:
    rollouts, _ = await ended(
        tmp_path, ["a", "bb", "wrong"], group("q", 3), judge=lambda _: Reply(status=400, text="no")
    )
    outcomes = [rollout.outcome for rollout in rollouts]
    assert (
        sorted((outcome.failure, outcome.reward) for outcome in outcomes if outcome.answer)
        == [("judge_abstained", None)] * 2
    )
    assert {outcome.reward for outcome in outcomes if outcome.failure == "agent"} == {0.0}
    assert all("answered 400" in outcome.message for outcome in outcomes if outcome.answer)


async def test_an_answer_whose_whole_group_was_lost_is_not_scored(tmp_path: Path) -> None:
    [one, _], compared = await ended(tmp_path, ["a", "down"], group("q", 2))
    both = {one.outcome.failure, _.outcome.failure}
    assert (both, compared) == ({"judge_abstained", "endpoint"}, [])


async def test_a_sum_adds_the_rank_to_what_each_answer_earns_alone(tmp_path: Path) -> None:
    rollouts, _ = await ended(tmp_path, ["a", "bb"], group("q", 2), reward=f"executes+0.5*{NAME}")
    assert values(rollouts) == {"a": 0.0, "bb": 0.5}
    assert rollouts[0].outcome.reward_components.keys() == {"executes", NAME, f"metric/{NAME}.contradicted"}


async def test_a_users_reward_that_calls_it_for_one_answer_fails_and_scores_no_0(tmp_path: Path) -> None:
    async def mine(task: Any, answer: str, steps: Any) -> Any:
        return await rewards.get(NAME, judge=JudgeSettings(model="m"))(task, answer, steps)

    rollouts, _ = await ended(tmp_path, ["a", "bb"], group("q", 2), reward=mine)
    assert [(rollout.outcome.failure, rollout.outcome.reward) for rollout in rollouts] == [("reward", None)] * 2


# -- validations


async def test_a_validation_is_compared_with_the_one_before_training(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> str:
        return answers[body["messages"][-1]["content"]].pop(0)

    answers = {"p?": ["aa", "aaa"], "q?": ["aa", "a"], "r?": ["aa", "bb"], "s?": ["wrong", "a"], "t?": ["down", "a"]}
    names = "pqrst"
    first, second = (
        [one for name in names for one in group(name, 1, mode="val", step=step, sampling={"temperature": 0.0})]
        for step in (0, 9)
    )
    rollouts, compared = await ended(tmp_path, reply, first, second, write=True)
    assert [rollout.outcome.reward for rollout in rollouts[:5]] == [0.5, 0.5, 0.5, 0.0, None]
    assert [rollout.outcome.reward for rollout in rollouts[5:]] == [1.0, 0.0, 0.5, 1.0, None]
    assert rollouts[-1].outcome.failure == "judge_abstained"
    assert len(compared) == 6  # nothing before training


async def test_each_temperature_has_its_own_start(tmp_path: Path) -> None:
    replies = iter(["aa", "aaaa", "aaa"])
    batches = [
        group("q", 1, mode="val", step=step, sampling={"temperature": temperature})
        for step, temperature in ((0, 0.0), (0, 1.0), (5, 1.0))
    ]
    run = RunDir(tmp_path)
    for number, batch in enumerate(batches):
        [rollout], _ = await ended(tmp_path, lambda _: next(replies), batch)
        run.write_rollouts(batch[0].step, batch, kind=f"val-{number}")
    assert rollout.outcome.reward == 0.0  # "aaa" is better than "aa", and worse than "aaaa"


# -- commands


TASKS = [{"question": f"Question {number}?", "answer": "yes"} for number in range(10)]


def _replies(answers: Sequence[str]) -> Callable[[Any], str]:
    """Each question gets the answers in turn."""
    asked: dict[str, int] = {}

    def reply(body: dict[str, Any]) -> str:
        question = body["messages"][-1]["content"]
        asked[question] = asked.get(question, -1) + 1
        return answers[asked[question] % len(answers)]

    return reply


AGENT = """
import openai

client = openai.OpenAI(api_key="none")

def agent(task):
    messages = [{"role": "user", "content": task.question}]
    return client.chat.completions.create(model="x", messages=messages).choices[0].message.content

def short(task, answer):
    return 0.25 * (len(answer) < 2)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(AGENT)
    return file


async def test_an_evaluation_ranks_the_samples_of_a_task_and_needs_two(app: Path, tmp_path: Path) -> None:
    async with (
        ScriptedPolicyServer(replies=_replies(["a", "bb", "ccc"])) as policy,
        ScriptedPolicyServer(replies=comparing(by_length)) as server,
    ):
        common = {"model": policy.model, "base_url": policy.base_url, "output_dir": tmp_path / "out", "quiet": True}
        common |= {"judge": judge_at(server, tmp_path).model_dump(exclude_none=True)}
        asked = asyncio.to_thread(evaluate, f"{app}:agent", TASKS[:3], NAME, samples=3, **common)
        result = await asked
        assert len(server.requests) == 6
        with pytest.raises(ConfigError, match="give --samples 2 or more"):
            await asyncio.to_thread(evaluate, f"{app}:agent", TASKS[:3], NAME, **common)
    assert result.accuracy.value == 0.5
    ranks = dict(zip(result.rollouts["answer"], result.rollouts["reward"], strict=True))
    assert ranks == {"a": 0.0, "bb": 0.5, "ccc": 1.0}
    assert len(RunDir.open(result.run_dir)._rollout_files()) == 3  # as each sample of all tasks is written
    judge = ["--judge-model", "judge", "--judge-base-url", server.base_url, "--judge", f"cache={tmp_path}/judge.sqlite"]
    arguments = [str(result.run_dir), "--reward", NAME, *judge]
    done = await asyncio.to_thread(CliRunner().invoke, rescore_app, arguments)
    assert done.exit_code == 0, done.output  # no judge is there any more: all is in its cache


async def test_agents_in_their_own_environment_are_compared_in_the_trainers_process(app: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    async with (
        ScriptedPolicyServer(replies=_replies(["a", "bb"])) as policy,
        ScriptedPolicyServer(replies=comparing(by_length)) as server,
    ):
        result = await asyncio.to_thread(
            evaluate,
            f"{app}:agent",
            tasks,
            f"{NAME}+{app}:short",
            samples=2,
            model=policy.model,
            base_url=policy.base_url,
            output_dir=tmp_path / "out",
            quiet=True,
            runner_python=sys.executable,
            judge=judge_at(server, tmp_path).model_dump(exclude_none=True),
        )
        assert len(server.requests) == 20
    assert dict(zip(result.rollouts["answer"], result.rollouts["reward"], strict=True)) == {"a": 0.25, "bb": 1.0}


async def test_a_look_asks_each_task_twice(app: Path, tmp_path: Path) -> None:
    async with (
        ScriptedPolicyServer(replies=_replies(["a", "bb"])) as policy,
        ScriptedPolicyServer(replies=comparing(by_length)) as server,
    ):
        given = {"model": policy.model, "base_url": policy.base_url, "quiet": True}
        given |= {"judge": judge_at(server, tmp_path).model_dump(exclude_none=True)}
        found = await asyncio.to_thread(look, f"{app}:agent", TASKS, NAME, **given)
    assert sorted(rollout.outcome.reward for rollout in found.rollouts) == [0.0] * 5 + [1.0] * 5
    assert len({rollout.task["id"] for rollout in found.rollouts}) == 5


async def test_a_run_trains_on_ranks_and_validates_against_its_start(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(lambda answer: 1 / (2 + len(answer)))) as server:
        result = await asyncio.to_thread(
            fit,
            tasks="spider",
            reward=f"0.9*{NAME}+0.1*executes",
            model="starter",
            steps=1,
            tasks_per_step=2,
            group_size=3,
            val_tasks=3,
            output_dir=tmp_path / "runs",
            quiet=True,
            judge=judge_at(server, tmp_path).model_dump(exclude_none=True),
        )
    rollouts, _ = RunDir.open(result.run_dir).rollouts()
    trained = [rollout for rollout in rollouts if rollout.mode == "train"]
    ranks = [
        [one.outcome.reward_components[NAME] for one in trained if one.group == name]
        for name in {one.group for one in trained}
    ]
    assert [sum(of_group) for of_group in ranks] == pytest.approx([1.35, 1.35])
    before = [rollout.outcome.reward_components[NAME] for rollout in rollouts if rollout.step == 0]
    assert before == pytest.approx([0.45] * 6)
    after = [rollout for rollout in rollouts if rollout.mode == "val" and rollout.step == 1]
    assert {round(rollout.outcome.reward_components[NAME], 2) for rollout in after} <= {0.0, 0.45, 0.9}
    assert all(rollout.succeeded for rollout in rollouts)


def test_what_ranks_answers_apart_is_refused_before_a_run(tmp_path: Path) -> None:
    judge = {"model": "m", "base_url": "http://127.0.0.1:9/v1"}
    given: Any = {"model": "starter", "output_dir": tmp_path, "quiet": True, "judge": judge, "trainer": "gepa"}
    with pytest.raises(ConfigError, match="leave out trainer gepa"):
        fit(lambda task: "yes", TASKS, NAME, **given)
    assert not list(tmp_path.iterdir())


# -- rescore


def _stored(answer: str, reward: float | None, **fields: Any) -> Rollout:
    [rollout] = group("q", 1, **fields)
    rollout.outcome.answer, rollout.outcome.reward = answer, reward
    rollout.outcome.failure = "" if answer else "agent"
    return rollout


async def test_a_run_is_rescored_group_by_group(tmp_path: Path) -> None:
    rows = [
        _stored("a", 1.0),
        _stored("bb", 0.0),
        _stored("", 0.0),
        _stored("ccc", 0.0, step=2),
        _stored("d", 0.0, step=2),
    ]
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        found = await rescore(rows, rewards.get(f"{NAME}+executes", judge=judge_at(server, tmp_path)))
        with pytest.raises(Exception, match="no task has two answers"):
            await rescore(rows[:1], rewards.get(NAME, judge=judge_at(server, tmp_path)))
    assert [one.new for one in found.rollouts] == [0.5, 1.0, 0.0, 1.0, 0.0]
    unreachable = JudgeSettings(
        model="m", base_url="http://127.0.0.1:9/v1", cache=str(tmp_path / "other"), deadline_s=1
    )
    found = await rescore(rows, rewards.get(NAME, judge=unreachable))
    assert [one.new for one in found.rollouts] == [None, None, 0.0, None, None]
    assert "gave no verdict" in found.rollouts[0].error or "cannot be reached" in found.rollouts[0].error
