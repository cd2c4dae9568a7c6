"""The local grader: without a model, an answer is scored by the facts that it shares with the reference.

Facts are numbers, words and pairs of neighbouring Chinese characters, without those of the question and a few function
words; two that follow each other within an item of a list are a further fact with the weight of three, so that words
in another order earn little. The score is the F1 of the two multisets, as SQuAD's token F1. It is half of that if one
text denies and the other does not, or if the answer has a name or number that neither question nor reference has. It
sees no synonyms, hedges or grammar, and only denials with one of a few words: more needs a judge's model. Its time is
linear in the length of the texts.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from groundwire.rewards._types import RewardError
from groundwire.tools.sql import QueryError, run_query

_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"\d+(?:[.,]\d+)*|[{_CHINESE}]+|[^\W\d_{_CHINESE}]+")
_FUNCTION_WORDS = frozenset(
    [
        *("a", "also", "an", "and", "any", "are", "as", "at", "be", "been", "by", "can", "could", "do", "does"),
        *("for", "from", "had", "has", "have", "if", "in", "into", "is", "it", "its", "may", "might", "of", "on"),
        *("or", "should", "so", "that", "the", "their", "them", "there", "these", "they", "this", "those", "to"),
        *("was", "were", "which", "will", "with", "would", "you", "your"),
    ]
)
_BREAK = re.compile(r"[.,;:!?()\n、。和及或](?!\d)|\b(?:and|or)\b", re.IGNORECASE)
"""Between the items of a list, whose order is free."""
_DENIAL = re.compile(
    r"\b(?:not|never|cannot|neither|nor|without|false|untrue|wrong|incorrect)\b|n['\u2019]t\b|并非|并不|不是|没有|错误",
    re.IGNORECASE,
)
_NAME = re.compile(r"(?<=[\w,;)] )(?:[A-Z][^\W\d_]+|\d+(?:[.,]\d+)*(?![\d.)]))")
"""A capital or a number within a sentence, which begins no item of a list."""
_PAIR_WEIGHT = 3
_ENDING = re.compile(r"(?<=\w{3})(?:ed|es|s|ing|e)$")  # *treats* and *treated* are one word
_MOST_CHARS = 20_000  # a longer answer is read up to here: no reference is so long
_MOST_QUERIES, _MOST_ROWS = 10, 1000


class Presence(NamedTuple):
    """``recall``: the share of the reference's facts in the answer; ``precision``: the share of the answer's facts in
    the reference."""

    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Their harmonic mean."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


def presence(answer: str, *, reference: str, question: str) -> Presence:
    """How far the facts of ``answer`` are those of ``reference``.

    Raises :class:`rewards.RewardError` if that has none.
    """
    asked = frozenset(_facts(question))
    wanted = _count(reference, asked)
    if not wanted:  # the question has every fact of the reference: they count
        asked = frozenset()
        wanted = _count(reference, asked)
    if not wanted:
        raise RewardError(f"the reference answer {reference!r:.200} has no facts to compare an answer with")
    answered = _count(answer, asked)
    shared = float((wanted & answered).total())
    denied = [_DENIAL.search(text[:_MOST_CHARS]) is not None for text in (answer, reference)]
    known = frozenset(_facts(f"{question} {reference}"))
    others = [name for name in _NAME.findall(answer[:_MOST_CHARS]) if not known.issuperset(_facts(name))]
    if others or (denied[0] != denied[1] and not _DENIAL.search(question)):
        shared /= 2
    return Presence(shared / max(1, answered.total()), shared / wanted.total())


def _count(text: str, asked: frozenset[str]) -> Counter[Any]:
    """The facts and pairs of facts in ``text``, without those ``asked``, with their weights."""
    counts = Counter[Any]()
    for item in _BREAK.split(unicodedata.normalize("NFKC", text[:_MOST_CHARS])):
        facts = [fact for fact in _facts(item) if fact not in asked]
        counts.update(facts)
        counts.update(pair for pair in itertools.pairwise(facts) for _ in range(_PAIR_WEIGHT))
    return counts


def _facts(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(unicodedata.normalize("NFKC", text[:_MOST_CHARS])):
        token = match[0].casefold()
        if "\u3400" <= token[0] <= "\ufaff" and len(token) > 1:
            yield from map("".join, itertools.pairwise(token))
        elif token[0].isdecimal():
            yield re.sub(r",(?=\d{3}\b)", "", token)
        elif token not in _FUNCTION_WORDS:
            yield _ENDING.sub("", token)


def share_read(steps: Any, gold: str, database: str) -> float:
    """The share of the values of the rows of ``gold`` that the successful queries among ``steps`` read, too.

    Raises :class:`rewards.RewardError` if the gold query fails.
    """
    try:
        wanted = _values(gold, database)
    except QueryError as error:
        raise RewardError(f"the gold query failed on {database}: {error}: {gold}") from error
    queries = dict.fromkeys(step["input"] for step in steps if step["kind"] == "tool" and step["ok"])
    read = set[Any]()
    for query in list(queries)[-_MOST_QUERIES:]:
        try:
            read |= _values(query, database)
        except QueryError:  # no query, but what another tool was given
            continue
    return len(wanted & read) / len(wanted) if wanted else float(bool(queries))


def _values(query: str, database: str) -> set[Any]:
    return {value for row in run_query(database, query, max_rows=_MOST_ROWS).rows for value in row if value is not None}
