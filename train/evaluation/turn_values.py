"""Values of turns by Monte Carlo: the share of successes among continuations that are sampled from a call on.

At which call a failed rollout lost its chance: the value before a call less the value after it, which is the value
before the next one, and 0 after the last, as the rollout failed. The drops of a rollout add up to its chance at the
first call, so those of all rollouts can be summed by agent and tool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.train.algorithms.statistics import wilson
from groundwire.train.store.rollout import Rollout

FIRST_SAMPLES = 4
"""Of each value, before samples go where they are needed."""
_CERTAIN = 0.05
"""The standard error of a value that needs no more samples."""


@dataclass
class Value:
    """A share of successes."""

    successes: int = 0
    samples: int = 0

    def add(self, is_success: bool) -> None:
        """Count a sample."""
        self.successes += is_success
        self.samples += 1

    @property
    def share(self) -> float:
        """The share; 0 without samples."""
        return self.successes / self.samples if self.samples else 0.0

    @property
    def variance(self) -> float:
        """Of one sample, by Laplace's estimate, which is not 0 where all are alike."""
        share = (self.successes + 1) / (self.samples + 2)
        return share * (1 - share)

    def __str__(self) -> str:
        """With the 95 % interval (Wilson)."""
        low, high = wilson(self.successes, self.samples)
        return f"{self.share:.2f} [{low:.2f}, {high:.2f}] ({self.successes} of {self.samples})"


@dataclass(eq=False)
class Turn:
    """A trained call of a failed rollout. Rollouts that agree up to a call share the value before it."""

    rollout: Rollout
    call: LLMCall
    number: int
    """In the rollout, from 1."""
    tools: str
    """The tools that the recorded reply calls; "" if none."""
    value: Value = field(default_factory=Value)
    """Before the call."""
    after: Value | None = None
    """Before the next trained call; None after the last."""

    @property
    def drop(self) -> float:
        """What the call lost of the chance; negative if it gained."""
        return self.value.share - (self.after.share if self.after else 0.0)

    def __str__(self) -> str:
        agent = f" ({self.call.agent})" if self.call.agent else ""
        tools = f", which calls {self.tools}" if self.tools else ""
        after = str(self.after) if self.after else "0, as it failed"
        return f"call {self.number}{agent}{tools}: chance {self.value}, after it {after}"


def next_values(turns: Sequence[Turn], count: int) -> list[Turn]:
    """The turns whose values get the next ``count`` samples, some several times; none if all values are certain.

    Each value has :data:`FIRST_SAMPLES` first, then a sample goes where it takes most from the variance of the sum of
    all drops.
    """
    owners, uses = dict[int, Turn](), defaultdict[int, int](int)
    for turn in turns:
        owners.setdefault(id(turn.value), turn)
        uses[id(turn.value)] += 1
    planned = {key: turn.value.samples for key, turn in owners.items()}
    chosen: list[Turn] = []

    def gain(key: int) -> float:
        samples, variance = planned[key], owners[key].value.variance
        if samples < FIRST_SAMPLES:
            return float("inf")
        return 0.0 if variance / samples < _CERTAIN**2 else uses[key] ** 2 * variance / (samples * (samples + 1))

    while owners and len(chosen) < count and gain(best := max(planned, key=gain)):
        planned[best] += 1
        chosen.append(owners[best])
    return chosen


def losses(turns: Iterable[Turn], name_of: Callable[[Turn], str]) -> list[tuple[str, float]]:
    """The shares of the loss, by the names of the turns, the largest first: of the summed drops that are above 0."""
    amounts = defaultdict[str, float](float)
    for turn in turns:
        amounts[name_of(turn)] += turn.drop
    lost = {name: max(0.0, amount) for name, amount in amounts.items()}
    total = sum(lost.values()) or 1.0
    return sorted(((name, amount / total) for name, amount in lost.items()), key=lambda loss: -loss[1])


def by_text(samples: Iterable[tuple[str, bool]]) -> list[tuple[str, Value]]:
    """The value of each text among ``samples`` of a text and whether it was a success; the most frequent first."""
    values = defaultdict[str, Value](Value)
    for text, is_success in samples:
        values[text].add(is_success)
    return sorted(values.items(), key=lambda item: -item[1].samples)


def tool_calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The names and arguments of the tool calls in an assistant's message."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


def message_text(message: Mapping[str, Any]) -> str:
    """The text of an assistant's message, and its tool calls."""
    calls = [f"{name}({arguments})" for name, arguments in tool_calls(message)]
    return " ".join(filter(None, [message.get("content"), *calls]))
