"""The advantages of a group's rollouts that each have one call."""

from __future__ import annotations

from collections.abc import Sequence

from groundwire.adapters.tracing import LLMCall
from groundwire.train.algorithms.credit import assign_credit
from groundwire.train.config.resolve import resolve


def normalize(rewards: Sequence[float]) -> list[float]:
    call = LLMCall(rollout_id="r", attempt_id="a", sequence=0, prompt_ids=[1], response_ids=[2], logprobs=[-1.0])
    return [
        credit.advantage
        for [credit] in assign_credit([(reward, [call]) for reward in rewards], resolve("fast", credit="broadcast"))
    ]
