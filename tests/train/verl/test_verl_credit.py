"""A rollout of five calls counts as much as a rollout of one, and each call gets its credit."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import runpy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from group_advantages import normalize
from programs import ROOT

from groundwire.adapters.tracing import LLMCall
from groundwire.domains import Task
from groundwire.train.algorithms.credit import TrainingGroup, training_items
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.verl import rows as verl_rows
from groundwire.train.verl.rows import TrainingRow, WriteCoalescer, row_fields

CASES = json.loads((ROOT / "tests" / "data" / "verl_0_9_1_groups.json").read_text())


def _call(number: int, prompt: list[int], response: list[int], version: int = 3) -> LLMCall:
    return LLMCall(
        rollout_id="r",
        attempt_id="a",
        sequence=number,
        agent="write" if number % 2 else "check",
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[-1.0] * len(response),
        weights_version=version,
    )


def _outcome(calls: list[LLMCall], reward: float = 1.0) -> Rollout:
    task: Task = {"id": "t"}
    return Rollout(task=task, group="u", outcome=Outcome(reward=reward), calls=calls)


def _group(rollouts: Sequence[tuple[int, Rollout, float]], least: float = 0.0, **settings: Any) -> TrainingGroup:
    """What is trained of the rollouts of a prompt, each given as its session, itself and its reward."""
    for _, rollout, reward in rollouts:
        rollout.outcome.reward = reward
    scored = [rollout for _, rollout, _ in rollouts]
    [group] = training_items(scored, RunConfig(**settings), least=least)
    return group


def training_rows(
    rollouts: Sequence[tuple[int, Rollout, float]],
    uid: str = "u",
    step: int = 4,
    credit: str | None = "broadcast",
    agent_match: str | None = None,
    **settings: Any,
) -> list[TrainingRow]:
    for _, rollout, _ in rollouts:
        rollout.group = uid
    group = _group(rollouts, credit=credit or "broadcast", agent_match=agent_match, **settings)
    sessions = [session for session, _, _ in rollouts]
    return verl_rows.training_rows(
        group, sessions, step=step, agent_match=agent_match, own_advantages=credit is not None
    )


def _rows(calls: list[LLMCall], **options: Any) -> list[TrainingRow]:
    return training_rows([(2, _outcome(calls), 1.0)], **options)


def _advantages(rows: list[TrainingRow]) -> torch.Tensor:
    """[rows, tokens], of the columns that verl reads."""
    fields = [row_fields(row, "spider") for row in rows]
    assert all(torch.equal(each["advantages"], each["returns"]) for each in fields)
    return torch.nn.utils.rnn.pad_sequence([each["advantages"] for each in fields], batch_first=True)


APART = [_call(1, [1, 2], [3]), _call(2, [5], [6, 7]), _call(3, [8], [9])]
GROWING = [_call(1, [1, 2], [3, 4]), _call(2, [1, 2, 3, 4, 5], [6], version=5)]


def test_the_row_with_the_last_call_has_the_highest_index() -> None:
    made = _rows(APART)
    assert [row.key for row in made] == ["u_2_0", "u_2_1", "u_2_2"]
    assert made[-1].response_ids == [9]
    # The first conversation goes on after the second has ended: it holds the last call.
    made = _rows([APART[0], APART[1], _call(3, [1, 2, 3, 8], [9])])
    assert [row.response_ids for row in made] == [[6, 7], [3, 8, 9]]


def test_a_row_has_the_weights_versions_of_its_first_and_last_token() -> None:
    [row] = _rows(GROWING)
    assert row.response_ids == [3, 4, 5, 6]
    assert row.mask == [1, 1, 0, 1]
    assert (row.first_version, row.last_version) == (3, 5)


def test_a_row_has_the_grammars_of_its_trained_replies_and_their_places() -> None:
    """The worker computes their log-probabilities over the tokens that they allow."""
    first, second = (replace(call, grammar=f'{{"schema":{{"const":{number}}}}}') for number, call in enumerate(GROWING))
    [row] = _rows([first, second])
    assert row.mask == [1, 1, 0, 1]
    assert json.loads(row.grammars) == [[0, 2, first.grammar], [3, 4, second.grammar]]
    assert row_fields(row, "spider")["grammars"] == row.grammars
    [row] = _rows([first, second], credit="last")
    assert json.loads(row.grammars) == [[3, 4, second.grammar]]
    assert [row.grammars for row in _rows(GROWING)] == [""]
    assert [bool(row.grammars) for row in _rows([APART[0], replace(APART[1], grammar="{}"), APART[2]])] == [
        False, True, False,
    ]  # fmt: skip


def test_last_trains_the_last_call_alone() -> None:
    assert [row.response_ids for row in _rows(APART, credit="last")] == [[9]]
    [row] = _rows(GROWING, credit="last")
    assert row.mask == [0, 0, 0, 1]


def test_truncated_replies_are_left_out_or_make_the_reward_the_least() -> None:
    cut = [GROWING[0], replace(GROWING[1], finish_reason="length")]
    [trained], [masked], [zeroed] = (_rows(cut, truncated=mode) for mode in ("train", "mask", "zero"))
    assert (trained.mask, trained.reward) == ([1, 1, 0, 1], 1.0)
    assert (masked.mask, masked.reward) == ([1, 1, 0, 0], 1.0)
    assert (zeroed.mask, zeroed.reward) == ([1, 1, 0, 1], 0.0)
    assert [row.reward for row in _rows(cut, truncated="zero", least=-2.0)] == [-2.0]


def test_only_the_agents_that_match_are_trained() -> None:
    assert [row.response_ids for row in _rows(APART, agent_match="check")] == [[6, 7]]
    assert _rows(APART, agent_match="judge") == []


def test_the_reward_is_at_the_last_token_of_a_row_and_lengths_agree() -> None:
    [row] = _rows(GROWING)
    tensors = row_fields(row, "spider")
    assert tensors["rm_scores"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert tensors["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert tensors["position_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    names = ("responses", "response_mask", "loss_mask", "rollout_log_probs", "old_log_probs", "advantages", "returns")
    lengths = {len(tensors[name]) for name in names}
    assert lengths == {4}


@pytest.mark.parametrize("case", CASES)
def test_verls_advantage_compares_rollouts_not_rows(case: dict[str, Any]) -> None:
    rollouts = {key.rsplit("_", 1)[0]: reward for key, reward in zip(case["keys"], case["rewards"], strict=True)}
    groups: dict[str, list[str]] = {}
    for name in rollouts:
        groups.setdefault(name.split("_")[0], []).append(name)
    by_rollout = dict[str, float]()
    for names in groups.values():
        by_rollout.update(zip(names, normalize([rollouts[name] for name in names]), strict=True))
    for key, advantages in zip(case["keys"], case["advantages"], strict=True):
        assert advantages[0] == pytest.approx(by_rollout[key.rsplit("_", 1)[0]], abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_advantages_that_rows_carry_are_verls(case: dict[str, Any]) -> None:
    by_uid: dict[str, dict[int, list[int]]] = {}
    rewards = dict(zip((tuple(key.split("_")[:2]) for key in case["keys"]), case["rewards"], strict=True))
    for key, length in zip(case["keys"], case["lengths"], strict=True):
        uid, session, _ = key.split("_")
        by_uid.setdefault(uid, {}).setdefault(int(session), []).append(length)
    carried: dict[str, list[float]] = {}
    for uid, sessions in by_uid.items():
        group = [
            (
                session,
                _outcome([_call(number, [number, session], [7] * length) for number, length in enumerate(lengths)]),
                rewards[uid, str(session)],
            )
            for session, lengths in sessions.items()
        ]
        rows = training_rows(group, uid=uid, step=4)
        carried.update(zip((row.key for row in rows), _advantages(rows).tolist(), strict=True))
    for key, expected in zip(case["keys"], case["advantages"], strict=True):
        lone = len(by_uid[key.split("_")[0]]) == 1
        width = len(carried[key])
        assert carried[key] == pytest.approx([0.0] * width if lone else expected[:width], abs=1e-5)


def test_with_discount_an_earlier_call_counts_less_than_the_one_after_it() -> None:
    group = [(0, _outcome(GROWING), 1.0), (1, _outcome([_call(1, [1, 2], [9])]), 0.0)]
    high, low = normalize([1.0, 0.0])
    rows = training_rows(group, uid="u", step=4, credit="discount", credit_discount=0.5)
    expected = [[high * 0.5, high * 0.5, 0.0, high], [low, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(_advantages(rows), torch.tensor(expected))


def test_with_turns_a_row_has_the_advantage_of_each_of_its_calls() -> None:
    first = replace(GROWING[0], reward=0.5)
    group = [(0, _outcome([first, GROWING[1]]), 0.0), (1, _outcome([_call(1, [1, 2], [9])]), 0.0)]
    high, _ = normalize([1.0, 0.0])
    rows = training_rows(group, uid="u", step=4, credit="turns")
    expected = [[high, high, 0.0, (0 - 0.5 / 3) / (0.5 * 2**-0.5 + 1e-6)], [-high, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(_advantages(rows), torch.tensor(expected))
    assert [row_fields(row, "spider")["rm_scores"].sum().item() for row in rows] == [0.0, 0.0]


def test_with_turns_the_reward_of_another_agents_or_untrainable_call_is_in_the_returns() -> None:
    def rows(**changes: Any) -> list[TrainingRow]:
        pairs = [
            [_call(1, [1, 2], [3]), replace(_call(2, [5], [6]), reward=reward, **changes)] for reward in (1.0, 0.0)
        ]
        group = [(session, _outcome(calls), 0.0) for session, calls in enumerate(pairs)]
        settings = {"credit": "turns", "agent_match": "" if changes else "write"}
        assert _group(group, **settings).teaches
        return training_rows(group, **settings)

    high, low = normalize([1.0, 0.0])
    for made in (rows(), rows(logprobs=[])):
        assert [row.advantages for row in made] == [[high], [low]]


def test_rows_of_equal_rewards_do_not_teach_with_a_call_cost() -> None:
    group = [(session, _outcome(APART[: 1 + session]), 1.0) for session in range(2)]
    rows = training_rows(group, uid="u", step=4, call_cost=0.1)
    assert all(row.has_gradient for row in rows)
    assert not _group(group, call_cost=0.1).teaches


@pytest.mark.parametrize("credit", ["turns", "broadcast"])
def test_a_bandit_learns_a_reward_in_the_middle_from_the_rows(credit: Any) -> None:
    """Digit 1 of call 1 earns 0.5 at once, digit 1 of call 2 the rollout's reward. The policy is a table of logits."""
    chance, logits = np.random.default_rng(0), torch.zeros(2, 2, requires_grad=True)
    for _ in range(20):
        chosen = [chance.random(2) < logits.softmax(-1)[:, 1].tolist() for _ in range(32)]
        group = [
            (
                session,
                _outcome([replace(_call(1, [1], [int(a)]), reward=0.5 * a), _call(2, [2], [int(b)])]),
                float(b),
            )
            for session, (a, b) in enumerate(chosen)
        ]
        rows = training_rows(group, uid="u", step=1, credit=credit)
        logprobs = torch.stack([logits.log_softmax(-1)[row.prompt_ids[0] - 1, row.response_ids[0]] for row in rows])
        loss = -(_advantages(rows)[:, 0] * logprobs).mean()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits.data -= gradient
    first, second = logits.softmax(-1)[:, 1].tolist()
    assert second > 0.9
    assert (first > 0.8) == (credit == "turns")
    assert credit == "turns" or first < 0.65


def test_without_credit_verl_computes_the_advantages() -> None:
    group = [(0, _outcome(GROWING), 1.0), (1, _outcome(APART), 0.0)]
    for row in training_rows(group, uid="u", step=4, credit=None):
        assert not {"advantages", "returns"} & row_fields(row, "spider").keys()


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed; its figures are in data/")
def test_the_figures_in_data_are_verls() -> None:
    made = runpy.run_path(str(ROOT / "tests" / "data" / "make_verl.py"))["groups"]()
    assert made == CASES


async def test_rows_that_arrive_during_a_write_are_written_by_one_call() -> None:
    calls: list[tuple[int, str]] = []
    first = asyncio.Event()

    async def store(rows: list[TrainingRow], partition: str) -> None:
        calls.append((len(rows), partition))
        await first.wait()
        if partition == "val":
            raise OSError("no room")

    coalescer, [row] = WriteCoalescer[TrainingRow]([store]), _rows(GROWING)
    puts = [asyncio.create_task(coalescer.put([row], "train")) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    puts += [asyncio.create_task(coalescer.put([row, row], "train")) for _ in range(4)]
    lost = asyncio.create_task(coalescer.put([row], "val"))
    await asyncio.sleep(0)
    assert not any(put.done() for put in puts)
    first.set()
    await asyncio.gather(*puts)
    with pytest.raises(OSError, match="no room"):
        await lost
    assert sorted(calls) == [(1, "val"), (3, "train"), (8, "train")]


async def test_as_many_calls_write_rows_as_there_are_writers() -> None:
    calls, release = list[list[int]](), asyncio.Event()

    async def store(items: list[int], partition: str) -> None:
        calls.append(items)
        await release.wait()

    coalescer = WriteCoalescer[int]([store, store])
    puts = []
    for number in range(5):
        puts.append(asyncio.create_task(coalescer.put([number], "train")))
        await asyncio.sleep(0.01)
    assert calls == [[0], [1]]
    release.set()
    await asyncio.gather(*puts)
    assert calls == [[0], [1], [2, 3, 4]]


@pytest.mark.parametrize("writers", [1, 2])
async def test_what_arrives_as_a_writer_ends_is_written(writers: int) -> None:
    written = list[int]()

    async def store(items: list[int], partition: str) -> None:
        written.extend(items)
        await asyncio.sleep(0)

    async def put(numbers: range) -> None:
        for number in numbers:
            await coalescer.put([number], "train")

    coalescer = WriteCoalescer[int]([store] * writers)
    await asyncio.wait_for(asyncio.gather(put(range(100)), put(range(100, 200))), timeout=600)
    assert sorted(written) == list(range(200))


@pytest.mark.parametrize("credit", ["broadcast", "last", "discount", "turns"])
@pytest.mark.parametrize("count", [2, 3, 7, 8, 16])
def test_equal_rewards_have_no_advantage(count: int, credit: Any) -> None:
    """verl's own GRPO gives eight rewards of 0.7 an advantage of 0.06."""
    group = [(session, _outcome(APART), 0.7) for session in range(count)]
    rows = training_rows(group, uid="u", step=4, credit=credit)
    assert len(rows) >= count
    assert not _advantages(rows).any()
