"""What is learned, as chats: the accepted traces, with those of held-out tasks, and the right answers of a teacher that
gives no log-probabilities of the policy's tokens (:mod:`groundwire.train.algorithms.distillation`).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groundwire.domains.held_out import question_key
from groundwire.tools.files import parse_json, shorten_repr
from groundwire.tools.terminal import counted
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.evaluator import runtime_of
from groundwire.train.evaluation.validation import validation_deadline_s, validation_requests
from groundwire.train.job.job import Job
from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.sft.data.examples import encode
from groundwire.train.sft.data.load import turns_of
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.export import to_chats
from groundwire.train.traces.record import TracedCall, make_rollout

_LEAST_REWARD = 0.5
_CALL = ("rollout_id", "attempt_id", "sequence", "agent", "model", "status", "error", "finish_reason")

_COMPARED = 4
"""Prompts from which on what they have in common is taken for the agent's own: a few may be of similar tasks."""


@dataclass(frozen=True)
class Choice:
    """Which calls of which traces are learned."""

    accepts: Callable[[Rollout], bool | None]
    """Whether the answer of a trace is accepted; None if nothing says it."""
    split: Callable[[str], str | None]
    """The split of a task by its :func:`question_key`; None for no task."""
    agent: str = ""
    model: str = ""
    """Regular expressions that are searched in the names of a call; empty: all."""

    def is_trained(self, call: TracedCall) -> bool:
        """Whether a call is one of the agent and the model whose replies are learned."""
        return bool(re.search(self.agent, call.agent) and re.search(self.model, call.model))


@dataclass
class Written:
    """What :func:`write_chats` wrote."""

    replies: Counter[str] = field(default_factory=Counter)
    """By split."""
    traces: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason."""
    sources: Counter[str] = field(default_factory=Counter)
    """The formats of the traces."""
    names: Counter[str] = field(default_factory=Counter)
    """The agents and models of the calls that are learned."""

    def lines(self) -> Iterator[str]:
        """For the user."""
        yield f"traces: {', '.join(f'{name} {count:,}' for name, count in self.sources.most_common())}"
        for split, what in (("train", "to learn"), ("validation", "held out")):
            yield f"{what}: {counted(self.replies[split], 'call')} of {counted(self.traces[split], 'accepted trace')}"
        yield f"calls of: {', '.join(f'{name} {count:,}' for name, count in self.names.most_common(8))}"
        total = sum(self.left_out.values()) + sum(self.replies.values())
        for reason, count in self.left_out.most_common():
            yield f"left out: {count:,} of {total:,} calls ({count / total:.0%}): {reason}"


def write_chats(
    file: Path, traces: Iterable[Rollout], choice: Choice, tokenizer: Any, *, max_model_len: int
) -> Written:
    """Write the chats of accepted traces, as ``groundwire sft --chats`` reads them, each different one once.

    Raises :class:`ConfigError` if none is left.
    """
    written, known = Written(), set[int]()
    with open(file, "w", encoding="utf-8") as output:
        for rollout in traces:
            written.sources[rollout.metadata["source"]] += 1
            reason, split = _refusal(rollout, choice)
            calls = [call for call in rollout.calls if isinstance(call, TracedCall)]
            whole = [call for call in calls if not call.untrainable_reason]
            written.left_out.update(call.untrainable_reason for call in calls if call.untrainable_reason)
            trained = [call for call in whole if choice.is_trained(call)]
            if reason:
                written.left_out[reason] += len(whole)
                continue
            written.left_out["other agents or models than the trained ones"] += len(whole) - len(trained)
            chats = list(_fitting(rollout, choice, tokenizer, max_model_len, known, written.left_out))
            for chat, replies in chats:
                output.write(json.dumps({**chat, "split": split}, ensure_ascii=False) + "\n")
                written.replies[split] += replies
                written.names[
                    f"{chat['metadata']['agent'] or 'an agent without a name'} "
                    f"({chat['metadata']['model'] or 'no model'})"
                ] += replies
            written.traces[split] += bool(chats)
    written.left_out = +written.left_out
    if not written.replies["train"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in written.left_out.most_common())
        raise ConfigError(f"no call of the traces is left to learn: {reasons or 'there is none'}")
    return written


def _refusal(rollout: Rollout, choice: Choice) -> tuple[str, str]:
    """Why nothing of a trace is learned, and else its split."""
    if not choice.accepts(rollout):
        return "traces that the rule does not accept, or says nothing of", ""
    split = choice.split(question_key(rollout.task))
    return ("", split) if split else ("traces whose first user turn is none of the tasks", "")


def _fitting(
    rollout: Rollout, choice: Choice, tokenizer: Any, max_model_len: int, known: set[int], left_out: Counter[str]
) -> Iterator[tuple[dict[str, Any], int]]:
    """The chats of a trace that the model can learn and that are new, each with its number of replies."""
    for chat in to_chats(rollout, choice.is_trained):
        learned = sum(message["role"] == "assistant" and message.get("weight") != 0 for message in chat["messages"])
        digest = hash(json.dumps([chat["messages"], chat.get("tools")], sort_keys=True))
        if digest in known:
            left_out["conversations that are there already"] += learned
            continue
        try:
            examples = encode(tokenizer, turns_of(chat))
        except (ConfigError, ChatRequestError, ValueError) as error:
            left_out[f"not writable for the model: {str(error).splitlines()[0][:160]}"] += learned
            continue
        known.add(digest)
        fitting = sum(len(example) <= max_model_len for example in examples)
        left_out[f"longer than max_model_len, {max_model_len} tokens"] += learned - fitting
        if fitting:
            yield chat, fitting


def write_best(job: Job, file: Path, callback: ProgressCallback, *, samples: int) -> tuple[int, int]:
    """Ask each task of the job until it is answered with a reward of 0.5, at most ``samples`` times.

    Writes a chat for each conversation of these answers, as ``groundwire sft --chats`` reads them. Returns the numbers
    of answered tasks and of all.
    """
    if job.view.compares:
        raise ConfigError("best of n judges each answer alone, and the reward ranks several: give another --reward")
    config, tasks, best = job.config, job.data.validation, dict[str, Rollout]()
    with runtime_of(job, run=RunDir(file.parent), timer=StepTimer()) as runtime:
        for sample in range(samples):
            left = [task for task in tasks if str(task["id"]) not in best]
            requests = validation_requests(left, config, config.temperature, samples=[sample])
            callback.on_phase_start(f"the teacher, sample {sample + 1} of at most {samples}", len(requests))
            deadline_s = validation_deadline_s(config, len(requests))
            for rollout in runtime.run(requests, deadline_s=deadline_s, on_end=callback.on_rollout_end):
                if (rollout.outcome.reward or 0.0) >= _LEAST_REWARD:
                    best[str(rollout.task["id"])] = rollout
    with file.open("w", encoding="utf-8") as out:
        for rollout in best.values():
            for chat in to_chats(_traced(rollout)):
                out.write(json.dumps(chat, ensure_ascii=False) + "\n")
    return len(best), len(tasks)


def _traced(rollout: Rollout) -> Rollout:
    """The rollout as a trace: its texts are learned, since the teacher's token ids are not the policy's."""
    calls = []
    for call in rollout.calls:
        traced = TracedCall(**{name: getattr(call, name) for name in _CALL}, tools_json=call.tools_json)
        traced.messages_json, traced.reply_json = call.messages_json, call.reply_json
        calls.append(traced)
    return make_rollout(calls, rollout_id=rollout.rollout_id, source="groundwire")


def prompt_changes(file: Path, tokenizer: Any, now: Iterable[tuple[str, list[int]]]) -> Iterator[str]:
    """Say how many of the chats in ``file`` begin with another prompt than the agent has ``now``: pairs of an agent's
    name and the token ids of a call's prompt.

    What differs from task to task does not count: compared are the lines that all prompts of an agent have in common,
    where there are at least :data:`_COMPARED` of them.
    """
    fixed_now, seen_now, calls_now = dict[str, set[str]](), set[str](), Counter[str]()
    for agent, ids in now:
        lines = _lines(tokenizer, ids)
        seen_now |= lines
        calls_now[agent] += 1
        fixed_now[agent] = fixed_now[agent] & lines if agent in fixed_now else lines
    compared = [lines for agent, lines in fixed_now.items() if calls_now[agent] >= _COMPARED]
    fixed_then, total, missing = dict[str, set[str]](), Counter[str](), Counter[str]()
    example = defaultdict[str, str](str)
    for chat in read_lines(file):
        [first] = encode(tokenizer, turns_of(chat)[:1])
        agent, lines = chat["metadata"]["agent"], _lines(tokenizer, first.prompt_ids)
        total[agent] += 1
        fixed_then[agent] = fixed_then[agent] & lines if agent in fixed_then else lines
        nearest = min((fixed - lines for fixed in compared), key=len, default=set[str]())
        if nearest:
            missing[agent] += 1
            example[agent] = example[agent] or f"without the line {shorten_repr(min(nearest))}"
    for agent, lines in fixed_then.items():
        name = agent or "the agent"
        if not compared or total[agent] < _COMPARED:
            there = f"{counted(total[agent], 'conversation')} and {counted(max(calls_now.values(), default=0), 'call')}"
            yield (
                f"prompts of {name} were not compared with those that the agent sends now: {there} now, it takes "
                f"{_COMPARED} of each"
            )
            continue
        if gone := lines - seen_now:
            missing[agent] = total[agent]
            example[agent] = f"with the line {shorten_repr(min(gone))}, which it has no more"
        if count := missing[agent]:
            yield (
                f"warning: {count:,} of {total[agent]:,} conversations ({count / total[agent]:.0%}) of {name} have "
                f"another prompt than the agent sends now, such as one {example[agent]}"
            )


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The chats that were written."""
    with open(file, "rb") as lines:
        yield from map(parse_json, lines)


def _lines(tokenizer: Any, ids: list[int]) -> set[str]:
    return {line.strip() for line in tokenizer.decode(ids, skip_special_tokens=True).splitlines()} - {""}
