"""Groups of rollouts for verl's trainer: finished ones have rows, failed ones are replaced, and every group ends."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import external_processes as processes
import openai
import pyarrow.parquet as pq
import pytest
from fork_server import Forked
from judges import comparing
from judges import settings as judge_settings
from no_data import NoData

from groundwire.adapters import AgentError, Answer, Endpoint, PromptTooLongError, Question, ToolError
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.rewards import Reward, get
from groundwire.train.algorithms.speed import ModelCost
from groundwire.train.algorithms.task_schedule import TaskSchedule
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy.errors import ChatRequestError, EngineError
from groundwire.train.policy.grammar import calls_and_json, to_lark
from groundwire.train.policy.types import Sampling
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.runtime import RolloutRuntime
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout
from groundwire.train.verl.agent_loop_manager import prompts_from_batch
from groundwire.train.verl.engine import VerlEngine
from groundwire.train.verl.metrics import write_metrics
from groundwire.train.verl.rollout_service import Prompt, RolloutService
from groundwire.train.verl.rows import TrainingRow, row_tag

END = 0


class _Tokenizer:
    """A token is a character's code point; a message is its text and :data:`END`."""

    eos_token_id, chat_template = END, None

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        return "".join(f"{message['content']}\0" for message in messages)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(each) for each in ids if each != END)

    def __len__(self) -> int:
        return 128


@dataclass
class _Output:
    token_ids: list[int]
    log_probs: list[float]
    extra_fields: dict[str, Any]


@dataclass
class _Servers:
    """Stands in for verl's client: answers "right" and "wrong" in turn; weights change during every reply."""

    requests: list[tuple[str, list[int]]] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    version: int = 3
    changing: bool = True
    answers: Iterator[str] = field(default_factory=lambda: itertools.cycle(["right", "wrong"]))

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> _Output:
        self.requests.append((request_id, prompt_ids))
        self.params.append(sampling_params)
        ids = [ord(letter) for letter in next(self.answers)] + [END]
        versions = {"min_global_steps": self.version, "max_global_steps": self.version + self.changing}
        return _Output(ids, [-0.5] * len(ids), versions)


@dataclass
class _Queue:
    """Stands in for TransferQueue."""

    rows: dict[str, TrainingRow] = field(default_factory=dict)
    statuses: dict[str, list[str]] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    async def set_status(self, uid: str, partition: str, status: str) -> None:
        self.statuses.setdefault(uid, []).append(status)
        if status != "running":
            self.done.set()

    async def put(self, rows: Sequence[TrainingRow], partition: str) -> None:
        self.rows.update((row.key, row) for row in rows)


class _Backend:
    """An agent with ``calls`` calls of one conversation; ``act`` may fail or wait before them."""

    agents = ("solo",)

    def __init__(self, calls: int = 1, act: Callable[[], Any] = lambda: None, options: Any = None) -> None:
        self.calls, self.act, self.options = calls, act, options or {}

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        if asyncio.iscoroutine(result := self.act()):
            await result
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": question.text}]
        for _ in range(self.calls):
            options = {**endpoint.sampling, **self.options}
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages, **options)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        await client.close()
        return Answer(text=messages[-1]["content"])


class _Parser(_Backend):
    """An agent that cannot use the reply "wrong"."""

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        answer = await super().run(question, endpoint)
        if answer.text == "wrong":
            raise AgentError("cannot parse this")
        return answer


def _first_is_worst() -> Reward:
    """A reward of -1 for the first answer, and of 1 for all others."""
    given = itertools.chain([-1.0], itertools.repeat(1.0))

    async def reward(task: Any, answer: str, steps: Any) -> float:
        return next(given)

    return reward


async def _right(task: Any, answer: str, steps: Any) -> float:
    return float(answer == "right")


async def _never(task: Any, answer: str, steps: Any) -> float:
    return 0.0


async def _raises_if_wrong(task: Any, answer: str, steps: Any) -> float:
    if answer != "right":
        importlib.import_module("a_package_that_is_missing")
    return 1.0


@dataclass
class _Setup:
    service: RolloutService
    queue: _Queue
    servers: _Servers
    run: RunDir

    def until_done(self, count: int = 1) -> None:
        deadline = time.monotonic() + processes.DEADLINE_S
        while sum(statuses[-1] != "running" for statuses in self.queue.statuses.values()) < count:
            assert self.queue.done.wait(max(0.0, deadline - time.monotonic())), "the groups did not end"
            self.queue.done.clear()


@contextmanager
def _service(
    tmp_path: Path,
    backend: Any,
    schedule: TaskSchedule | None = None,
    reward: Reward = _right,
    judge: Any = None,
    **settings: Any,
) -> Iterator[_Setup]:
    config: RunConfig = resolve(
        "starter", trainer="verl", **{"n_runners": 16, "runner_processes": 0, "retries": 0, **settings}
    )
    queue, servers, timer = _Queue(), _Servers(), StepTimer()
    engine: Any = VerlEngine(servers, _Tokenizer(), max_model_len=config.max_model_len, timer=timer, server="vllm")
    run = RunDir(tmp_path)
    runtime = RolloutRuntime(
        engine=engine, backend=backend, domain=NoData(), reward=reward, timer=timer, config=config, run=run
    )
    with runtime:
        service = RolloutService(
            runtime=runtime,
            queue=queue,
            config=config,
            run=run,
            pad_id=END,
            schedule=schedule,
            teacher=judge,
        )
        yield _Setup(service, queue, servers, run)


def _prompt(uid: str = "u", rollouts: int = 4, partition: str = "train", step: int = 4) -> Prompt:
    return Prompt(uid=uid, task={"id": uid, "question": "Why?"}, rollouts=rollouts, step=step, partition=partition)


def test_every_rollout_of_a_finished_group_has_a_row_with_its_tag(tmp_path: Path) -> None:
    with _service(tmp_path, _Backend()) as made:
        made.service.submit([_prompt()])
        made.until_done()
    assert made.queue.statuses == {"u": ["running", "finished"]}
    assert sorted(made.queue.rows) == ["u_0_0", "u_1_0", "u_2_0", "u_3_0"]
    assert sorted(row.reward for row in made.queue.rows.values()) == [0.0, 0.0, 1.0, 1.0]
    for row in made.queue.rows.values():
        assert bytes(row.prompt_ids) == b"Why?\0"
        assert bytes(row.response_ids) in (b"right\0", b"wrong\0")
        assert row.mask == [1] * 6
        assert row.logprobs == [-0.5] * 6
        assert row_tag(row) == {
            "status": "success",
            "prompt_len": 5,
            "response_len": 6,
            "seq_len": 11,
            "global_steps": 4,
            "min_global_steps": 3,
            "max_global_steps": 4,
            "has_gradient": True,
            "prefix_hashes": "",
        }


async def test_a_group_is_ranked_and_a_validation_is_compared_with_that_before_training(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(lambda answer: float(answer == "right"))) as server:
        reward = get("judge:compare", judge=judge_settings(server, tmp_path))

        def sample() -> _Queue:
            with _service(tmp_path, _Backend(), reward=reward) as made:
                for prompt in (_prompt("v", 1, "val", 0), _prompt("u"), _prompt("v", 1, "val", 4)):
                    made.queue.statuses.clear()
                    made.service.submit([prompt])
                    made.until_done()
                    made.service.finish_sampling(prompt.partition, prompt.step, {})
                    made.service.metrics.finish_writing()
            return made.queue

        queue = await asyncio.to_thread(sample)
    assert sorted(row.reward for key, row in queue.rows.items() if key.startswith("u")) == pytest.approx(
        [1 / 6, 1 / 6, 5 / 6, 5 / 6]
    )
    rollouts, _ = RunDir(tmp_path).rollouts()
    before, after = (rollout for rollout in rollouts if rollout.mode == "val")
    assert (before.step, before.outcome.reward, after.step) == (0, 0.5, 4)
    assert (before.outcome.answer, after.outcome.answer, after.outcome.reward) == ("right", "wrong", 0.0)


class _Teacher:
    """Likes the first token of a reply, and dislikes the others."""

    def judge(self, rollouts: Sequence[Rollout]) -> None:
        for call in (call for rollout in rollouts for call in rollout.trainable_calls):
            call.teacher_logprobs = [0.0, *[-1.0] * (len(call.response_ids) - 1)]


def test_a_teacher_judges_the_tokens_of_a_group_with_equal_rewards(tmp_path: Path) -> None:
    address = {"teacher": "http://127.0.0.1:1/v1", "teacher_model": "x", "teacher_weight": 1}
    with _service(tmp_path, _Backend(), reward=_never, judge=_Teacher(), **address) as made:
        made.service.submit([_prompt()])
        made.until_done()
        metrics = made.service.finish_sampling("train", 4, {})
    for row in made.queue.rows.values():  # sampled with -0.5: differences of 0.5 and five of -0.5 with mean -1 / 3
        assert row.advantages == pytest.approx([5 / 6, *[-1 / 6] * 5])
    assert len(made.queue.rows) == 4
    assert (metrics["rollouts/teacher_kl"], metrics["rollouts/teacher_share"]) == (pytest.approx(1 / 3, abs=1e-6), 1.0)


@pytest.mark.parametrize(
    ("server", "stop", "detokenize"), [("vllm", (), False), ("vllm", ("END",), True), ("sglang", (), None)]
)
def test_vllm_makes_text_only_for_stop_strings(server: str, stop: tuple[str, ...], detokenize: object) -> None:
    async def ask() -> str:
        engine = VerlEngine(servers, _Tokenizer(), max_model_len=64, timer=StepTimer(), server=server)
        return (await asyncio.wrap_future(engine.submit([1, 2], Sampling(stop=stop, seed=7)))).text

    servers = _Servers()
    assert asyncio.run(ask()) == "right"
    assert servers.params[0].get("seed") == (7 if server == "vllm" else None)  # SGLang refuses it
    assert servers.params[0].get("detokenize") is detokenize


@pytest.mark.parametrize("partition", ["train", "val"])
def test_every_rollout_has_a_seed_of_its_own_that_follows_from_the_runs(tmp_path: Path, partition: str) -> None:
    def seeds(folder: str, *prompts: Prompt, **settings: Any) -> Counter[int]:
        with _service(tmp_path / folder, _Backend(), **settings) as made:
            made.service.submit(prompts)
            made.until_done(len(prompts))
        return Counter(params["seed"] for params in made.servers.params)

    prompts = [_prompt("a", partition=partition), _prompt("b", partition=partition)]
    first, again, other = seeds("1", *prompts), seeds("2", *prompts), seeds("3", *prompts, seed=5)
    assert first == again
    assert len(first) == 8
    assert not first & other


def test_a_task_that_a_step_draws_twice_samples_other_replies(tmp_path: Path) -> None:
    with _service(tmp_path, _Backend()) as made:
        for uid in ("u", "v"):
            made.service.submit([replace(_prompt(uid), task={"id": "t", "question": "Why?"})])
            made.until_done(2 if uid == "v" else 1)
    assert len({params["seed"] for params in made.servers.params}) == 8


def test_both_trainers_ask_with_the_same_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, each = list[Rollout](), RolloutCollector.each

    def recording(self: RolloutCollector, requests: Sequence[Rollout], **options: Any) -> Any:
        sent.extend(requests)
        return each(self, requests, **options)

    monkeypatch.setattr(RolloutCollector, "each", recording)
    prompts = [_prompt("a"), _prompt("b")]
    with _service(tmp_path, _Backend()) as made:
        made.service.submit(prompts)
        made.until_done(2)
    config = RunConfig(group_size=4, tasks_per_step=2)
    local = TaskSchedule([prompt.task for prompt in prompts], config).groups(4)
    assert sorted((request.group, request.sampling["seed"]) for request in sent) == sorted(
        (request.group, request.sampling["seed"]) for group in local for request in group
    )


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("server", "interrupted"), [("vllm", False), ("vllm", True), ("sglang", False)])
def test_vllm_sends_a_reply_once_where_verl_does_not_interrupt_it(server: str, interrupted: bool) -> None:
    async def ask() -> str:
        engine = VerlEngine(
            servers, _Tokenizer(), max_model_len=64, timer=StepTimer(), server=server, interrupted=interrupted
        )
        return (await asyncio.wrap_future(engine.submit([1, 2], Sampling()))).text

    servers = _Servers()
    assert asyncio.run(ask()) == "right"
    sent = pickle.loads(pickle.dumps(servers.params[0]))  # as it arrives at the server
    assert sent.get("output_kind") == ("once" if (server, interrupted) == ("vllm", False) else None)


@pytest.mark.usefixtures("vllm")
def test_vllm_gets_the_grammar_and_the_stop_token_ids() -> None:
    async def ask(servers: _Servers, **options: str) -> Any:
        engine = VerlEngine(servers, _Tokenizer(), max_model_len=64, timer=StepTimer(), server="vllm", **options)
        sampling = Sampling(grammar=calls_and_json({"const": 1}), stop_token_ids=(END,))
        return await asyncio.wrap_future(engine.submit([1, 2], sampling))

    servers = _Servers(changing=False)
    reply = asyncio.run(ask(servers))
    assert (reply.finish_reason, reply.text) == ("stop", "right")
    assert servers.params[0]["structured_outputs"].grammar == to_lark(calls_and_json({"const": 1}))
    assert servers.params[0]["stop_token_ids"] == [END]
    with pytest.raises(EngineError, match="the weights changed from version 3 to 4 during a constrained reply"):
        asyncio.run(ask(_Servers()))
    with pytest.raises(ChatRequestError, match=r"^response_format and tool_choice are only served with vLLM"):
        asyncio.run(ask(servers, why_unconstrained="are only served with vLLM"))


@pytest.mark.usefixtures("vllm")
def test_constrained_calls_are_trained_with_their_grammar(tmp_path: Path) -> None:
    backend = _Backend(options={"response_format": {"type": "json_object"}})
    with _service(tmp_path, backend, tasks_per_step=1) as made:
        made.servers.changing = False
        made.service.submit([_prompt()])
        made.until_done()
    assert len(made.queue.rows) == 4
    grammar = calls_and_json({"type": "object"})
    for row in made.queue.rows.values():
        assert json.loads(row.grammars) == [[0, len(row.response_ids), grammar]]
        assert all(row.mask)


def test_submitting_does_not_wait_for_the_rollouts(tmp_path: Path) -> None:
    free = threading.Event()
    with _service(tmp_path, _Backend(act=lambda: asyncio.to_thread(free.wait))) as made:
        made.service.submit([_prompt()])
        assert not made.queue.rows
        free.set()
        made.until_done()
    assert len(made.queue.rows) == 4


def test_the_trainer_is_told_once_that_all_prompts_have_ended(tmp_path: Path) -> None:
    released = threading.Event()

    async def held() -> None:
        await asyncio.to_thread(released.wait, 60)

    with _service(tmp_path, _Backend(act=held)) as made:
        for uid in ("u", "v"):
            made.service.submit([_prompt(uid)])
        assert not made.service.wait(0.1)
        released.set()
        assert made.service.wait(600)
        assert made.queue.statuses == {uid: ["running", "finished"] for uid in ("u", "v")}
        assert not made.service.wait(0)


def test_the_trainer_is_told_of_a_failed_group_at_once(tmp_path: Path) -> None:
    released, started, numbers = threading.Event(), threading.Semaphore(0), itertools.count()

    async def first_four_held() -> None:
        if next(numbers) < 4:
            started.release()
            await asyncio.to_thread(released.wait, 60)

    with _service(tmp_path, _Backend(act=first_four_held)) as made:
        made.service.submit([_prompt("held")])
        assert all(started.acquire(timeout=600) for _ in range(4))
        made.service.submit([_prompt("alone", rollouts=1)])  # a single reward has nothing to be compared with
        assert made.service.wait(600)
        assert made.queue.statuses == {"held": ["running"], "alone": ["running", "failure"]}
        released.set()
        assert made.service.wait(600)
        assert made.queue.statuses["held"] == ["running", "finished"]


def test_a_rollout_keeps_to_one_server_and_no_two_share_a_session(tmp_path: Path) -> None:
    with _service(tmp_path, _Backend(calls=3)) as made:
        made.service.submit([_prompt()])
        made.until_done()
    sessions = [session for session, _ in made.servers.requests]
    assert len(sessions) == 12
    assert {sessions.count(session) for session in sessions} == {3}
    assert len(set(sessions)) == 4


def test_a_failed_rollout_is_left_out_of_its_group(tmp_path: Path) -> None:
    turns = itertools.count()

    def act() -> None:
        if next(turns) == 0:
            raise ToolError("a lost database")

    with _service(tmp_path, _Backend(act=act)) as made:
        made.service.submit([_prompt()])
        made.until_done()
    assert made.queue.statuses["u"][-1] == "finished"
    assert len(made.queue.rows) == 3
    figures = made.service.finish_sampling("train", 4, {"sampling": 1.0})
    assert figures["rollouts/ended_total"] == 4
    assert figures["rollouts/dropped_total"] == figures["rollouts/dropped_tool_total"] == 1


def test_the_credit_that_verl_trains_is_recorded_with_each_call(tmp_path: Path) -> None:
    settings = {"credit": "discount", "credit_discount": 0.5}
    with _service(tmp_path, _Backend(calls=2), **settings) as made:
        made.service.submit([_prompt()])
        made.until_done()
        made.service.finish_sampling("train", 4, {})
        made.service.metrics.finish_writing()
    credits = [[call.credit for call in rollout.calls if call.credit] for rollout in made.run.rollouts()[0]]
    assert [[credit.weight for credit in each] for each in credits] == [[0.5, 1.0]] * 4
    trained = {
        advantage
        for row in made.queue.rows.values()
        for advantage, sampled in zip(row.advantages or (), row.mask, strict=True)
        if sampled
    }
    assert {credit.weight * credit.advantage for each in credits for credit in each} == trained
    assert len(trained) > 1


@pytest.mark.parametrize("failures", ["", "agent=drop"])
def test_an_agent_that_cannot_use_a_reply_is_trained_with_reward_0_unless_such_failures_are_dropped(
    tmp_path: Path, failures: str
) -> None:
    with _service(tmp_path, _Parser(), failures=failures) as made:
        made.service.submit([_prompt()])
        made.until_done()
    figures = made.service.finish_sampling("train", 4, {})
    if failures:
        assert (len(made.queue.rows), figures["rollouts/dropped_agent_total"]) == (2, 2)
    else:
        assert sorted(row.reward for row in made.queue.rows.values()) == [0.0, 0.0, 1.0, 1.0]
        assert figures["rollouts/zero_total"] == figures["rollouts/zero_agent_total"] == 2
        assert figures["rollouts/dropped_total"] == 0


def test_a_failure_of_the_policy_scores_the_least_reward_of_its_group_and_of_the_run(tmp_path: Path) -> None:
    with _service(tmp_path, _Parser(), reward=_first_is_worst()) as made:
        for step in range(2):
            made.service.submit([_prompt(str(step))])
            made.until_done(step + 1)
    assert sorted(row.reward for row in made.queue.rows.values()) == [*[-1.0] * 5, *[1.0] * 3]


def test_a_cut_off_reply_scores_the_least_reward_of_the_run_if_it_is_to_score_so(tmp_path: Path) -> None:
    class CutServers(_Servers):
        async def generate(self, *arguments: Any, **options: Any) -> _Output:
            output = await super().generate(*arguments, **options)
            if output.token_ids[0] == ord("w"):
                output.token_ids, output.log_probs = output.token_ids[:-1], output.log_probs[:-1]
            return output

    with _service(tmp_path, _Backend(), reward=_first_is_worst(), truncated="zero", max_tokens=len("wrong")) as made:
        for step in range(2):
            made.service.submit([_prompt(str(step))])
            made.until_done(step + 1)
            made.servers.__class__ = CutServers
    rewards = [row.reward for row in made.queue.rows.values() if row.uid == "1"]
    assert sorted(rewards) == [-1.0, -1.0, 1.0, 1.0]


def test_rollouts_without_a_call_are_counted(tmp_path: Path) -> None:
    with _service(tmp_path, _Backend(calls=0)) as made:
        made.service.submit([_prompt()])
        made.until_done()
    assert made.service.finish_sampling("train", 4, {})["rollouts/without_calls_total"] == 4


def test_three_steps_in_which_the_policy_fails_every_rollout_end_the_training(tmp_path: Path) -> None:
    class Broken(_Backend):
        async def run(self, question: Question, endpoint: Endpoint) -> Answer:
            await super().run(question, endpoint)
            raise AgentError("reply 5 has no attribute 'text'")

    with _service(tmp_path, Broken()) as made:
        for step in range(3):
            made.service.submit([_prompt(str(step))])
            made.until_done(step + 1)
            if step < 2:
                made.service.finish_sampling("train", step, {})
        with pytest.raises(
            RolloutsFailedError, match=r"in 3 steps in a row all 4 rollouts failed; .* of agent: reply 5 has"
        ):
            made.service.finish_sampling("train", 2, {})


def test_a_step_in_which_the_reward_fails_for_most_answers_ends_the_training(tmp_path: Path) -> None:
    answers = itertools.cycle(["wrong", "wrong", "right", "wrong"])
    with _service(tmp_path, _Backend(), reward=_raises_if_wrong) as made:
        made.servers.answers = answers
        made.service.submit([_prompt()])
        made.until_done()
        with pytest.raises(RolloutsFailedError, match=r"3 of 4 rollouts have no reward; .* ModuleNotFoundError: .*"):
            made.service.finish_sampling("train", 4, {})


def test_the_first_failure_of_the_reward_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _service(tmp_path, _Backend(), reward=_raises_if_wrong) as made:
        for count, uid in enumerate("uv", start=1):
            made.service.submit([_prompt(uid)])
            made.until_done(count)
            assert made.service.finish_sampling("train", 4, {})["rollouts/dropped_reward_total"] == 2
    assert caplog.text.count("2 of 4 rollouts failed (left out); the first failed of reward: the reward raised") == 1


def test_right_answers_without_variants_of_their_database_are_counted(tmp_path: Path) -> None:
    async def unchecked(task: Any, answer: str, steps: Any) -> dict[str, float]:
        return {"match": float(answer == "right"), "metric/unchecked": float(answer == "right")}

    with _service(tmp_path, _Backend(), reward=unchecked) as made:
        made.service.submit([_prompt()])
        made.until_done()
        figures = made.service.finish_sampling("train", 4, {})
    assert figures["rollouts/unchecked_share"] == 1.0
    (made.run.path / "verl.jsonl").write_text('{"step": 4, "data": {"timing_s/step": 1.0}}\n')
    write_metrics(made.run)
    [line] = made.run.metrics()
    assert line["unchecked_share"] == 1.0
    assert line["reward_components"].keys() == {"match", "metric/unchecked"}


def test_what_was_sampled_and_what_was_trained_are_counted(tmp_path: Path) -> None:
    with _service(tmp_path, _Backend()) as made:
        made.servers.answers = itertools.chain(["right", "wrong"] * 2, itertools.repeat("wrong"))
        for number, uid in enumerate(("u", "v"), 1):
            made.service.submit([_prompt(uid)])
            made.until_done(number)
    figures = made.service.finish_sampling("train", 4, {})
    assert (figures["rollouts/groups_total"], figures["rollouts/groups_used_total"]) == (2, 1)
    assert (figures["rollouts/ended_total"], figures["rollouts/rollouts_trained_total"]) == (8, 4)
    assert figures["rollouts/tokens_sampled_total"] == figures["rollouts/tokens_trained_total"] + 4 * len("wrong.")
    assert figures["rollouts/gradient_share"] == 0.5
    assert figures["rollouts/truncated_share"] == 0
    assert figures["rollouts/entropy"] == 0.5  # the sampler's log-probabilities are -0.5
    assert "rollouts/groups_total" not in made.service.finish_sampling("train", 5, {})


def test_the_speed_of_a_step_is_that_of_verls_time_gpus_and_tokens(tmp_path: Path) -> None:
    logged = {"timing_s/step": 10.0, "timing_s/update_actor": 4.0, "perf/time_per_step": 10.0}
    logged |= {"perf/total_num_tokens": 60_000, "perf/throughput": 2000.0}  # on three GPUs
    with _service(tmp_path, _Backend()) as made:
        made.service.metrics.cost = cost = ModelCost(weights=1000, output=10, attention={None: 8}, frozen=False)
        made.service.submit([_prompt()])
        made.until_done()
        made.service.finish_sampling("train", 4, {"sampling": 5.0, "update": 4.0, "waiting": 1.0})
    (tmp_path / "config.json").write_text(json.dumps({**resolve("starter", trainer="verl").to_dict(), "format": 3}))
    for counted in (
        {},
        {"actor/tokens_computed_total": 70, "actor/update_flops_total": 4e6, "actor/training_gpus_max": 2},
    ):
        (tmp_path / "verl.jsonl").write_text(json.dumps({"step": 4, "data": {**logged, **counted}}))
        write_metrics(made.run)
        [line] = made.run.metrics()
        assert line["speed"].keys() == {"tokens_per_s_per_gpu", "rollouts_per_s_per_core", "gpu_idle_fraction"}
        assert (line["speed"]["tokens_per_s_per_gpu"], line["speed"]["gpu_idle_fraction"]) == (2000.0, 0.1)
        assert line["flops"]["sampling"] == 4 * cost.forward([(0, 10)], 6)
    assert (line["tokens_computed"], line["flops"]["update"]) == (70, 4e6)
    assert (line["machine"]["gpus"], line["machine"]["training_gpus"]) == (3, 2)


def test_groups_without_a_gradient_are_replaced_within_the_budget(tmp_path: Path) -> None:
    schedule = TaskSchedule([{"id": "t", "question": "Why?"}], RunConfig())
    with _service(tmp_path, _Backend(), schedule, sampling_budget=2, tasks_per_step=2) as made:
        made.servers.answers = itertools.repeat("wrong")
        for number, uid in enumerate(("u", "v", "w"), 1):
            made.service.submit([_prompt(uid)])
            made.until_done(number)
    assert [made.queue.statuses[uid][-1] for uid in ("u", "v", "w")] == ["failure", "failure", "finished"]
    assert {row.uid for row in made.queue.rows.values()} == {"w"}  # twice the two groups of a step, not more
    figures = made.service.finish_sampling("train", 4, {})
    assert (figures["rollouts/groups_total"], figures["rollouts/groups_replaced_total"]) == (3, 2)
    assert figures["rollouts/groups_skipped_total"] == 0
    assert figures["rollouts/gradient_share"] == 0
    assert "rollouts/rollouts_trained_total" not in figures
    made.service.metrics.finish_writing()
    rollouts = made.run.rollouts()[0]
    assert {rollout.task["id"] for rollout in rollouts} == {"t"}  # the schedule says of which tasks the groups are
    recorded = {rollout.group: any(call.credit for call in rollout.calls) for rollout in rollouts}
    assert recorded == {"u": False, "v": False, "w": True}


def test_rollouts_that_cannot_be_written_end_the_run(tmp_path: Path) -> None:
    with _service(tmp_path, _Backend()) as made:
        made.service.submit([_prompt()])
        made.until_done()
        (tmp_path / "rollouts").write_text("a file where the folder should be")
        made.service.finish_sampling("train", 4, {})
        with pytest.raises(FileExistsError, match="rollouts"):
            made.service.finish_sampling("train", 5, {})


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    took = []
    with _service(tmp_path, _Backend()) as made:
        for number, uid in enumerate(("u", "v"), 1):
            made.service.submit([_prompt(uid, rollouts=2 * number)])
            made.until_done(number)
            took.append(made.service.finish_sampling("train", 4, {"sampling": 1.0, "waiting": 0.5}))
        made.service.metrics.finish_writing()
    assert [figures["rollouts/ended_total"] for figures in took] == [2, 4]
    assert [figures["rollouts/groups_total"] for figures in took] == [1, 1]
    line = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[-1])
    assert (line["rollouts"], line["groups"], line["groups_skipped"]) == (6, 2, 0)
    assert {"sampling": 2.0, "waiting": 1.0}.items() <= line["seconds"].items()
    [written] = (tmp_path / "rollouts").iterdir()
    assert len(pq.read_table(written)) == 6


def test_a_failed_rollout_is_retried(tmp_path: Path) -> None:
    turns = itertools.count()

    def act() -> None:
        if next(turns) == 0:
            raise ToolError("a lost database, once")

    with _service(tmp_path, _Backend(act=act), retries=1) as made:
        made.service.submit([_prompt()])
        made.until_done()
    assert len(made.queue.rows) == 4
    assert made.service.finish_sampling("train", 4, {})["rollouts/retried_total"] == 1


def test_a_group_with_one_reward_is_removed_and_failed(tmp_path: Path) -> None:
    turns = itertools.count()

    def act() -> None:
        if next(turns) > 0:
            raise AgentError("a bug")

    with _service(tmp_path, _Backend(act=act)) as made:
        made.service.submit([_prompt()])
        made.until_done()
    assert made.queue.statuses["u"][-1] == "failure"
    assert not made.queue.rows
    assert made.service.finish_sampling("train", 4, {})["rollouts/groups_skipped_total"] == 1


def test_a_rollout_that_hangs_ends_with_the_step(tmp_path: Path) -> None:
    turns = itertools.count()

    async def act() -> None:
        if next(turns) == 0:
            await asyncio.sleep(600)

    with _service(tmp_path, _Backend(act=act), rollout_timeout_s=5.0) as made:
        made.service.submit([_prompt()])
        made.until_done()
        assert made.service.finish_sampling("train", 4, {})["rollouts/dropped_timeout_total"] == 1
    assert len(made.queue.rows) == 3


def test_many_failed_groups_end_the_training_with_the_reason(tmp_path: Path) -> None:
    def act() -> None:
        raise AgentError("no such table: singer")

    with _service(tmp_path, _Backend(act=act), tasks_per_step=1) as made:
        made.service.submit([_prompt(str(number)) for number in range(4)])
        made.until_done(4)
        with pytest.raises(RolloutsFailedError, match="no such table: singer"):
            made.service.check()


def test_validation_counts_the_agents_failures_as_wrong(tmp_path: Path) -> None:
    turns = itertools.count()

    def act() -> None:
        if next(turns) == 0:
            raise PromptTooLongError("9 tokens too many", status=400)

    with _service(tmp_path, _Backend(act=act)) as made:
        made.service.submit([_prompt(str(number), rollouts=1, partition="val") for number in range(4)])
        made.until_done(4)
        made.service.finish_sampling("val", 0, {})
    assert len(made.queue.rows) == 4
    assert sum(row.reward for row in made.queue.rows.values()) == 2.0
    assert sum(sum(row.mask) == 0 for row in made.queue.rows.values()) == 1
    [line] = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert '"accuracy": 0.5' in line


def test_a_validation_without_judged_rollouts_ends_the_training_with_the_reason(tmp_path: Path) -> None:
    async def hang() -> None:
        await asyncio.sleep(300)

    with _service(tmp_path, _Backend(act=hang), rollout_timeout_s=0.5 / 6) as made:
        made.service.submit([_prompt(str(number), rollouts=1, partition="val") for number in range(2)])
        made.until_done(2)
        with pytest.raises(RolloutsFailedError, match=r"none of 2 validation rollouts could be judged; .* timeout"):
            made.service.finish_sampling("val", 0, {})


def test_a_rollout_without_trained_calls_is_counted_and_reported(tmp_path: Path) -> None:
    with _service(tmp_path, _Backend(), tasks_per_step=1, agent_match="nobody") as made:
        made.service.submit([_prompt(str(number)) for number in range(4)])
        made.until_done(4)
        with pytest.raises(RolloutsFailedError, match="no call that is trained: see --agent-match"):
            made.service.check()
        figures = made.service.finish_sampling("train", 4, {})
    assert figures["rollouts/dropped_unused_total"] == figures["rollouts/dropped_total"] == 16


def test_rollouts_run_through_an_external_store(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{(port := processes.free_port())}"
    store = Forked(processes.store, str(tmp_path / "store.db"), port)
    try:
        processes.wait_for_store(address, store)
        with _service(tmp_path, _Backend(), external_store_address=address) as made:
            made.service.submit([_prompt(str(number)) for number in range(6)])
            made.until_done(6)
            figures = made.service.finish_sampling("train", 4, {})
    finally:
        store.kill()
        store.join()
    assert figures["rollouts/ended_total"] == len(made.queue.rows) == 24
    assert figures["rollouts/dropped_total"] == 0


class _Stack(list[Any]):
    """A TensorDict column with one value per row."""


@dataclass
class _Value:
    data: Any


class _Batch(dict[str, Any]):
    """Stands in for a TensorDict of two rows from verl's trainer."""

    def __len__(self) -> int:
        return 2


def test_prompts_are_read_from_verls_batch() -> None:
    batch = _Batch(
        uid=_Stack([_Value("a"), _Value("b")]),
        task=_Stack([_Value('{"id": 1}'), _Value('{"id": 2}')]),
        global_steps=_Value(7),
    )
    assert prompts_from_batch(batch, {"train": 4, "val": 1}) == [
        Prompt(uid="a", task={"id": 1}, rollouts=4, step=7, partition="train"),
        Prompt(uid="b", task={"id": 2}, rollouts=4, step=7, partition="train"),
    ]
    batch["validate"] = _Value(True)
    assert [prompt.partition for prompt in prompts_from_batch(batch, {"train": 4, "val": 1})] == ["val", "val"]
