"""How a replayed rollout differs from its record, in one sentence."""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing.replay import RecordedRequest, ReplayedAttempt
from groundwire.adapters.tracing.sampling import same_prompt
from groundwire.adapters.tracing.wire.exchange import CLIENT_GONE, HttpExchange
from groundwire.tools.files import shorten_repr
from groundwire.tools.secrets import masked_values
from groundwire.train.store.rollout import Rollout

CAUSES = {
    "clock": "a clock",
    "random": "a random number, id or folder",
    "order": "calls or results in another order",
    "tool": "a tool whose result changed",
    "prompt": "other prompts: the agent's code, its settings or the task changed",
    "options": "other options of a call",
    "calls": "more or fewer calls",
    "end": "another end",
    "steps": "other steps",
    "answer": "another answer",
    "reward": "another reward",
}
"""The kinds of differences."""

_TIME = re.compile(r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}|\b1[5-9]\d{8}(\d{3}){0,3}\b")
_RANDOM = re.compile(
    r"(?<!\w)(?:[-+]?\d[\d.e+-]*|[0-9a-fA-F-]{6,}|(?=\w*\d\w*[A-Za-z])(?=\w*[A-Za-z]\w*\d)\w{6,})(?!\w)"
)
"""A number, a UUID or other hexadecimal digits, or letters and digits in turn."""
_FOLDER = re.compile(rf".*?(?:/te?mp|/var/folders|\\Temp|{re.escape(tempfile.gettempdir())})[/\\]", re.IGNORECASE)
_WORDS, _END_OF_WORD = re.compile(r"\w+|\W"), re.compile(r"\w*\Z")
_VALUE, _END_OF_VALUE = re.compile(r"\A[\w.:+/-]*"), re.compile(r"[\w.:+/-]*\Z")
"""What is after and before a difference within one value."""
_WINDOW = 400
"""Characters in which the first difference ends."""
_TOLERANCE = 1e-9
_RACE_S = 0.01
_OF_RACE = {"prompt", "random", "order", "calls", "steps", "answer"}
"""The kinds of differences that an agent has which goes on with another one of its replies."""


@dataclass(frozen=True)
class Difference:
    """``kind`` is one of :data:`CAUSES`."""

    kind: str
    sentence: str


@dataclass(frozen=True)
class TextsOfCall:
    """The prompts of a call that the record does not have, and of the recorded call that is likeest to it; "" where
    they are not known. ``messages`` are those of the new one.
    """

    recorded: str
    now: str
    messages: Sequence[Any]


def outcome_difference(recorded: Rollout, again: Rollout, attempt: ReplayedAttempt | None) -> Difference | None:
    """What differs though no call was refused; None if nothing does. ``attempt`` is None without a call."""
    return next(_outcome_differences(recorded, again, attempt), None)


def _outcome_differences(recorded: Rollout, again: Rollout, attempt: ReplayedAttempt | None) -> Iterator[Difference]:
    then, now, made = recorded.outcome, again.outcome, len(recorded.calls)
    missing = made if attempt is None else sum(len(request.calls) for request in attempt.missing)
    if then.failure != now.failure:
        ended = f"it fails of {now.failure} ({now.message:.200})" if now.failure else "it succeeds"
        was = f"failed of {then.failure}" if then.failure else "succeeded"
        yield Difference("end", f"{ended}; in the record it {was}")
    if missing:
        yield Difference("calls", f"the agent makes {made - missing} of its {made} recorded calls")
    if then.failure:
        return
    for number, (old, new) in enumerate(zip(then.steps, masked_values(list(now.steps)), strict=False), 1):
        for field, before in old.items():
            if (value := new.get(field)) != before:
                is_result = old["kind"] == "tool" and field in ("output", "ok")
                what = f"the {field} of step {number} ({old['agent'] or old['kind']})"
                yield Difference("tool" if is_result else "steps", f"{what} is {_values(before, value)}")
    if len(then.steps) != len(now.steps):
        yield Difference("steps", f"it has {len(now.steps)} steps, in the record {len(then.steps)}")
    if (answer := masked_values(now.answer)) != then.answer:
        yield Difference("answer", f"the answer is {_values(then.answer, answer)}")
    rewards = then.reward or 0.0, now.reward or 0.0
    if abs(rewards[0] - rewards[1]) > _TOLERANCE:
        yield Difference("reward", f"the reward of the same answer is {_values(*rewards)}")


def likeliest(attempt: ReplayedAttempt, exchange: HttpExchange, prompt_ids: Sequence[int]) -> RecordedRequest | None:
    """The recorded request that the agent would have made in place of an unrecorded one; None if none is left."""
    missing = attempt.missing
    return max(
        missing,
        key=lambda request: (
            same_prompt(request.call.prompt_key, exchange.prompt_key),
            request.call.agent == exchange.agent,
            _common(request.call.prompt_ids, prompt_ids),
        ),
        default=None,
    )


def call_difference(
    attempt: ReplayedAttempt, exchange: HttpExchange, request: RecordedRequest | None, texts: TextsOfCall
) -> Difference:
    """Why the record does not have a call, to which ``request`` is the likeliest."""
    answered = [other for other in attempt.requests if other.arrived]
    number = f"call {len(answered) + 1}{f' ({exchange.agent})' if exchange.agent else ''}"
    if request is None:
        known = sum(other.call.prompt_key == exchange.prompt_key for other in answered)
        again = f", which asks the same as {known} of them" if known else ""
        return Difference("calls", f"after its {len(answered)} recorded calls the agent makes {number}{again}")
    if same_prompt(request.call.prompt_key, exchange.prompt_key):
        if request.call.agent != exchange.agent:
            return Difference("prompt", f"{number} was of the agent {request.call.agent!r} in the record")
        fields = "tool_choice, response_format, stop, max_tokens, n or a reply's reasoning"
        return Difference("options", f"{number} has the recorded prompt with other options ({fields})")
    if not texts.recorded or not texts.now or texts.recorded == texts.now:
        shown = ", in what the chat template leaves out" if texts.recorded and texts.now else ""
        return Difference("prompt", f"{number} has messages that are not in the record{shown}")
    return _prompt_difference(number, texts)


def _prompt_difference(number: str, texts: TextsOfCall) -> Difference:
    old, new, place = first_difference(texts.recorded, texts.now)
    role, tool = _message_at(texts, place)
    shown = _values(old, new) + (f", in a {role} message" if role not in ("", "tool") else "")
    if sorted(texts.recorded) == sorted(texts.now):
        return Difference("order", f"the prompt of {number} has the same in another order: {shown}")
    if _TIME.search(old) and _TIME.search(new):
        return Difference("clock", f"the prompt of {number} has a clock: {shown}")
    folder = _FOLDER.match(old)
    if folder and new.startswith(folder[0]):
        return Difference("random", f"the prompt of {number} has a temporary folder, whose name is random: {shown}")
    if role == "tool":
        return Difference("tool", f"before {number} the result of {tool or 'a tool'} is another one: {shown}")
    if _RANDOM.sub("", old) == _RANDOM.sub("", new):
        return Difference("random", f"the prompt of {number} has a random number or id: {shown}")
    return Difference("prompt", f"the prompt of {number} is another one: {shown}")


def with_race(difference: Difference | None, attempt: ReplayedAttempt | None) -> Difference | None:
    """Say so if the last two replies before the difference, to calls at once, ended together in the record."""
    requests = attempt.requests if attempt is not None else ()
    answered = [other.call for other in requests if other.answered and other.call.status != CLIENT_GONE]
    *_, first, second = [None, None, *sorted(answered, key=lambda call: call.ended)]
    if difference is None or first is None or second is None or difference.kind not in _OF_RACE:
        return difference
    if second.started > first.ended or second.ended - first.ended > _RACE_S:
        return difference
    ms = 1000 * (second.ended - first.ended)
    either = (
        f"two calls at once before it were answered within {ms:.1f} ms in the record: the agent may take either first"
    )
    return Difference(difference.kind, f"{difference.sentence}; {either}")


def first_difference(old: str, new: str) -> tuple[str, str, int]:
    """The first values that differ in two texts, and where they are in ``new``."""
    start = _common(old, new)
    start -= len(_END_OF_WORD.findall(new[max(0, start - _WINDOW) : start])[0])
    before, after = ([*_WORDS.findall(text[start : start + _WINDOW])] for text in (old, new))
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    _, _, old_words, _, new_words = next(change for change in changes if change[0] != "equal")
    ends = [start + sum(map(len, words[:end])) for words, end in ((before, old_words), (after, new_words))]
    head = start - len(_END_OF_VALUE.findall(new[max(0, start - _WINDOW) : start])[0])
    values = [
        (text[head:end] + _VALUE.findall(text[end : end + _WINDOW])[0]).rstrip(".:")
        for text, end in zip((old, new), ends, strict=True)
    ]
    return values[0], values[1], head


def _message_at(texts: TextsOfCall, place: int) -> tuple[str, str]:
    """The role of the message that is at this place of the new prompt, and the tool whose result it is."""
    position, names, found = 0, dict[str, str](), ("", "")
    for message in texts.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = str((call.get("function") or {}).get("name") or "")
        for text in (str(part.get("text") or "").strip() for part in parts if isinstance(part, Mapping)):
            if text and 0 <= (at := texts.now.find(text, position)) <= place:
                position = at
                name = names.get(str(message.get("tool_call_id"))) or str(message.get("name") or "")
                found = str(message.get("role")), name
    return found


def _common(old: Sequence[Any], new: Sequence[Any]) -> int:
    """The number of first items that are equal."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _values(old: Any, new: Any) -> str:
    return f"{shorten_repr(new)} now, {shorten_repr(old)} in the record"
