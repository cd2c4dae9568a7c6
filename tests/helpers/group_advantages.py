"""The advantages of a group's rollouts that each have one call."""

from __future__ import annotations

from collections.abc import Sequence

from groundwire.adapters.tracing import Triplet
from groundwire.train.algorithms.credit import assign_credit


def normalize(rewards: Sequence[float]) -> list[float]:
    call = Triplet(
        prompt_ids=[1],
        response_ids=[2],
        logprobs=[-1.0],
        reward=None,
        call_reward=None,
        agent="",
        sequence=0,
        choice=None,
        weights_version=None,
        first_weights_version=None,
    )
    return [credit.advantage for [credit] in assign_credit([(reward, [call]) for reward in rewards])]
