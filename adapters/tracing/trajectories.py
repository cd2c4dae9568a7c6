"""Triplets → trajectories: conversations as the policy saw them.

Triplets are merged while the next prompt begins with the whole conversation so far; only sampled tokens carry a loss.
Nothing is cut or tokenized again: each sampled token is trained on exactly once, after exactly the tokens it was
sampled after. So merging saves work and does not change what is learned. A trajectory is as long as its last triplet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from groundwire.adapters.tracing.triplets import Triplet

__all__ = ["Trajectory", "trajectories"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Merged triplets. ``response_ids``, ``loss_mask`` and ``logprobs`` have the same length.

    ``response_ids`` is everything after the first prompt: sampled tokens (mask 1), and the tokens that the agent put
    between them, such as tool results and the next question (mask 0, logprob 0.0).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    triplets: tuple[Triplet, ...]
    """In order."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


def trajectories(triplets: Iterable[Triplet]) -> list[Trajectory]:
    """Merge the triplets of a rollout, in their order, into as few trajectories as possible.

    A triplet extends the trajectory with the longest context that its prompt begins with, of whichever agent. If there
    is none (the prompt was rendered differently, or sampled again) it starts a new trajectory.
    """
    open_: list[_OpenTrajectory] = []
    for triplet in triplets:
        fitting = [each for each in open_ if each.precedes(triplet)]
        if fitting:
            max(fitting, key=lambda each: len(each.context)).add(triplet)
        else:
            open_.append(_OpenTrajectory(triplet))
    return [each.close() for each in open_]


class _OpenTrajectory:
    """A trajectory that may still grow. ``context`` is every token so far."""

    def __init__(self, triplet: Triplet) -> None:
        self.context = list(triplet.prompt_ids)
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.triplets: list[Triplet] = []
        self.add(triplet)

    def precedes(self, triplet: Triplet) -> bool:
        end, prompt = len(self.context), triplet.prompt_ids
        # Most triplets do not extend a trajectory; the length or this one token usually shows it.
        return end <= len(prompt) and prompt[end - 1] == self.context[-1] and prompt[:end] == self.context

    def add(self, triplet: Triplet) -> None:
        inserted = len(triplet.prompt_ids) - len(self.context)
        self.context = triplet.prompt_ids + triplet.response_ids
        self.mask += [0] * inserted + [1] * len(triplet.response_ids)
        self.logprobs += [0.0] * inserted + triplet.logprobs
        self.triplets.append(triplet)

    def close(self) -> Trajectory:
        start = len(self.triplets[0].prompt_ids)
        return Trajectory(
            prompt_ids=self.context[:start],
            response_ids=self.context[start:],
            loss_mask=self.mask,
            logprobs=self.logprobs,
            triplets=tuple(self.triplets),
        )
