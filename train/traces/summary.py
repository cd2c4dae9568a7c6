"""What is in trace files, on one screen."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from groundwire.domains.held_out import question_key
from groundwire.tools.terminal import counted
from groundwire.tools.text import printable
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.masking import NAMES
from groundwire.train.traces.read import Traces
from groundwire.train.traces.record import plain

_MOST, _TEXT = 6, 60


class Summary:
    """Counts over rollouts. Of first user turns and system prompts it keeps hashes, and the text of repeated turns."""

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        self.counts = Counter[str]()
        self.named: dict[str, Counter[str]] = defaultdict(Counter)
        """By kind (``agents``, ``models``, ``tools``, …), how often each name was seen."""
        self.turns = Counter[bytes]()
        self.repeated: dict[bytes, str] = {}
        self.prompts: dict[str, dict[bytes, tuple[int, float]]] = defaultdict(dict)
        """Of each agent its system prompts, with how often each was sent, and when last."""
        self.scores: dict[str, tuple[int, float, float, float]] = {}
        """Of each score: how many there are, their sum, the least and the greatest."""
        self.times = (0.0, 0.0)
        for rollout in rollouts:
            self._add(rollout)

    def _add(self, rollout: Rollout) -> None:
        facts, outcome, calls, named = rollout.metadata, rollout.outcome, rollout.calls, self.named
        corrected = bool(facts["corrects"] or facts.get("corrected"))
        self.counts.update(traces=1, calls=len(calls), continued=facts["continues"], corrected=corrected)
        self.counts["most calls"] = max(self.counts["most calls"], len(calls))
        named["sources"][facts["source"]] += 1
        named["agents"].update({call.agent or "(no name)" for call in calls})
        tools = [step for step in outcome.steps if step["kind"] == "tool"]
        named["tools"].update(step["agent"] for step in tools)
        named["tool errors"].update(step["agent"] for step in tools if not step["ok"])
        named["labels"].update(f"{name}={value}" for name, value in facts["labels"].items())
        named["errors"].update([outcome.message.split(":")[0]] if outcome.failure else [])
        for call in calls:
            self._add_call(call)
        if not facts["continues"] and (key := question_key(rollout.task)):
            digest = text_digest(key)
            self.turns[digest] += 1
            if self.turns[digest] > 1:
                self.repeated[digest] = _short(rollout.task["question"])
        for name, value in outcome.reward_components.items():
            number, total, least, most = self.scores.get(name, (0, 0.0, value, value))
            self.scores[name] = number + 1, total + value, min(least, value), max(most, value)
        if rollout.started:
            first, last = self.times
            self.times = min(first or rollout.started, rollout.started), max(last, rollout.started)

    def _add_call(self, call: Any) -> None:
        self.named["models"][call.model or "(no name)"] += 1
        self.counts.update(read=call.prompt_tokens, written=call.response_tokens)
        self.counts["trainable"] += not call.untrainable_reason
        if call.failed:
            self.named["failed"][call.error.split(":")[0]] += 1
        elif call.untrainable_reason:
            self.named["unread"][f"calls: {call.untrainable_reason}"] += 1
        if (messages := call.messages) and messages[0]["role"] == "system":
            prompts, digest = self.prompts[call.agent], text_digest(plain(messages[0].get("content")))
            sent, last = prompts.get(digest, (0, 0.0))
            prompts[digest] = sent + 1, max(last, call.started)

    def lines(self, traces: Traces) -> Iterator[str]:
        """The screen."""
        counts, named = self.counts, self.named
        dates = [datetime.fromtimestamp(time, timezone.utc).strftime("%d %b %Y") for time in self.times]
        period = f", {' to '.join(dict.fromkeys(dates))}" if self.times[0] else ""
        files = counted(len(traces.files), "file")
        yield f"{files}: {counted(counts['traces'], 'trace')} ({_most(named['sources'])}){period}"
        if counts["traces"]:
            yield f"agents    {_most(named['agents'], 'trace')}"
            yield f"models    {_most(named['models'], 'call')}"
            failed, mean = sum(named["failed"].values()), counts["calls"] / counts["traces"]
            why = f" ({_most(named['failed'])})" if failed else ""
            most, share = f"at most {counts['most calls']:,}", counts["trainable"] / max(1, counts["calls"])
            yield f"calls     {counts['calls']:,}; {mean:.1f} in a trace, {most}; {failed:,} failed{why}"
            yield f"          {counts['trainable']:,} ({share:.0%}) can be learned: request and reply are whole"
            errors = f"; errors: {_most(named['tool errors'])}" if named["tool errors"] else ""
            yield f"tools     {_most(named['tools'], 'call')}{errors}"
            yield f"tokens    {counts['read']:,} read, {counts['written']:,} written, where the tracer counted them"
            yield f"tasks     {self._tasks()}"
            yield from self._prompts()
            yield f"outcomes  {self._outcomes()}"
        if traces.is_masked:
            masked = [f"{counted(count, NAMES[kind])}" for kind, count in traces.masked.most_common()]
            yield f"masked    {', '.join(masked) or 'nothing'}; names of people and places are not recognised"
        reasons = [f"{count:,} {reason}" for reason, count in (traces.unread + named["unread"]).most_common()]
        yield from (f"{'unread' if not place else '':<10}{reason}" for place, reason in enumerate(reasons))

    def _tasks(self) -> str:
        text = f"{len(self.turns):,} different first user turns"
        if self.repeated:
            most = max(self.repeated, key=self.turns.__getitem__)
            text += (
                f"; {len(self.repeated):,} came several times, one {self.turns[most]:,} times: {self.repeated[most]}"
            )
        continued = self.counts["continued"]
        return text + (f"; {counted(continued, 'trace')} went on with a conversation" if continued else "")

    def _prompts(self) -> Iterator[str]:
        for agent, prompts in self.prompts.items():
            if len(prompts) > 1:
                newest, _ = max(prompts.values(), key=lambda prompt: prompt[1])
                share = newest / sum(sent for sent, _ in prompts.values())
                words = f"{len(prompts):,} system prompts; {share:.0%} of its calls have the newest"
                yield f"prompts   {_short(agent or 'an agent without a name')} had {words}"

    def _outcomes(self) -> str:
        ordered = sorted(self.scores.items(), key=lambda item: -item[1][0])[:_MOST]
        texts = [
            f"{_short(name)}: {number:,} scores of {least:g} to {most:g}, mean {total / number:.3g}"
            for name, (number, total, least, most) in ordered
        ]
        if labels := self.named["labels"]:
            texts.append(f"labels {_most(labels)}")
        if errors := self.named["errors"]:
            texts.append(f"{counted(sum(errors.values()), 'trace')} ended in an error ({_most(errors)})")
        if corrected := self.counts["corrected"]:
            texts.append(f"after {counted(corrected, 'answer')} the user's next turn reads like a correction")
        return "; ".join(texts) or "no scores, labels, errors or corrections"


def text_digest(text: str) -> bytes:
    """What stands for a text that is not kept."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()


def _most(counts: Mapping[str, int], noun: str = "") -> str:
    """The most frequent names, each with its count."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{_short(name)} {counted(count, noun) if noun else f'{count:,}'}" for name, count in ordered[:_MOST]]
    return ", ".join([*shown, *([f"{len(ordered) - _MOST} more"] if len(ordered) > _MOST else [])]) or "none"


def _short(text: str) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}…"
