"""Figures of a training step that tell whether learning works, and rules that warn when one of them says it does not.

Both trainers write the figures into ``metrics.jsonl`` under the same names, which
:class:`groundwire.train.artifacts.metrics_lines.MetricsLine` describes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from groundwire.adapters.tracing import LLMCall, calls_of_agents
from groundwire.adapters.tracing.trajectories import token_bytes
from groundwire.rewards import unchecked_of
from groundwire.rewards.attack.watch import is_attack
from groundwire.train.store.rollout import Rollout

Line = Mapping[str, Any]
"""A line of ``metrics.jsonl``."""

_STEPS = 3  # steps in a row in which a figure must be bad: a single one may be chance
_MAX_DIFFERENCE = 0.02  # of token probabilities: 0.001 to 0.01 is usual for bfloat16 servers, 0 with the local trainer
MAX_SAMPLER_KL = 0.05
MIN_ENTROPY_SHARE = 0.1
"""Of the entropy in the first steps."""
MIN_GRADIENT_SHARE = 0.1
MAX_TRUNCATED = 0.2
_MIN_PAIRS, _MAX_EXCESS = 50, 0.25  # of replies to one prompt; the share that may be equal beyond what is predicted
_PAIRS = {"pairs": "same_prompt_pairs", "equal": "same_prompt_equal", "expected": "same_prompt_expected"}
"""The counts of :func:`reply_counts` that the figure ``same_prompt`` has."""


def reply_counts(rollouts: Iterable[Rollout], agent_match: str | None = None) -> dict[str, Any]:
    """Counts in training rollouts that add up over parts of a step.

    ``right`` are the answers that a reward with variants paid, ``right_unchecked`` those of them without variants.
    Replies of one group to the same prompt are compared in pairs: how many are equal, and how many would be if each had
    been sampled from the policy, by the first one's probability.
    """
    names = ("replies", "replies_truncated", "right", "right_unchecked", "known_attacks", *_PAIRS.values())
    counts: dict[str, Any] = dict.fromkeys(names, 0)
    previous: dict[tuple[Any, ...], LLMCall] = {}
    for rollout in rollouts:
        unchecked = unchecked_of(rollout.outcome.reward_components)
        if unchecked is not None and (rollout.outcome.reward or 0) > 0:
            counts["right"] += 1
            counts["right_unchecked"] += unchecked
        counts["known_attacks"] += is_attack(rollout.outcome.reward_components)
        for call in calls_of_agents(rollout.trainable_calls, agent_match):
            counts["replies"] += 1
            counts["replies_truncated"] += call.truncated
            prompt = (rollout.group, rollout.sampling.get("temperature"), token_bytes(call.prompt_ids))
            if (other := previous.get(prompt)) is not None:
                counts["same_prompt_pairs"] += 1
                counts["same_prompt_equal"] += other.response_ids == call.response_ids
                counts["same_prompt_expected"] += math.exp(sum(other.logprobs))
            previous[prompt] = call
    return counts


def step_figures(line: Line, counts: Mapping[str, float]) -> dict[str, Any]:
    """The figures that follow from a step's line and its :func:`reply_counts`."""
    figures: dict[str, Any] = {}
    if line.get("groups"):
        figures["gradient_share"] = round(line["groups_used"] / line["groups"], 4)
    if counts.get("replies"):
        figures["truncated_share"] = round(counts["replies_truncated"] / counts["replies"], 4)
        figures["same_prompt"] = {name: round(counts[count], 2) for name, count in _PAIRS.items()}
    if counts.get("right"):
        figures["unchecked_share"] = round(counts["right_unchecked"] / counts["right"], 4)
    if counts.get("known_attacks"):
        figures["known_attacks"] = int(counts["known_attacks"])
    return figures


def warnings_by_step(lines: Iterable[Line]) -> Iterator[str]:
    """What a run with these lines has warned of, each with its step."""
    rules = HealthRules()
    for line in lines:
        yield from (f"step {line['step']}: {warning}" for warning in rules.check(line))


class HealthRules:
    """Warns once per run and rule. :meth:`check` gets each line of ``metrics.jsonl`` in order."""

    def __init__(self, earlier: Iterable[Line] = ()) -> None:
        """``earlier`` are the lines of a resumed run; their warnings have been given."""
        self._lines: list[Line] = []
        self._given: set[Callable[[Sequence[Line]], str]] = set()
        for line in earlier:
            self.check(line)

    @property
    def last_step(self) -> int:
        """The step of the last line; -1 before the first."""
        return self._lines[-1]["step"] if self._lines else -1

    def check(self, line: Line) -> list[str]:
        """The new warnings at this line."""
        if self.last_step == line["step"]:
            self._lines.pop()  # it lacked its validation
        self._lines.append(line)
        warnings = []
        for rule in _RULES:
            if rule not in self._given and (warning := rule(self._lines)):
                self._given.add(rule)
                warnings.append(warning)
        return warnings


def _last(lines: Sequence[Line], name: str, count: int = _STEPS) -> list[float]:
    """The figure's values in the last ``count`` lines of steps; empty if one lacks it or there are fewer."""
    steps = [line for line in lines if line.get("step", 0) > 0][-count:]
    values = [line[name] for line in steps if line.get(name) is not None]
    return values if len(values) == count else []


def _sampler_disagrees(lines: Sequence[Line]) -> str:
    limits = (
        ("probability_difference", _MAX_DIFFERENCE, "token probabilities differ by"),
        ("sampler_kl", MAX_SAMPLER_KL, "the KL divergence is"),
    )
    found = [(text, limit, _last(lines, name)) for name, limit, text in limits]
    wrong = [f"{text} {fmean(values):.2g}" for text, limit, values in found if values and min(values) > limit]
    if not wrong:
        return ""
    return (
        f"the sampler and the trainer disagree: {' and '.join(wrong)} before the first update of a step. Compare "
        "their weights, precision, chat template and temperature. If they must differ (other kernels, asynchronous "
        "rollouts), correct for it: with verl, algorithm.rollout_correction"
    )


def _entropy_collapsed(lines: Sequence[Line]) -> str:
    measured = [line["entropy"] for line in lines if line.get("entropy") is not None]
    last = _last(lines, "entropy")
    if len(measured) < 2 * _STEPS or not last or max(last) >= MIN_ENTROPY_SHARE * fmean(measured[:_STEPS]):
        return ""
    return (
        f"the entropy fell from {fmean(measured[:_STEPS]):.2g} to {last[-1]:.2g} nats per token: the policy has almost "
        "stopped exploring. Lower learning_rate, or raise clip_high, temperature or entropy_coef"
    )


def _groups_equal(lines: Sequence[Line]) -> str:
    shares, rewards = _last(lines, "gradient_share"), _last(lines, "reward")
    if not shares or fmean(shares) >= MIN_GRADIENT_SHARE:
        return ""
    if rewards and min(rewards) == max(rewards):
        advice = f"Every reward was {rewards[0]:g}. If it stays so, check the reward (groundwire audit) or the tasks"
    else:
        advice = "Take tasks that the policy solves sometimes, a larger group_size, or a sampling_budget above 1"
    return (
        f"{fmean(shares):.0%} of the groups in the last {_STEPS} steps had different rewards; groups with equal "
        f"rewards teach nothing. {advice}"
    )


def _replies_truncated(lines: Sequence[Line]) -> str:
    shares = _last(lines, "truncated_share")
    if not shares or fmean(shares) <= MAX_TRUNCATED:
        return ""
    return (
        f"{fmean(shares):.0%} of the replies in the last {_STEPS} steps ended at max_tokens, before the policy ended "
        "them: raise max_tokens, let the agent ask for shorter replies, or leave them out of the loss (truncated=mask)"
    )


def _validation_fell(lines: Sequence[Line], name: str) -> str:
    """A warning if this line's validation is significantly below the best one, and the reward has risen since that."""
    last = lines[-1].get(name) or {}
    if last.get("accuracy") is None:
        return ""
    same = [line for line in lines if (line.get(name) or {}).get("total") == last["total"]]
    best = max((line for line in same if line[name]["accuracy"] is not None), key=lambda line: line[name]["accuracy"])
    place, top = lines.index(best), best[name]
    before, after = (
        [line["reward"] for line in part if line.get("reward") is not None][-_STEPS:]
        for part in (lines[: place + 1 + _STEPS], lines[place + 1 :])
    )
    if last["ci95"][1] >= top["accuracy"] or top["ci95"][0] <= last["accuracy"]:
        return ""
    if not before or not after or fmean(after) <= fmean(before):
        return ""
    return (
        f"the training reward rose from {fmean(before):.3f} to {fmean(after):.3f}, while the validation fell from "
        f"{top['accuracy']:.3f} at step {best['step']} to {last['accuracy']:.3f}: the policy learns what the reward "
        "pays and not what the validation measures. Read rewarded answers (groundwire report), then change the "
        f"reward, or stop at step {best['step']}"
    )


def _updates_skipped(lines: Sequence[Line]) -> str:
    if not _last(lines, "updates_skipped"):
        return ""
    return (
        f"each of the last {_STEPS} steps had an update whose gradient is not finite, which is skipped: lower "
        "learning_rate, or train in float32"
    )


def _sampling_ignored(lines: Sequence[Line]) -> str:
    counts: Counter[str] = Counter()
    for line in lines[-_STEPS:]:
        counts.update(line.get("same_prompt") or {})
    pairs = counts["pairs"]
    if pairs < _MIN_PAIRS or counts["equal"] - counts["expected"] <= _MAX_EXCESS * pairs:
        return ""
    return (
        f"{counts['equal'] / pairs:.0%} of the replies to a repeated prompt are equal, where sampling gives "
        f"{counts['expected'] / pairs:.0%}: they are not sampled anew. Turn off caches of replies "
        "between the agent and the policy"
    )


def _answers_unchecked(lines: Sequence[Line]) -> str:
    shares = [line["unchecked_share"] for line in lines if line.get("unchecked_share") is not None]
    if len(shares) < _STEPS or not any(shares):
        return ""
    return (
        f"{fmean(shares):.1%} of the right answers of {len(shares)} steps were judged on their database alone, "
        "where a memorised result wins, too: no variant can be made that tells their gold from a constant. groundwire "
        "audit shows such tasks"
    )


def _attacks_win(lines: Sequence[Line]) -> str:
    if not (count := lines[-1].get("known_attacks")):
        return ""
    return (
        f"{count} rollouts of step {lines[-1]['step']} won by wrong answers, with a known attack on the reward, which "
        "reward_components names. Change the reward as groundwire audit --attack says, or set zero_attacks=true"
    )


_RULES = (
    _sampler_disagrees,
    _entropy_collapsed,
    _groups_equal,
    _replies_truncated,
    lambda lines: _validation_fell(lines, "validation") or _validation_fell(lines, "validation_sampled"),
    _updates_skipped,
    _sampling_ignored,
    _answers_unchecked,
    _attacks_win,
)
