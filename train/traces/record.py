"""A trace of any tracer as a rollout: the record that our own runs have, without token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import islice
from typing import Any

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.calls import to_json
from groundwire.tools.files import parse_json
from groundwire.tools.numbers import MAX_METRIC, reward_number
from groundwire.tools.types import AgentStep
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.traces.messages import Message, text_of

_LABELS = {
    **dict.fromkeys(("true", "yes", "correct", "pass", "passed", "good", "positive", "thumbs_up", "thumbs-up", "👍",
                     "accepted", "like", "up", "success", "factual", "relevant", "helpful"), 1.0),
    **dict.fromkeys(("false", "no", "incorrect", "wrong", "fail", "failed", "bad", "negative", "thumbs_down",
                     "thumbs-down", "👎", "rejected", "dislike", "down", "failure", "hallucinated", "irrelevant",
                     "unhelpful"), 0.0),
}  # fmt: skip
"""Labels of annotations that say good or bad."""
_CORRECTION = re.compile(
    r"\W*((no|nope|wrong|incorrect|actually|nein|falsch|non|faux|incorrecto|errado|нет|неверно)\b(?! (problem|worries))"
    r"|(this|that|it|das|ce|esto|isso)( is|'s| ist| n'est| no es)? ?(not|wrong|incorrect|nicht|falsch|pas|stimmt nicht)"
    r"|not what|try again|you (missed|forgot|misunderstood|ignored)|i (said|asked|meant)|不对|错了|不是|違う|間違)",
    re.IGNORECASE,
)
_FAILED = re.compile(
    r"\s*(\[?(tool )?error\b|traceback \(most recent|exception\b|\{\s*\"(is_?)?error\"\s*:\s*(?!false|null|\"\"))",
    re.IGNORECASE,
)
"""How tools begin what they return of an error."""

_CUT_OFF = {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded", "incomplete"}
"""What APIs call the end of a reply that the limit of tokens ended, in small letters."""
_CALLED = {"tool_calls", "function_call", "tool_use", "tool-calls"}
"""What APIs call the end of a reply that calls tools."""
_QUESTION = 10
"""Characters of the shortest input that, where it is in the first user turn, is the question in it."""
_LAST = 1e11
"""Seconds: the year 5138."""


class TracedCall(LLMCall):
    """A call that another tracer recorded. The calls of a conversation share its messages."""

    __slots__ = ("_history", "unread")

    def __init__(self, *, history: tuple[Sequence[Message], int] = ((), 0), unread: str = "", **fields: Any) -> None:
        self._history = history
        """A conversation, and how many of its messages are those of the request."""
        self.unread = unread
        """What of the call could not be read: such a call is not learned. Empty if it is whole."""
        super().__init__(**fields)

    @property
    def messages(self) -> list[Message]:
        """The request's messages."""
        conversation, count = self._history
        return list(conversation[:count])

    @property
    def messages_json(self) -> str:
        """The same as JSON."""
        return to_json(self.messages)

    @messages_json.setter
    def messages_json(self, text: str) -> None:
        if text != "[]":
            messages = parse_json(text)
            self._history = messages, len(messages)

    @property
    def untrainable_reason(self) -> str:
        """Why this call cannot be learned; empty if its whole request and its reply are known."""
        if self.failed:
            return f"failed with status {self.status}: {self.error}"
        if self.finish_reason.lower().removeprefix("finish_reason_") in _CUT_OFF:
            return "the limit of tokens ended the reply"
        sent = (message["role"] for message in islice(*self._history) if message["role"] != "system")
        reasons = (
            self.unread,
            "" if self._history[1] else "no request before the reply",
            "" if self.reply_json else "no reply",
            "the request lacks its beginning" if next(sent, "") == "tool" else "",
            "the tool calls of the reply were not recorded" if self._lacks_calls() else "",
        )
        return next(filter(None, reasons), "")

    def _lacks_calls(self) -> bool:
        return self.finish_reason.lower() in _CALLED and not self.reply.get("tool_calls")


def seconds(value: Any) -> float:
    """A time in seconds since the epoch: nano-, micro- or milliseconds, seconds, or ISO 8601; 0 if it is none."""
    try:
        number = value.timestamp() if isinstance(value, datetime) else float(value)
    except (TypeError, OverflowError):
        return 0.0
    except ValueError:
        try:
            time = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
            number = (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
        except (ValueError, OverflowError):
            return 0.0
    number /= next((unit for unit in (1e9, 1e6, 1e3) if number > _LAST * unit / 1e2), 1)
    return number if 0 < number < _LAST else 0.0


def user_turn(messages: Iterable[Message]) -> str:
    """The text of the first message of the user; empty if there is none."""
    return next((plain(message.get("content")) for message in messages if message["role"] == "user"), "")


def plain(content: Any) -> str:
    """The text of a message's content, without its images."""
    parts = content if isinstance(content, list) else [content]
    texts = (text_of(part.get("text") if isinstance(part, dict) else part) for part in parts)
    return "\n".join(filter(None, texts))


def is_correction(text: str) -> bool:
    """Whether a user's next turn begins as one who was not content with the answer does."""
    return _CORRECTION.match(text) is not None


def make_rollout(
    calls: Sequence[TracedCall],
    *,
    rollout_id: str,
    source: str,
    question: str = "",
    inputs: Any = None,
    answer: str = "",
    scores: Mapping[str, Any] | None = None,
    results: Mapping[Any, tuple[str, bool]] | None = None,
    further_steps: Sequence[AgentStep] = (),
    error: str = "",
    session: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Rollout:
    """The rollout of a trace.

    ``calls`` are in order, of the format ``source``. ``question`` and ``answer`` are known better than the first user
    turn, or the input that the agent put into it, and the last text of the calls. ``results`` are those of tool calls
    by their ids, and whether each is none of an error. ``inputs`` are what the agent was called with, ``error`` is what
    it failed of.
    """
    first = calls[0].messages if calls else []
    labels, components = dict[str, str](), dict[str, float]()
    for name, value in (scores or {}).items():
        try:
            components[name] = _LABELS[value.lower()] if isinstance(value, str) else reward_number(value, MAX_METRIC)
        except (KeyError, TypeError, ValueError):
            labels[name] = text_of(value)
    replied = next((call for call in reversed(calls) if plain(call.reply.get("content"))), None)
    answer = answer or (plain(replied.reply.get("content")) if replied else "")
    failure = "" if not error else "endpoint" if calls and calls[-1].failed else "agent"
    begins = next((place for place, message in enumerate(first) if message["role"] == "assistant"), None)
    earlier = [plain(message.get("content")) for message in first if message["role"] == "user"]
    started = min((call.started for call in calls if call.started), default=0.0)
    outcome = Outcome(
        answer=answer,
        steps=[*_steps(calls, results or {}), *further_steps],
        reward=components.get("reward", next(iter(components.values())) if len(components) == 1 else None),
        reward_components=components,
        failure=failure,
        message=error,
    )
    facts = {"source": source, "session": session, "labels": labels, "continues": begins is not None}
    corrects = begins is not None and is_correction(earlier[-1] if earlier else "")
    inputs, turn = inputs if isinstance(inputs, Mapping) else {}, user_turn(first)
    wrapped = [text for text in inputs.values() if isinstance(text, str) and len(text) >= _QUESTION and text in turn]
    question = question or max(wrapped, key=len, default=turn)
    return Rollout(
        rollout_id=rollout_id,
        task={"id": rollout_id, "question": question, "inputs": inputs},
        mode=None,
        status="failed" if failure else "succeeded",
        started=started,
        ended=max((call.ended for call in calls), default=started),
        outcome=outcome,
        calls=list(calls),
        metadata={**facts, "corrects": corrects, **(metadata or {})},
    )


def _steps(calls: Sequence[TracedCall], results: Mapping[Any, tuple[str, bool]]) -> Iterable[AgentStep]:
    for call in calls:
        reply, history = call.reply, call.messages
        asked = plain(history[-1].get("content")) if history else ""
        text = plain(reply.get("content"))
        yield AgentStep(agent=call.agent, kind="llm", input=asked, output=text, ok=not call.failed)
        for tool_call in reply.get("tool_calls") or ():
            output, ok = results.get(tool_call.get("id"), ("", True))
            function = tool_call["function"]
            name, arguments = str(function.get("name") or ""), text_of(function.get("arguments"))
            yield AgentStep(
                agent=name, kind="tool", input=arguments, output=output, ok=ok and not _FAILED.match(output)
            )


def results_in(messages: Iterable[Message]) -> dict[Any, tuple[str, bool]]:
    """The results of tool calls by their ids."""
    return {
        message.get("tool_call_id"): (plain(message.get("content")), True)
        for message in messages
        if message["role"] == "tool"
    }


def chat_rollout(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    facts: Mapping[int, Mapping[str, Any]],
    *,
    unread: str = "",
    **known: Any,
) -> Rollout:
    """The rollout of one conversation: a call for each of the assistant's messages that others come before.

    ``facts`` are fields of the calls, by the places of their messages, and at -1 those of all. ``known`` is as for
    :func:`make_rollout`.
    """
    everywhere, tools_json = dict(facts.get(-1, {})), to_json(list(tools)) if tools else ""
    calls = [
        TracedCall(
            rollout_id=known["rollout_id"],
            attempt_id="",
            sequence=place,
            history=(messages, place),
            tools_json=tools_json,
            reply_json=to_json(message),
            **{"unread": unread, **everywhere, **facts.get(place, {})},
        )
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and place
    ]
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    corrected = [is_correction(plain(messages[place].get("content"))) for place in places[1:]]
    replies = (plain(call.reply.get("content")) for call in reversed(calls) if call.sequence < [*places, 0, 0][1])
    results = {**results_in(messages), **known.pop("results", {})}
    metadata: dict[str, Any] = {"corrected": any(corrected), **known.pop("metadata", {})}
    if corrected:  # the conversation went on after the answer to its first turn
        metadata |= {"first_answer": next(filter(None, replies), ""), "first_corrected": corrected[0]}
    return make_rollout(calls, results=results, metadata=metadata, **known)


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """The first of the conversations of one trace, with the calls and steps of the others."""
    first, *others = rollouts
    first.calls += [call for rollout in others for call in rollout.calls]
    first.outcome.steps = [*first.outcome.steps, *(step for rollout in others for step in rollout.outcome.steps)]
    return first


def known_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`make_rollout` in what ``groundwire export`` adds to a format of messages alone."""
    texts = {name: facts[name] for name in ("question", "answer") if isinstance(facts.get(name), str)}
    return {**texts, "inputs": facts.get("inputs")}
