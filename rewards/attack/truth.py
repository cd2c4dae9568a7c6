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

from groundwire.rewards._sql import SqlAnswer, has_gold_query, on_variants, sql_answer
from groundwire.rewards._types import Reward, RewardError
from groundwire.rewards.attack.forms import NUMBER, Gold, GoldFile, as_text, items, number, plain
from groundwire.rewards.audit import score
from groundwire.rewards.judge.facts import presence
from groundwire.tools.types import AgentStep

_MARK = re.compile(
    r"####\s*(?P<hash>[^\n#]+)|\\boxed\{(?P<box>[^{}]*)\}|<answer>(?P<tag>.*?)</answer>"
    r"|answer(?: is)?\s*[:=]?\s+(?P<said>[^\n]+)",
    re.DOTALL | re.IGNORECASE,
)
_FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
RIGHT = 0.5
"""A user's truth above this says that an answer is right."""
_LAST_PLACES, _NEAR, _SMALL = 2.5, 0.045, 1000
_TYPO, _UNRELATED = 0.8, 0.3


class Truth(Protocol):
    """Says of an answer to a task whether it is right (True), wrong (False), or neither is known (None)."""

    how: str
    """How it knows, for the user."""

    async def __call__(self, task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep] = ()) -> bool | None:
        """The verdict on ``answer``; ``task`` is a row of the tasks that were given to :func:`.attack`."""


class UserTruth:
    """A function of the user's, called like a reward: above 0.5 is right. Raises :class:`rewards.RewardError`."""

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
        self._labels = {plain(gold.text) for gold in file.golds if gold.form == "label"}
        self._index = {str(task["id"]): index for index, task in enumerate(file.tasks)}
        forms = {gold.form for gold in file.golds}
        ways = ["the gold" if forms - {"sql", "none"} else "", "execution, also on variants" if "sql" in forms else ""]
        ways.append("nothing but answers that cannot be right: these tasks have no gold" if "none" in forms else "")
        self.how = " and ".join(filter(None, ways))

    async def __call__(self, task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep] = ()) -> bool | None:
        """As of :class:`Truth`."""
        index = self._index[str(task["id"])]
        if self._file.golds[index].form == "sql":
            return await asyncio.to_thread(_executes_right, task, answer)
        return self.verdict(index, answer)

    def verdict(self, index: int, answer: str) -> bool | None:
        """The verdict on an answer that is no query, to the task of this index."""
        gold = self._file.golds[index]
        if gold.form == "none":
            return None
        if (whole := self._compare(index, gold, answer)) is True:
            return True
        if gold.form == "prose":
            return whole
        readings = [self._compare(index, gold, reading) for reading in _readings(answer, gold.form)]
        if whole is False and not any(reading is not False for reading in readings):
            return False
        return False if self._names_others(index, gold, answer) and True not in readings else None

    def _names_others(self, index: int, gold: Gold, answer: str) -> bool:
        """Whether the answer also names answers of other tasks, with the gold neither first nor last."""
        text, own = f" {plain(answer)} ", {plain(gold.text), *map(plain, gold.value if gold.form == "list" else ())}
        others = [name for name in self._file.vocabulary if plain(name) not in own and f" {plain(name)} " in text]
        return len(others) > 0 and gold.form in ("label", "list")

    def _compare(self, index: int, gold: Gold, reading: str) -> bool | None:
        """Whether ``reading``, as a whole, is the gold."""
        if reading.strip() in (gold.text, *gold.alternatives):
            return True
        verdict: bool | None = None
        if gold.form == "number":
            verdict = _compare_numbers(gold, number(reading))
        elif gold.form == "json":
            verdict = _compare_json(gold.value, reading)
        elif gold.form == "code":
            names = re.findall(r"(?:def|class|fn|function)\s+(\w+)", gold.text)
            verdict = False if not names or not any(name in reading for name in names) else None
        elif gold.form == "list":
            verdict = self._compare_list(index, gold, reading)
        else:
            verdict = self._compare_text(index, gold, reading)
        return verdict

    def _compare_list(self, index: int, gold: Gold, reading: str) -> bool | None:
        read, wanted = [[plain(item) for item in texts] for texts in (items(reading), gold.value)]
        if read == wanted:
            return not self._file.case_matters(index) or [item.strip() for item in items(reading)] == gold.value
        if Counter(read) == Counter(wanted):
            return not self._file.order_matters(index)
        missing = any(item not in plain(reading) for item in wanted)
        others = {plain(item) for item in self._file.vocabulary} - {*wanted}
        return False if missing or others & {*read} else None

    def _compare_text(self, index: int, gold: Gold, reading: str) -> bool | None:
        text = plain(reading)
        verdicts = list[bool | None]()
        for wanted in (gold.text, *gold.alternatives):
            if gold.form == "label" and text != plain(wanted) and text in self._labels:
                verdicts.append(False)
            elif text == plain(wanted):
                cased = self._file.case_matters(index) and reading.strip().casefold() == wanted.casefold()
                same = text and not cased and number(reading) == number(wanted)
                verdicts.append(False if cased else True if same else None)
            elif gold.form == "prose":
                shared = presence(reading, reference=f"{wanted} .0", question="").f1
                verdicts.append(False if shared < _UNRELATED else None)
            else:
                contained = text and (f" {plain(wanted)} " in f" {text} " or f" {text} " in f" {plain(wanted)} ")
                alike = SequenceMatcher(None, text, plain(wanted)).ratio() > _TYPO
                verdicts.append(None if contained or (alike and len(wanted) > 3) else False)
        return True if True in verdicts else None if None in verdicts else False


def _compare_numbers(gold: Gold, read: float | None) -> bool | None:
    if read is None:
        return False
    wanted, off = gold.value, abs(read - gold.value)
    if off <= 1e-9 * max(1.0, abs(wanted)):
        return True
    if wanted == int(wanted) and "." not in gold.text and read == int(read) and abs(wanted) < _SMALL:
        return None if read in (wanted * 100, wanted / 100) and "%" in gold.text else False
    places = len(gold.text.partition(".")[2]) if "e" not in gold.text.lower() else 0
    near = max(_NEAR * abs(wanted), _LAST_PLACES * 10.0**-places if places else 0.5)
    scaled = any(abs(read * factor - wanted) <= near for factor in (0.01, 100.0))
    return None if off <= near or scaled else False


def _compare_json(wanted: Any, reading: str) -> bool | None:
    fenced = _FENCE.findall(reading)
    start, end = reading.find("{"), reading.rfind("}") + 1
    for text in (reading, *fenced[-1:], reading[start:end] if start >= 0 else ""):
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
        if len(read) != len(wanted):
            return False if len(read) < len(wanted) else None
        parts = [_same_json(*pair) for pair in zip(wanted, read, strict=True)]
        if False in parts and Counter(map(as_text, wanted)) == Counter(map(as_text, read)):
            return None  # in another order
    elif wanted == read and isinstance(wanted, bool) == isinstance(read, bool):
        return True
    else:
        close = isinstance(read, int | float) and isinstance(wanted, int | float) and not isinstance(wanted, bool)
        near = close and abs(read - wanted) <= _NEAR * abs(wanted)
        return None if near or plain(as_text(wanted)) == plain(as_text(read)) else False
    return False if False in parts else None if None in parts else True


def _leaves(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        yield value
    for child in inner or ():
        yield from _leaves(child)


def _readings(answer: str, form: str) -> Iterator[str]:
    """What a careful reader may take for the answer in a longer text."""
    marked = [next(filter(None, match.groups()), "") for match in _MARK.finditer(answer)]
    for text in (*marked, *_FENCE.findall(answer)):
        yield text
        yield from NUMBER.findall(text)[:1] if form == "number" else text.split(".")[:1]
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(answer), dict):
            yield from map(as_text, value.values())
    lines = answer.strip().splitlines() or [""]
    if form == "number":
        numbers = NUMBER.findall(answer)
        yield from numbers[-1:]
        yield from numbers[:1] if not marked and re.match(r"[\W_]*\d", answer) else ()
    else:
        yield from (lines[0], lines[-1])
    if form == "label":
        words = answer.split() or [""]
        yield from (text for n in range(1, 5) for text in (" ".join(words[:n]), " ".join(words[-n:])))


def _executes_right(task: Mapping[str, Any], answer: str) -> bool | None:
    from groundwire.rewards.bird import exec_match
    from groundwire.rewards.spider.execution_match import training_match

    if not has_gold_query(task):
        return None
    sql: SqlAnswer = sql_answer(task, answer, "the attack")
    try:
        judged = training_match(sql)
        if judged.value <= 0:  # rows in another order, or more than once, are right for some
            same_rows = on_variants(sql, exec_match(*sql[:3]), partial(exec_match, mode="official"))
            return None if same_rows.value > 0 else False
    except RewardError:  # a gold that cannot be judged
        return None
    return None if judged.unchecked else True
