"""Values of turns by Monte Carlo: the share of successes among continuations that are sampled from a call on.

At which call a failed rollout lost its chance: the value before a call less the value after it, which is the value
before the next one, and 0 after the last, as the rollout failed. The drops of a rollout add up to its chance at the
first call, so those of all rollouts can be summed by agent and tool.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.tools.errors import CommandError
from groundwire.train.algorithms.statistics import wilson
from groundwire.train.api.replay import Branch, Replayer
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError
from groundwire.train.evaluation.diagnosis import trained_calls
from groundwire.train.evaluation.metrics import RIGHT
from groundwire.train.job.job import Job
from groundwire.train.store.rollout import Rollout

FIRST_SAMPLES = 4
"""Of each value, before samples go where they are needed."""
_CERTAIN = 0.05
"""The standard error of a value that needs no more samples."""
_ROUNDS, _LEAST = 8, 16  # of the samples that depend on earlier ones: the number of rounds, and the size of a small one


@dataclass
class TurnValue:
    """A share of successes."""

    successes: int = 0
    samples: int = 0

    def add(self, is_success: bool) -> None:
        """Count a sample."""
        self.successes, self.samples = self.successes + is_success, self.samples + 1

    @property
    def share(self) -> float:
        """The share; 0 without samples."""
        return self.successes / self.samples if self.samples else 0.0

    def __str__(self) -> str:
        """With the 95 % interval (Wilson)."""
        low, high = wilson(self.successes, self.samples)
        return f"{self.share:.2f} [{low:.2f}, {high:.2f}] ({self.successes} of {self.samples})"


@dataclass(eq=False)
class FailedTurn:
    """A trained call of a failed rollout. Rollouts that agree up to a call share the value before it."""

    rollout: Rollout
    call: LLMCall
    number: int
    """In the rollout, from 1."""
    tools: str
    """The tools that the recorded reply calls; "" if none."""
    value: TurnValue = field(default_factory=TurnValue)
    """Before the call."""
    after: TurnValue | None = None
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


def next_values(turns: Sequence[FailedTurn], count: int) -> list[FailedTurn]:
    """The turns whose values get the next ``count`` samples, some several times; none if all values are certain.

    Each value has :data:`FIRST_SAMPLES` first, then a sample goes where it takes most from the variance of the sum of
    all drops.
    """
    owners, uses = dict[int, FailedTurn](), defaultdict[int, int](int)
    for turn in turns:
        owners.setdefault(id(turn.value), turn)
        uses[id(turn.value)] += 1
    planned = {key: turn.value.samples for key, turn in owners.items()}
    chosen: list[FailedTurn] = []

    def gain(key: int) -> float:
        samples, value = planned[key], owners[key].value
        if samples < FIRST_SAMPLES:
            return float("inf")
        share = (value.successes + 1) / (value.samples + 2)  # Laplace's estimate, not 0 where all samples are alike
        variance = share * (1 - share)
        return 0.0 if variance / samples < _CERTAIN**2 else uses[key] ** 2 * variance / (samples * (samples + 1))

    while owners and len(chosen) < count and gain(best := max(planned, key=gain)):
        planned[best] += 1
        chosen.append(owners[best])
    return chosen


def losses(turns: Iterable[FailedTurn], name_of: Callable[[FailedTurn], str]) -> list[tuple[str, float]]:
    """The shares of the loss, by the names of the turns, the largest first: of the summed drops that are above 0."""
    amounts = defaultdict[str, float](float)
    for turn in turns:
        amounts[name_of(turn)] += turn.drop
    lost = {name: max(0.0, amount) for name, amount in amounts.items()}
    total = sum(lost.values()) or 1.0
    return sorted(((name, amount / total) for name, amount in lost.items()), key=lambda loss: -loss[1])


def by_text(samples: Iterable[tuple[str, bool]]) -> list[tuple[str, TurnValue]]:
    """The value of each text among ``samples`` of a text and whether it was a success; the most frequent first."""
    values = defaultdict[str, TurnValue](TurnValue)
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


def in_words(reasons: Iterable[str] | Mapping[str, int]) -> str:
    """What was left out, by its reasons."""
    return "; ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common(3))


def lost_chances(job: Job, run: RunDir, *, budget: int, on_end: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Sample the values before the trained calls of the newest failed rollouts; returns what was lost, for
    :data:`groundwire.train.report.turns.FILE`.

    At most ``budget`` continuations are sampled. Raises :class:`CommandError` if these are too few for one rollout, and
    :class:`RunDirError` if no rollout can be looked at.
    """
    left_out = Counter[str]()
    failed, total = _newest_failed(run, max(1, budget // (2 * FIRST_SAMPLES)), left_out)
    with Replayer(job, run) as replayer:
        rollouts = _affordable(_turns_of(run, replayer, failed, left_out), budget)
        rollouts = _sample(replayer, rollouts, budget, left_out, on_end)
    if not rollouts:
        raise RunDirError(f"no failed rollout of {run.path} can be looked at: {in_words(left_out)}")
    turns = [turn for of_rollout in rollouts for turn in of_rollout]
    return {
        **{"failed": total, "rollouts": len(rollouts), "left_out": dict(left_out)},
        **{"samples": replayer.samples, "model": replayer.model, "seed": job.config.seed},
        "temperature": replayer.temperature(turns[0].rollout),
        "chance": sum(of_rollout[0].value.share for of_rollout in rollouts) / len(rollouts),
        "agents": losses(turns, lambda turn: turn.call.agent or "the agent"),
        "tools": losses(turns, lambda turn: turn.tools or "no tool"),
        "turns": [
            {
                **{"rollout": turn.rollout.rollout_id, "call": turn.number, "agent": turn.call.agent or "the agent"},
                **{"share": turn.value.share, "samples": turn.value.samples, "drop": turn.drop, "text": str(turn)},
            }
            for turn in sorted(turns, key=lambda turn: -turn.drop)
        ],
    }


def _newest_failed(run: RunDir, most: int, left_out: Counter[str]) -> tuple[list[Rollout], int]:
    """The newest rollouts that the policy failed, and how many the run has."""
    damaged, match = list[str](), run.config().get("agent_match")
    newest, total = deque[Rollout](maxlen=most), 0
    for rollout in (rollout for batch in run.rollout_batches(None, damaged) for rollout in batch):
        if rollout.outcome.reward is None:
            left_out[f"failed of {rollout.outcome.failure}, which is not the policy's doing"] += 1
        elif rollout.outcome.reward <= RIGHT:
            total += 1
            if trained_calls(rollout, match):
                newest.append(rollout)
            else:
                left_out["made no call that was or could be trained"] += 1
    if damaged:
        raise RunDamagedError(damaged[0])
    if not newest:
        reasons = f": {in_words(left_out)}" if left_out else ""
        raise RunDirError(f"no rollout of {run.path} failed after a call that was trained{reasons}")
    return [*reversed(newest)], total


def _turns_of(
    run: RunDir, replayer: Replayer, failed: Sequence[Rollout], left_out: Counter[str]
) -> list[list[FailedTurn]]:
    """The turns of the rollouts that go as recorded. Those of a task that agree up to a call share its value."""
    values, rollouts = defaultdict[Any, TurnValue](TurnValue), list[list[FailedTurn]]()
    for replayed in replayer.run([Branch(rollout) for rollout in failed]):
        if replayed.difference is not None:
            left_out[f"not as recorded: {replayed.difference.sentence}"] += 1
            continue
        rollout, before, turns = replayed.recorded, list[Any](), list[FailedTurn]()
        trained = {id(call) for call in trained_calls(rollout, run.config().get("agent_match")) if not call.choice}
        for number, call in enumerate(rollout.calls, 1):
            if id(call) in trained:
                value = values[str(rollout.task["id"]), replayer.temperature(rollout), tuple(before)]
                tools = dict.fromkeys(name for name, _ in tool_calls(replayed.reply(call)))
                if turns:
                    turns[-1].after = value
                turns.append(FailedTurn(rollout, call, number, ", ".join(tools), value))
            text = message_text(replayed.reply(call))  # of an endpoint without token ids
            before.append((call.agent, call.prompt_key, text, *call.response_ids))
        rollouts.append(turns)
    return rollouts


def _affordable(rollouts: Sequence[list[FailedTurn]], budget: int) -> list[list[FailedTurn]]:
    """The first ones whose values take at most half of the budget for their first samples; one may take all."""
    chosen = list[list[FailedTurn]]()
    for turns in rollouts:
        needed = FIRST_SAMPLES * len({id(turn.value) for each in (*chosen, turns) for turn in each})
        if needed > budget and not chosen:
            raise CommandError(f"--budget {budget} is too small: a failed rollout takes at least {needed} samples")
        if 2 * needed > budget and chosen:
            break
        chosen.append(turns)
    return chosen


def _sample(
    replayer: Replayer,
    rollouts: list[list[FailedTurn]],
    budget: int,
    left_out: Counter[str],
    on_end: Callable[[], None],
) -> list[list[FailedTurn]]:
    """Add samples to the values; returns the rollouts whose values all have one."""
    drawn, left = Counter[int](), budget
    size = FIRST_SAMPLES * len({id(turn.value) for turns in rollouts for turn in turns})
    while chosen := next_values([turn for turns in rollouts for turn in turns], min(left, size)):
        branches = list[Branch]()
        for turn in chosen:
            branches.append(Branch(turn.rollout, turn.call, drawn[id(turn.value)]))
            drawn[id(turn.value)] += 1
        for turn, sampled in zip(chosen, replayer.run(branches, on_end=on_end), strict=True):
            if sampled.is_success is not None:
                turn.value.add(sampled.is_success)
            else:
                left_out[f"samples: {sampled.problem}"] += 1
        left, size = left - len(chosen), max(_LEAST, budget // _ROUNDS)
        rollouts = [turns for turns in rollouts if all(turn.value.samples for turn in turns)]
    return rollouts
