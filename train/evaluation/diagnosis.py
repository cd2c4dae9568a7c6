"""Explains why a rollout taught the policy nothing, from its row in ``rollouts.parquet``.

A rollout is trained on if it has a reward, if at least one call of a trained agent has token ids, and if its reward
differs from its group's mean. Each rule below tests one condition, in this order; the first that fails is the reason.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from groundwire.train.evaluation.credits import group_key, row_credits, trained_calls
from groundwire.train.evaluation.failed_rollouts import MAX_MESSAGE, first_failure, rollouts_text, scored
from groundwire.train.evaluation.metrics import made_no_call

__all__ = [
    "KINDS",
    "Reason",
    "RolloutNotes",
    "agent_notes",
    "diagnose",
    "never_called",
    "nothing_to_train",
]

Row = Mapping[str, Any]
_log = logging.getLogger(__name__)

KINDS = {
    "trained": "trained",
    "validation": "validation: never trained on",
    "no_calls": "judged without an LLM call, which trains nothing",
    "no_token_ids": "no token ids from the endpoint",
    "calls_failed": "every LLM call failed",
    "bad_calls": "calls that cannot be trained on",
    "agent_match": "agent_match matched none of its agents",
    "prompt_too_long": "prompt over the limit",
    "no_result": "no result from the runner",
    "not_stored": "its LLM calls are not in the store",
    "timeout": "not finished in time",
    "reward": "the reward could not be computed",
    "unreadable_answer": "the reward cannot read the answer",
    "judge_abstained": "the judge gave no verdict",
    "refused": "its runner does not allow the request",
    "endpoint": "the endpoint failed",
    "agent": "the agent's own code failed",
    "malformed_output": "the agent cannot use a reply",
    "turn_limit": "the agent reached its limit of turns",
    "setup": "the agent failed before its first LLM call, or as the run is set up",
    "tool": "a tool failed, or what it runs on",
    "failed": "another failure",
    "equal_rewards": "every reward of its group was equal",
    "only_reward": "no other rollout of its group has a reward",
    "mean_reward": "its reward is its group's mean",
}
"""The kinds of :class:`Reason` with their descriptions."""

_MIN_ANSWERS = 5
"""Fewer equal answers may be right."""
_ROUNDING = 1e-6  # of advantages
_NO_CALL = (
    "no LLM call reached the proxy: the agent answered without one, or called another address than the base URL of its "
    "endpoint"
)
_CACHES = (
    "a cache of the agent may answer in place of the model: turn it off (DSPy: dspy.configure_cache(), LangChain: "
    "set_llm_cache(None), LiteLLM: litellm.cache = None, or one of your own); or a worker thread or task that serves "
    "several rollouts makes their calls, and all count for the rollout that started it: start one in each rollout"
)
_NO_IDS = "the server sent no token ids"
# The messages of groundwire's server, of vLLM (two), and of OpenAI.
_TOO_LONG = (
    re.compile(r"prompt has (?P<prompt>\d+) tokens, and the model's context of (?P<limit>\d+)"),
    re.compile(r"maximum context length is (?P<limit>\d+) tokens.*?(?P<prompt>\d+) (?:input )?tokens", re.DOTALL),
    re.compile(r"prompt \(length (?P<prompt>\d+)\).*?maximum model length of (?P<limit>\d+)", re.DOTALL),
)


@dataclass(frozen=True)
class Reason:
    """Why a rollout taught nothing, or that it was trained on: a key of :data:`KINDS`, and an explanation."""

    kind: str
    text: str


def diagnose(rows: Sequence[Row], settings: Mapping[str, Any] = MappingProxyType({})) -> list[Reason]:
    """The reason of each row. ``rows`` are whole steps, since each rollout is compared with its group; ``settings`` are
    the run's.
    """
    match = settings.get("agent_match")
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["reward"] is not None:
            groups[group_key(row)].append(row)
    return [_reason(row, groups[group_key(row)], match) for row in rows]


def nothing_to_train(rows: Sequence[Row], *, agent_match: str | None = None) -> str:
    """Why no row (of whole steps, or a validation) gives a triplet; empty if one does."""
    if silent := never_called(rows):
        return f"no rollout gave anything to train on: {silent}"
    reasons = [_no_triplets(row, agent_match) for row in rows]
    found = [reason for reason in reasons if reason]
    if not found or len(found) < len(rows):
        return ""
    texts = {reason.kind: reason.text for reason in reversed(found)}
    counts = Counter(reason.kind for reason in found).most_common()
    parts = [f"{count} of {len(rows)}: {texts[kind]}" for kind, count in counts]
    return f"no rollout gave anything to train on. {'; '.join(parts)}"


def never_called(rows: Sequence[Row]) -> str:
    """What is known if no row (of a validation) had an LLM call; empty if one had."""
    if not rows or not all(map(made_no_call, rows)):
        return ""
    return f"none of {len(rows)} {rollouts_text(rows)} made an LLM call: {rows[0]['message'] or _NO_CALL}; {_CACHES}"


class RolloutNotes:
    """Shows, once each: that rollouts made no LLM call, that a cache of the agent answers, what ``credit=last`` leaves
    out, and the first failures of each type. The last is for trainers, which give the folder of the ``run``: an
    evaluation shows them with its results.
    """

    def __init__(self, show_note: Callable[[str], None], *, run: Path | None = None, credit: str = "") -> None:
        self._show_note, self._run, self._credit = show_note, run, credit
        self._shown, self._asked = set[str](), set[str]()

    def show(self, rows: Sequence[Row]) -> None:
        """``rows`` are the rollouts of a step or validation."""
        self._show_silent(rows)
        if self._credit == "last":
            self._show_left_out(rows)
        for status in dict.fromkeys(row["status"] for row in rows if row["status"] != "succeeded" and self._run):
            failed = [row for row in rows if row["status"] == status]
            text = f"{_share(failed, rows)} failed ({scored(failed[0])}); {first_failure(failed)}"
            self._once(status, f"{text}. More: groundwire why {self._run}")

    def _show_silent(self, rows: Sequence[Row]) -> None:
        silent = [row for row in rows if made_no_call(row)]
        self._asked |= {row["task_id"] for row in rows if row["status"] == "succeeded" and not made_no_call(row)}
        if silent:
            reason = max((row["message"] or _NO_CALL for row in silent), key=len)  # one that names hosts, if there is
            text = f"{_share(silent, rows)} made no LLM call: they are judged, and train nothing. {reason}"
            self._once("silent", text)
        if cached := [row for row in silent if row["task_id"] in self._asked]:
            text = f"{_share(cached, rows)} made no LLM call, though others of their questions did: {_CACHES}"
            self._once("cached", text, partial(_log.warning, "%s"))

    def _show_left_out(self, rows: Sequence[Row]) -> None:
        pairs = (pair for row in rows for pair in zip(row["calls"] or (), row_credits(row), strict=False))
        trained = [(call, credit) for call, credit in pairs if credit]
        if left := sum(credit.weight == 0 and call["finish_reason"] != "length" for call, credit in trained):
            share = f"{left} of {len(trained)} calls of this step ({left / len(trained):.0%}) teach nothing"
            only = "credit=last trains only the last request of a rollout"
            self._once("last", f"{only}: {share}; credit=broadcast and credit=turns train all calls")

    def _once(self, kind: str, note: str, show: Callable[[str], None] | None = None) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            (show or self._show_note)(note)


def _share(part: Sequence[Row], rows: Sequence[Row]) -> str:
    return f"{len(part)} of {len(rows)} {rollouts_text(rows)}"


def agent_notes(rows: Sequence[Row], models: Iterable[str], served: str) -> list[str]:
    """What a user should know of the first rollouts of an agent: the models that it asked for, and odd answers.

    ``models`` are those of its calls, ``served`` is the policy's own name.
    """
    return [note for note in (_models_note(models, served), _answer_warning(rows)) if note]


def _answer_warning(rows: Sequence[Row]) -> str:
    """A warning if all answers to different tasks are empty or equal; empty if not."""
    answers = {row["task_id"]: row["answer"].strip() for row in rows if row["status"] == "succeeded"}
    if len(answers) < _MIN_ANSWERS or len(set(answers.values())) > 1:
        return ""
    [answer] = set(answers.values())
    same = f"the same: {answer[:MAX_MESSAGE]!r}" if answer else "empty"
    return (
        f"the answers to all {len(answers)} tasks are {same}. If the agent answers in another form, name a function "
        "that reads the answer from its result: --agent-output module:name"
    )


def _models_note(models: Iterable[str], served: str) -> str:
    """A note on the model names that the agents asked for, if the policy answered under other names than its own."""
    counts = Counter(model for model in models if model not in ("", served))
    names = ", ".join(f"{name} ({count} calls)" for name, count in counts.most_common())
    return f"the policy answered the calls to {names}; --train-model selects models" if names else ""


def _reason(row: Row, group: Sequence[Row], agent_match: str | None) -> Reason:
    """``group`` are the rows of its group with a reward."""
    failure = _failure(row)
    if row["mode"] == "val":
        validated = Reason("validation", "a validation rollout: it is judged, and never trained on")
        return failure or _no_triplets(row, None) or validated
    if failure is not None and row["reward"] is not None:
        reason = _reason({**row, "status": "succeeded"}, group, agent_match)
        return Reason(reason.kind, f"{failure.text}; {reason.text}")
    return (
        failure
        or _no_triplets(row, agent_match)
        or _no_gradient(row, group, agent_match)
        or Reason("trained", _trained_text(row, [each["reward"] for each in group], agent_match))
    )


def _failure(row: Row) -> Reason | None:
    """The failure of a rollout, and what it scores; None if it succeeded."""
    if row["status"] == "succeeded":
        return None
    reason = _failure_reason(row)
    return Reason(reason.kind, f"{reason.text} ({scored(row)})")


def _failure_reason(row: Row) -> Reason:
    status, message = row["status"], row["message"] or "no message"
    if status == "prompt_too_long":
        return Reason("prompt_too_long", _too_long_text(message))
    if status == "no_result":
        return Reason("no_result", f"the store has neither its reward nor its failure: {message}")
    if status == "endpoint" and (problems := _untrainable_reasons(row)):
        return Reason("endpoint", f"{KINDS['endpoint']}: {message}; its last call {problems[-1]}")
    kind = status if status in KINDS else "failed"
    return Reason(kind, f"{KINDS[kind]} after {row['attempts']} attempt(s): {message}")


def _too_long_text(message: str) -> str:
    for pattern in _TOO_LONG:
        if match := pattern.search(message):
            over = int(match["prompt"]) - int(match["limit"])
            by = f"over the limit by {over} tokens" if over > 0 else "as long as the limit, without space for a reply"
            return f"prompt {by} ({match['prompt']} of {match['limit']}): shorten the schema, or serve a longer context"
    return f"prompt over the limit: {message}"


def _no_triplets(row: Row, agent_match: str | None) -> Reason | None:
    if trained_calls(row, agent_match):
        return None
    if row["calls"]:
        names = ", ".join(sorted({call["agent"] or "(no name)" for call in row["calls"]}))
        return Reason("agent_match", f"agent_match {agent_match!r} matched none of its agents; names seen: {names}")
    return _failure(row) or _no_trainable_call(_untrainable_reasons(row), row["message"])


def _no_trainable_call(problems: Sequence[str], message: str | None) -> Reason:
    """The reason if no call can be trained on; ``problems`` has one entry for each call."""
    if not problems:
        return Reason("no_calls", message or _NO_CALL)
    if all(problem == _NO_IDS for problem in problems):
        return Reason(
            "no_token_ids",
            f"the endpoint sent no token ids in any of {len(problems)} call(s): training needs a server with "
            "return_token_ids, which vLLM has since 0.10.2",
        )
    if all(problem.startswith("failed") for problem in problems):
        return Reason("calls_failed", f"each of its {len(problems)} call(s) failed; the last {problems[-1]}")
    return Reason("bad_calls", f"none of its {len(problems)} call(s) can be trained on; the last: {problems[-1]}")


def _no_gradient(row: Row, group: Sequence[Row], agent_match: str | None) -> Reason | None:
    if (recorded := row_credits(row)) and not any(recorded):
        return Reason("bad_calls", f"none of its {len(recorded)} call(s) was trained: verl trains no constrained reply")
    compared = [each for each in group if trained_calls(each, agent_match)]
    if len(compared) < 2:
        return Reason("only_reward", "no other rollout of its group has a reward to compare it with")
    rewards = [each["reward"] for each in compared]
    mean = sum(rewards) / len(rewards)
    if not any(_has_gradient(each, mean) for each in compared):
        equal = min(rewards) == max(rewards)
        text = f"all {len(rewards)} rewards of its group were {row['reward']:g}"
        return Reason("equal_rewards", text if equal else "the returns of comparable calls of its group were equal")
    if not _has_gradient(row, mean):
        at_mean = math.isclose(row["reward"], mean, abs_tol=1e-9)
        text = f"its reward {row['reward']:g} is its group's mean"
        return Reason("mean_reward", text if at_mean else "the return of each call is the mean of comparable calls")
    return None


def _has_gradient(row: Row, mean: float) -> bool:
    """Whether a rollout was trained; by its reward if verl computed the advantages, whose estimator compares them."""
    if credits := row_credits(row):
        return any(abs(credit.weight * credit.advantage) > _ROUNDING for credit in credits if credit)
    return not math.isclose(row["reward"], mean, abs_tol=1e-9)


def _trained_text(row: Row, group: Sequence[float], agent_match: str | None) -> str:
    calls = trained_calls(row, agent_match)
    tokens = sum(len(call["response_ids"]) for call in calls)
    other_calls = len(row["calls"]) - len(calls)
    others = f", {other_calls} {'of other agents' if agent_match else 'constrained'} left out" if other_calls else ""
    mean = sum(group) / max(1, len(group))
    return (
        f"trained on {tokens} tokens of {len(calls)} call(s){others}: reward {row['reward']:g}, mean of its group "
        f"{mean:.3g}"
    )


def _untrainable_reasons(row: Row) -> list[str]:
    """Why each call without token ids cannot be trained on."""
    return [call["untrainable_reason"] for call in json.loads(row.get("untrainable") or "[]")]
