"""Whether an answer is known to be wrong. What is unknown is never held against a reward."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Protocol

from groundwire.rewards._functions import score
from groundwire.rewards._sql import has_gold_query, on_variants, sql_answer
from groundwire.rewards._types import Reward, RewardError
from groundwire.rewards.attack.forms import NUMBER, Form, Gold, GoldFile, as_text, items, number, plain
from groundwire.rewards.judge.facts import presence
from groundwire.tools.types import AgentStep

RIGHT = 0.5
"""A user's truth above this says that an answer is right."""
_MARK = re.compile(
    r"####\s*([^\n#]+)|\\boxed\{([^{}]*)\}|<answer>(.*?)</answer>|answer(?: is)?\s*[:=]?\s+([^\n]+)|```\w*\n(.*?)```",
    re.DOTALL | re.IGNORECASE,
)
_LAST_PLACES, _NEAR, _SMALL = 2.5, 0.045, 1000
_TYPO, _UNRELATED, _SHORT = 0.8, 0.3, 3


class Truth(Protocol):
    """Says of an answer to a task whether it is right (True), wrong (False), or neither is known (None)."""

    how: str
    """How it knows, for the user."""

    async def __call__(self, task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep] = ()) -> bool | None:
        """The verdict on ``answer``; ``task`` is a row of the tasks that were given to :func:`.attack`."""


class UserTruth:
    """A function of the user's, called like a reward. Raises :class:`rewards.RewardError` if that fails."""

    def __init__(self, function: Reward, name: str = "") -> None:
        self._function, self.how = function, f"--truth {name}"

    async def __call__(self, task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep] = ()) -> bool | None:
        """As of :class:`Truth`."""
        if (verdict := await score(self._function, task, answer, steps)).value is None:
            raise RewardError(f"{self.how} raised an error: {verdict.error}")
        return verdict.value > RIGHT


class GoldTruth:
    """By the gold: a query by its results on the database and its variants, any other answer by its form.

    An answer is wrong if no reading of it is the gold: the whole text, what it marks as its answer, its last number,
    its first and last words. What repeats, paraphrases or approximates the gold is unknown.
    """

    def __init__(self, file: GoldFile) -> None:
        self._file = file
        self._index = {str(task["id"]): index for index, task in enumerate(file.tasks)}
        self._names = {plain(name) for name in file.vocabulary}
        forms = {gold.form for gold in file.golds}
        ways = ["the gold" if forms - {"sql", "none"} else "", "execution, also on variants" if "sql" in forms else ""]
        ways.append("nothing but answers that cannot be right: these tasks have no gold" if "none" in forms else "")
        self.how = " and ".join(filter(None, ways))

    async def __call__(self, task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep] = ()) -> bool | None:
        """As of :class:`Truth`."""
        index = self._index[str(task["id"])]
        if self._file.golds[index].form == "sql":
            return await asyncio.to_thread(executes_right, task, answer)
        return self.verdict(index, answer)

    def verdict(self, index: int, answer: str) -> bool | None:
        """The verdict on an answer that is no query, to the task of this index."""
        gold = self._file.golds[index]
        whole = None if gold.form == "none" else self._compare(index, gold, answer)
        if whole is True or gold.form in ("none", "prose"):
            return whole
        readings = [self._compare(index, gold, reading) for reading in _readings(answer, gold.form)]
        if whole is False and set(readings) <= {False}:
            return False
        # An answer that also names answers of other tasks, and the gold neither first nor last, is a hedge.
        text, own = f" {plain(answer)} ", {plain(gold.text), *map(plain, gold.value if gold.form == "list" else ())}
        hedges = gold.form in ("label", "list") and any(f" {name} " in text for name in self._names - own)
        return False if hedges and True not in readings else None

    def _compare(self, index: int, gold: Gold, reading: str) -> bool | None:
        """Whether ``reading``, as a whole, is the gold."""
        if reading.strip() in (gold.text, *gold.alternatives):
            return True
        if gold.form == "number":
            return _compare_numbers(gold, number(reading))
        if gold.form == "json":
            return _compare_json(gold.value, reading)
        if gold.form == "code":
            names = re.findall(r"(?:def|class|fn|function)\s+(\w+)", gold.text)
            return None if any(name in reading for name in names) else False
        if gold.form == "list":
            return self._compare_list(index, gold, reading)
        verdicts = {self._compare_text(index, gold.form, text, reading) for text in (gold.text, *gold.alternatives)}
        return True if True in verdicts else None if None in verdicts else False

    def _compare_list(self, index: int, gold: Gold, reading: str) -> bool | None:
        read, wanted = [[plain(item) for item in texts] for texts in (items(reading), gold.value)]
        if read == wanted:
            return not self._file.case_matters(index) or [item.strip() for item in items(reading)] == gold.value
        if Counter(read) == Counter(wanted):
            return not self._file.order_matters(index)
        missing = any(item not in plain(reading) for item in wanted)
        return False if missing or (self._names - {*wanted}) & {*read} else None

    def _compare_text(self, index: int, form: Form, gold: str, reading: str) -> bool | None:
        text, wanted = plain(reading), plain(gold)
        if text == wanted:
            cased = self._file.case_matters(index) and reading.strip().casefold() == gold.casefold()
            return False if cased else True if text and number(reading) == number(gold) else None
        if form == "prose":
            return False if presence(reading, reference=f"{gold} 0", question="").f1 < _UNRELATED else None
        if text in self._names:
            return False
        contained = text and (f" {wanted} " in f" {text} " or f" {text} " in f" {wanted} ")
        is_near = len(wanted) > _SHORT and len(text) < 2 * len(wanted)
        return None if contained or (is_near and SequenceMatcher(None, text, wanted).ratio() > _TYPO) else False


def _compare_numbers(gold: Gold, read: float | None) -> bool | None:
    if read is None:
        return False
    wanted, off = gold.value, abs(read - gold.value)
    if off <= 1e-9 * max(1.0, abs(wanted)):
        return True
    if wanted == int(wanted) and "." not in gold.text and read == int(read) and abs(wanted) < _SMALL:
        return False
    places = len(gold.text.partition(".")[2]) if "e" not in gold.text.lower() else 0
    near = max(_NEAR * abs(wanted), _LAST_PLACES * 10.0**-places if places else 0.5)
    percent = abs(read * 100 - wanted) <= near or (abs(wanted) <= 1 and abs(read / 100 - wanted) <= near)
    return None if off <= near or percent else False


def _compare_json(wanted: Any, reading: str) -> bool | None:
    start, end = reading.find("{"), reading.rfind("}") + 1
    for text in (reading, reading[start:end] if start >= 0 else ""):
        with suppress(ValueError, RecursionError):
            return _same_json(wanted, json.loads(text))
    return False if any(leaf not in reading for leaf in map(as_text, _leaves(wanted))) else None


def _same_json(wanted: Any, read: Any) -> bool | None:
    """Wrong: a key or an item of ``wanted`` is missing, or has another value. Further keys: unknown."""
    if isinstance(wanted, dict):
        if not isinstance(read, dict) or not wanted.keys() <= read.keys():
            return False
        parts = [_same_json(value, read[key]) for key, value in wanted.items()]
        parts += [None] if read.keys() - wanted.keys() else []
    elif isinstance(wanted, list) and isinstance(read, list):
        parts = [_same_json(*pair) for pair in zip(wanted, read, strict=False)]
        parts.append(len(read) == len(wanted) or (None if len(read) > len(wanted) else False))
        parts = [None] if Counter(map(as_text, wanted)) == Counter(map(as_text, read)) else parts  # in any order
    elif wanted == read and isinstance(wanted, bool) == isinstance(read, bool):
        return True
    else:
        numbers = [number(as_text(value)) for value in (wanted, read)]
        near = None not in numbers and _compare_numbers(Gold("number", as_text(wanted), numbers[0]), numbers[1])
        return None if near is not False or plain(as_text(wanted)) == plain(as_text(read)) else False
    return False if False in parts else None if None in parts else True


def _leaves(value: Any) -> Iterator[Any]:
    if not isinstance(value, dict | list):
        yield value
        return
    for child in value.values() if isinstance(value, dict) else value:
        yield from _leaves(child)


def _readings(answer: str, form: Form) -> Iterator[str]:
    """What a careful reader may take for the answer in a longer text."""
    marked = [next(filter(None, match.groups()), "") for match in _MARK.finditer(answer)]
    for text in marked:
        yield text
        yield from NUMBER.findall(text)[:1] if form == "number" else text.split(".")[:1]
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(answer), dict):
            yield from map(as_text, value.values())
    if form == "number":
        numbers = NUMBER.findall(answer)
        yield from numbers[-1:]
        yield from numbers[:1] if not marked and re.match(r"[\W_]*\d", answer) else ()
        return
    lines, words = answer.strip().splitlines() or [""], answer.split() if form == "label" else []
    yield from (lines[0], lines[-1])
    yield from (" ".join(part) for n in range(1, min(5, len(words))) for part in (words[:n], words[-n:]))


def executes_right(task: Mapping[str, Any], answer: str) -> bool | None:
    """Whether a query has the gold's results, also on variants of the database. Runs queries."""
    from groundwire.rewards.bird import exec_match
    from groundwire.rewards.spider.execution_match import training_match

    if not has_gold_query(task):
        return None
    sql = sql_answer(task, answer, "the attack")
    try:
        if (judged := training_match(sql)).value > 0:
            return None if judged.unchecked else True
        # Rows in another order, or more than once, are right for some.
        same_rows = on_variants(sql, exec_match(*sql[:3]), partial(exec_match, mode="official"))
        return None if same_rows.value > 0 else False
    except RewardError:  # a gold that cannot be judged
        return None
