"""The local grader: without a model, an answer is scored by the facts that it shares with the reference.

Facts are numbers, words and pairs of neighbouring Chinese characters, without those of the question and a few function
words. The score is the F1 of the two multisets, as SQuAD's token F1. It sees neither order nor negation, hedges,
synonyms or grammar: that needs a judge's model. Its time is linear in the length of the texts.
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
_ENDING = re.compile(r"(?<=\w{3})(?:ed|es|s|ing|e)$")
"""*treats* and *treated* are one word."""
_MOST_CHARS = 20_000
"""A longer answer is read up to here: no reference is so long."""
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
    wanted = Counter(fact for fact in _facts(reference) if fact not in asked)
    if not wanted:  # the question has every fact of the reference: they count
        asked, wanted = frozenset(), Counter(_facts(reference))
    if not wanted:
        raise RewardError(f"the reference answer {reference!r:.200} has no facts to compare an answer with")
    answered = Counter(fact for fact in _facts(answer) if fact not in asked)
    shared = (wanted & answered).total()
    return Presence(shared / max(1, answered.total()), shared / wanted.total())


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
