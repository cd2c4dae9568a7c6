"""A rollout of five calls counts as much as a rollout of one, and each call gets its credit."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from groundwire.adapters.tracing import LLMCall
from groundwire.domains import Task
from groundwire.train.algorithms.credit import normalize
from groundwire.train.rollouts.outcome import RolloutRequest, RolloutResult
from groundwire.train.verl.credit_assignment import TrainingRow, discounted_advantage, training_rows
from groundwire.train.verl.transfer_queue import WriteCoalescer, row_fields

CASES = json.loads((Path(__file__).parent / "data" / "verl_0_9_1_groups.json").read_text())


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


def _outcome(calls: list[LLMCall], reward: float = 1.0) -> RolloutResult:
    task: Task = {"id": "t"}
    job = RolloutRequest(task=task, group="u", mode="train")
    return RolloutResult(
        request=job, rollout_id="r", status="succeeded", reward=reward, reward_components={}, message="", answer="",
        steps=[], calls=calls, attempts=1, seconds=1.0,
    )  # fmt: skip


def _rows(calls: list[LLMCall], **options: Any) -> list[TrainingRow]:
    return training_rows(_outcome(calls), uid="u", session=2, step=4, reward=1.0, **options)


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


def test_constrained_calls_are_context_without_a_loss() -> None:
    """verl computes log-probabilities over the whole vocabulary, and theirs are over the tokens of a grammar."""
    constrained = replace(GROWING[0], grammar='{"schema":{}}')
    [row] = _rows([constrained, GROWING[1]])
    assert row.response_ids == [3, 4, 5, 6]
    assert row.mask == [0, 0, 0, 1]
    assert _rows([constrained]) == []
    assert [row.key for row in _rows([replace(APART[0], grammar="{}"), *APART[1:]])] == ["u_2_0", "u_2_1"]


def test_last_trains_the_last_call_alone() -> None:
    assert [row.response_ids for row in _rows(APART, credit="last")] == [[9]]
    [row] = _rows(GROWING, credit="last")
    assert row.mask == [0, 0, 0, 1]


def test_only_the_agents_that_match_are_trained() -> None:
    assert [row.response_ids for row in _rows(APART, agent_match="check")] == [[6, 7]]
    assert _rows(APART, agent_match="judge") == []


def test_the_reward_is_at_the_last_token_of_a_row_and_lengths_agree() -> None:
    [row] = _rows(GROWING)
    tensors = row_fields(row, "spider")
    assert tensors["rm_scores"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert tensors["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert tensors["position_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    lengths = {len(tensors[name]) for name in ("responses", "response_mask", "loss_mask", "rollout_log_probs")}
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
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_discounted_advantage_is_verls_times_the_weight(case: dict[str, Any], weight: float) -> None:
    names, lengths = [], case["lengths"]
    for key, length in zip(case["keys"], lengths, strict=True):
        uid, session, _ = key.split("_")
        names.append(f"{uid}|{session}|{weight}:{length}")
    mask = torch.tensor([[1.0] * length + [0.0] * (6 - length) for length in lengths])
    scores = torch.zeros_like(mask)
    for row, (reward, length) in enumerate(zip(case["rewards"], lengths, strict=True)):
        scores[row, length - 1] = reward
    advantages, _ = discounted_advantage(scores, mask, names)
    torch.testing.assert_close(advantages, torch.tensor(case["advantages"]) * weight, atol=1e-5, rtol=1e-5)


def test_with_discount_an_earlier_call_counts_less_than_the_one_after_it() -> None:
    made = [*_rows(GROWING, credit="discount", discount=0.5)]
    names = [row.uid for row in made] + ["u|0|1.0:1", "pad7"]
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    scores = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0] * 4, [0.0] * 4])
    advantages, _ = discounted_advantage(scores, mask, names)
    full = torch.tensor(normalize([1.0, 0.0]))
    expected = [[full[0] * 0.5, full[0] * 0.5, 0.0, full[0]], [full[1], 0.0, 0.0, 0.0], [0.0] * 4]
    torch.testing.assert_close(advantages, torch.tensor(expected))


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed; its figures are in data/")
def test_the_figures_in_data_are_verls() -> None:
    made = runpy.run_path(str(Path(__file__).parent / "data" / "make_verl.py"))["groups"]()
    assert made == CASES


async def test_rows_that_arrive_during_a_write_are_written_by_one_call() -> None:
    calls: list[tuple[int, str]] = []
    first = asyncio.Event()

    async def store(rows: list[TrainingRow], partition: str) -> None:
        calls.append((len(rows), partition))
        await first.wait()
        if partition == "val":
            raise OSError("no room")

    coalescer, [row] = WriteCoalescer[TrainingRow](store), _rows(GROWING)
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


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_equal_rewards_have_no_advantage(count: int) -> None:
    torch = pytest.importorskip("torch")
    rewards, mask = torch.full((count, 1), 0.7), torch.ones(count, 1)
    advantages, _ = discounted_advantage(rewards, mask, [f"u|{number}|1.0:1" for number in range(count)])
    assert not advantages.any()
