"""The rollout manager, called as by verl, with the real store, runners and proxy; TransferQueue is a fake."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import openai
import pytest
from local_actor import LocalActor
from transformers import AutoTokenizer

from groundwire import domains
from groundwire.adapters import Endpoint, Question
from groundwire.train.algorithms.losses import OldLogprobs
from groundwire.train.algorithms.task_schedule import TaskSchedule
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import SHARED_PREFIXES
from groundwire.train.policy import STARTER
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.verl import agent_loop_manager, launch, rollout_workers
from groundwire.train.verl.agent_loop_manager import (
    RolloutManager,
    choose_old_logprobs,
    minibatch_prompts,
)
from groundwire.train.verl.hydra_config import (
    chooses_old_logprobs,
    compose,
    flat_config,
    has_own_engine,
    why_unconstrained,
)  # fmt: skip
from groundwire.train.verl.rollout_workers import RolloutWorker
from groundwire.train.verl.rows import RowWriter, TransferQueueRows


async def ask(question: Question, endpoint: Endpoint) -> str:
    """An agent of one call."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": question.text}], **endpoint.sampling
        )
    return reply.choices[0].message.content or ""


@dataclass
class _Client:
    """Stands in for verl's client of its inference servers."""

    current: ClassVar[_Client]
    ids: Iterator[list[int]]
    prompts: list[list[int]] = field(default_factory=list)
    output_kinds: set[Any] = field(default_factory=set)

    def __reduce__(self) -> Any:  # as verl's, a copy leads to the same servers
        _Client.current = self
        return _current_client, ()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.prompts.append(prompt_ids)
        params = pickle.loads(pickle.dumps(sampling_params))  # as it arrives at the server
        self.output_kinds.add(params.get("output_kind"))
        ids = next(self.ids)
        versions = {"min_global_steps": 2, "max_global_steps": 2}
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields=versions)


def _current_client() -> _Client:
    return _Client.current


@dataclass
class _TransferQueue:
    """Stands in for TransferQueue: tags and fields by partition and key."""

    tags: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    fields: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    calls: int = 0

    def kv_batch_put(
        self, *, keys: list[str], partition_id: str, tags: list[Any], fields: list[Any] | None = None
    ) -> None:
        self.calls += 1
        for key, tag in zip(keys, tags, strict=True):
            self.tags[partition_id, key] = tag
        for key, row in zip(keys, fields or [], strict=fields is not None):
            self.fields[partition_id, key] = row


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> _TransferQueue:
    """The fake queue, and stand-ins for the modules of verl that the manager imports."""
    made = _TransferQueue()
    _module(monkeypatch, "transfer_queue", kv_batch_put=made.kv_batch_put, init=lambda: None)
    for package in ("verl", "verl.utils"):
        _module(monkeypatch, package)
    _module(monkeypatch, "verl.utils.fs", copy_to_local=lambda path: path)
    _module(monkeypatch, "verl.utils.tensordict_utils", list_of_dict_to_tensordict=lambda rows: rows)
    for module in (agent_loop_manager, rollout_workers):
        monkeypatch.setattr(module, "run_config", lambda verl: RunConfig(**verl.groundwire.config))
    processes = SimpleNamespace(
        row_writers=[LocalActor(RowWriter()), LocalActor(RowWriter())],
        rollout_worker=lambda: LocalActor(RolloutWorker()),
    )
    monkeypatch.setattr(RolloutManager, "processes", processes)
    monkeypatch.setattr(agent_loop_manager, "patch_trainer", lambda **_: None)  # it changes verl's trainer
    _module(
        monkeypatch, "groundwire.train.verl.shared_prefixes.routing", KeyedClient=lambda client: client
    )  # a class of verl's
    return made


@pytest.mark.parametrize(
    ("settings", "vendor", "expected"),
    [
        ({}, "groundwire", True),
        ({"actor.strategy": "fsdp2"}, "groundwire", True),
        ({"actor.strategy": "megatron"}, "groundwire", False),
        ({"ref.strategy": "megatron"}, "groundwire", False),
        ({"model.external_lib": "groundwire.train.policy.attention"}, "groundwire", False),
        ({}, "nvidia", False),
    ],
)
def test_workers_derive_columns_only_with_the_engine_that_does(
    settings: dict[str, str], vendor: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    values = {"model.external_lib": SHARED_PREFIXES, "actor.strategy": "fsdp", "ref.strategy": "fsdp", **settings}
    sections: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections[section] = SimpleNamespace(**{name: value})
    assert has_own_engine(SimpleNamespace(actor_rollout_ref=SimpleNamespace(**sections))) == expected


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({}, ""),
        ({"rollout.name": "sglang"}, "only served with vLLM (rollout.name=vllm), and this run has rollout.name=sglang"),
        ({"actor.strategy": "megatron"}, "set actor.strategy and ref.strategy to fsdp or fsdp2"),
        (
            {"model.external_lib": "groundwire.train.policy.attention"},
            "leave VERL_ENGINE_VENDOR and model.external_lib",
        ),
        ({"model.fused_kernel_options.impl_backend": "triton"}, "impl_backend=triton: leave it at torch"),
    ],
)
def test_a_run_whose_workers_know_no_grammars_says_so_to_the_agent(
    setting: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "groundwire")
    fused = {"actor_rollout_ref.model.use_fused_kernels": True}
    given = {f"actor_rollout_ref.{key}": value for key, value in setting.items()}
    verl = compose(flat_config(resolve("starter", trainer="verl")) | fused | given)
    said = why_unconstrained(verl)
    assert bool(said) == bool(reason)
    assert reason in said


async def test_statuses_that_are_set_at_the_same_time_are_one_call(queue: _TransferQueue) -> None:
    rows = TransferQueueRows([LocalActor(RowWriter())], "spider")
    await asyncio.gather(*(rows.set_status(f"u{number}", "train", "running") for number in range(256)))
    assert queue.calls == 1
    assert [queue.tags["train", f"u{number}"]["status"] for number in range(256)] == ["running"] * 256
    await asyncio.gather(rows.set_status("u1", "train", "finished"), rows.set_status("u2", "train", "failure"))
    assert [queue.tags["train", uid]["status"] for uid in ("u1", "u2", "u3")] == ["finished", "failure", "running"]


@pytest.mark.usefixtures("queue")
async def test_a_write_that_never_ends_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        async def put(self, *_: Any) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("groundwire.train.verl.rows._MAX_WRITE_S", 0.05)
    rows = TransferQueueRows([LocalActor(Stuck())], "spider")
    with pytest.raises(RolloutsFailedError, match=r"has not stored the rows of a group for 0.05 s: .* --resume"):
        await rows.put([], "train")


def _config(run: RunDir, **settings: Any) -> Any:
    """The parts of verl's configuration that the manager reads."""
    config = resolve("starter", trainer="verl", backend="custom", agent=f"{__name__}:ask", n_runners=8, **settings)
    ours = config.to_dict()
    rollout = SimpleNamespace(
        n=4,
        val_kwargs=SimpleNamespace(n=1),
        max_model_len=512,
        name="vllm",
        tensor_model_parallel_size=1,
        data_parallel_size=1,
        pipeline_model_parallel_size=1,
        agent=SimpleNamespace(num_workers=2),
        multi_turn=SimpleNamespace(format="hermes"),
    )
    model = SimpleNamespace(
        path=str(STARTER), tokenizer_path=None, trust_remote_code=False, custom_chat_template=None, external_lib=None,
        override_config={}, lora_rank=0,
    )  # fmt: skip
    actor = SimpleNamespace(ppo_mini_batch_size=99, policy_loss=SimpleNamespace(loss_mode="vanilla"))
    return SimpleNamespace(
        groundwire=SimpleNamespace(run_dir=str(run.path), config=ours),
        actor_rollout_ref=SimpleNamespace(rollout=rollout, model=model, actor=actor),
        critic=SimpleNamespace(ppo_mini_batch_size=99),
        algorithm=SimpleNamespace(
            adv_estimator="groundwire",
            norm_adv_by_std_in_grpo=True,
            use_kl_in_reward=False,
            rollout_correction=SimpleNamespace(bypass_mode=False),
        ),
        trainer=SimpleNamespace(nnodes=1, n_gpus_per_node=2, v1=SimpleNamespace(trainer_mode="sync")),
        data={},
    )


def _write_tasks(run: RunDir, tasks: list[Any]) -> None:
    launch.write_tasks(run.path / "tasks" / "train.parquet", tasks, "spider")


def _until(queue: _TransferQueue, partition: str, uids: list[str]) -> list[str]:
    deadline = time.monotonic() + 600
    while any(queue.tags.get((partition, uid), {}).get("status") in (None, "running") for uid in uids):
        assert time.monotonic() < deadline, queue.tags
        time.sleep(0.05)
    return [queue.tags[partition, uid]["status"] for uid in uids]


@pytest.mark.usefixtures("vllm")
def test_prompts_become_rows_that_verl_samples(queue: _TransferQueue, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    run = RunDir.create(tmp_path, backend="custom", domain="spider", config={})
    domain = domains.get("spider")
    right, other = (dict(task) for task in domain.load(None).validation[:2])
    answers = [f"{sql} {tokenizer.eos_token}" for sql in (str(right["query"]), "SELECT 1 WHERE 0")]
    replies = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers]
    client, config = _Client(itertools.cycle(replies)), _config(run)
    _write_tasks(run, [right, other])
    # The schedule says which task is the first of step 3, whatever verl's loader has sent.
    first = TaskSchedule([right, other], RunConfig()).draw(3)
    solved = "u" if first is right else "v"
    frozen = gc.get_freeze_count()
    made = RolloutManager.create(config, client)
    try:
        assert gc.get_freeze_count() > frozen
        assert RolloutManager.current is made
        made.start_sampling()
        batch = _Batch(uid=["u", "v"], task=[json.dumps(right), json.dumps(other)], global_steps=[3, 3])
        made.generate_sequences(batch)
        assert _until(queue, "train", ["u", "v"]) == ["finished", "finished"]
        assert client.output_kinds == {"once"}
        figures = made.sampled("train", 3, rows=11)
    finally:
        made.workers.stop()
    keys = sorted(key for _, key in queue.fields)
    assert keys == [f"{uid}_{session}_0" for uid in "uv" for session in range(4)]
    rows = [queue.fields["train", key] for key in keys]
    assert all(row["rm_scores"].sum() == row["rm_scores"][-1] for row in rows)
    assert all(len(row["responses"]) == len(row["response_mask"]) == len(row["rollout_log_probs"]) for row in rows)
    assert {tuple(row["responses"].tolist()) for row in rows} == {tuple(ids) for ids in replies}
    assert {tuple(row["prompts"].tolist()) for row in rows} == {tuple(ids) for ids in client.prompts}
    assert {queue.tags["train", key]["max_global_steps"] for key in keys} == {2}
    assert (figures["rollouts/ended_total"], figures["rollouts/groups_total"]) == (8, 2)
    assert (figures["rollouts/old_logprobs_recomputed"], figures["rollouts/entropy"]) == (1.0, 0.5)
    for row in rows:  # the first answer is right for the first question alone
        assert float(row["rm_scores"][-1]) == float(row["uid"] == solved and row["responses"].tolist() == replies[0])
    assert sum(float(row["rm_scores"][-1]) for row in rows) == 8 * figures["rollouts/reward_mean"]
    for row in rows[:4] if solved == "u" else rows[4:]:
        assert bool(row["advantages"][0] > 0) == bool(row["rm_scores"][-1])
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 3  # 3 * n = 12
    [line] = [json.loads(text) for text in (run.path / "rollouts.jsonl").read_text().splitlines()]
    assert (line["step"], line["rollouts"], line["calls"]) == (3, 8, 8)


@pytest.mark.parametrize(
    ("rows", "minibatches", "devices", "size", "updates"),
    [
        (340, 1, 1, 340, 1),
        (341, 1, 1, 344, 1),
        (341, 2, 1, 172, 2),
        (42, 1, 8, 48, 1),
        (42, 4, 8, 16, 3),  # a fourth would have no rows
        (3, 2, 1, 4, 1),
    ],
)
def test_a_step_has_as_many_updates_as_set_however_many_rows_it_has(
    rows: int, minibatches: int, devices: int, size: int, updates: int
) -> None:
    """verl fills a batch up to a multiple of mini-batch and devices, and updates once for each mini-batch."""
    made = minibatch_prompts(rows, minibatches, group_size=4, devices=devices) * 4
    assert made == size
    assert math.lcm(made, devices) == made
    assert math.ceil(rows / made) == updates


def test_a_mini_batch_that_the_user_set_is_kept(queue: _TransferQueue, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="custom", domain="spider", config={})
    config = _config(run, verl={"actor_rollout_ref.actor.ppo_mini_batch_size": 99})
    _write_tasks(run, [{"id": "t", "question": "?"}])
    made = RolloutManager.create(config, _Client(iter([])))
    try:
        made.start_sampling()
        made.sampled("train", 1, rows=11)
    finally:
        made.workers.stop()
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 99


def _recomputed(made: OldLogprobs, run: RunDir, verl: Any, differences: Mapping[int, object]) -> list[int]:
    """The steps with a pass of their own; verl logs ``differences``, by step, if it has measured them."""
    steps = []
    with open(run.path / "verl.jsonl", "wb", buffering=0) as log:  # as verl's logger writes it
        log.write(b'{"step": 0, "data": {"val-core/spider/reward/mean@1": 0.5}}\n')
        for step, difference in differences.items():
            figures = choose_old_logprobs(made, verl, run, step)
            recomputed = not verl.algorithm.rollout_correction.bypass_mode
            assert figures == {"rollouts/old_logprobs_recomputed": recomputed}
            data = {"training/rollout_probs_diff_mean": difference} if recomputed else {"actor/ppo_kl": 0.1}
            log.write(json.dumps({"step": step, "data": data}).encode() + b"\n")
            steps += [step] * recomputed
    return steps


def test_old_logprobs_are_the_samplers_while_the_last_measured_difference_is_small(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="custom", domain="spider", config={})
    verl = _config(run)
    made = OldLogprobs()
    small = dict.fromkeys(range(1, 50), 0.002)
    assert _recomputed(made, run, verl, small) == [1, 21, 41]
    resumed = OldLogprobs()  # with bypass_mode as the last process left it
    large = dict.fromkeys(range(51, 54), 0.005)
    assert _recomputed(resumed, run, verl, {50: None, **large, **dict.fromkeys(range(54, 80), 0.004)}) == [
        50,  # verl logs a number that is not finite as null
        51,
        52,
        53,
        54,
        74,
    ]


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, True),
        ({"verl": {"algorithm.rollout_correction.bypass_mode": False}}, False),
        ({"verl": {"+algorithm.rollout_correction.rollout_is": "token"}}, False),
        ({"verl": {"actor_rollout_ref.actor.megatron.router_replay.mode": "R2"}}, False),
        ({"mode": "colocate_async"}, False),
        ({"loss_mode": "gspo"}, False),
        ({"use_kl_in_reward": True}, False),
    ],
)
def test_a_pass_that_the_user_chose_or_that_something_else_needs_is_kept(
    change: dict[str, Any], chosen: bool, tmp_path: Path
) -> None:
    run = RunDir.create(tmp_path, backend="custom", domain="spider", config={})
    given = change.get("verl", {})
    verl = _config(run, verl=given)
    verl.trainer.v1.trainer_mode = change.get("mode", "sync")
    verl.actor_rollout_ref.actor.policy_loss.loss_mode = change.get("loss_mode", "vanilla")
    verl.algorithm.use_kl_in_reward = change.get("use_kl_in_reward", False)
    assert chooses_old_logprobs(RunConfig(**verl.groundwire.config), verl) == chosen


def test_a_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="distillation"):
        RolloutManager.create(None, None, teacher_client=object())


class _Batch(dict[str, Any]):
    """Stands in for the TensorDict from verl's trainer."""

    def __len__(self) -> int:
        return len(self["uid"])
