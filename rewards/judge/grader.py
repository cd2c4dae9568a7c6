"""A grader without a model: it compares the facts of an answer with the reference's, and applies rules of style.

It stands in for a judge model with the same four criteria, on laptops and in tests: deterministic and free. It knows no
synonyms and no grammar, so its scores are a hint, not a replacement for a judge model. ``facts.py`` says what a fact
is. Where the question has every fact of the reference, its words count.

- completeness: the mean over the reference's items of the squared share of their facts (and of their neighbouring
  pairs) that the answer has, so half a name is worth a quarter at most. Where the question compares two subjects, a
  fact of one that is stated of the other does not count.
- accuracy: the mean over the answer's items of the share of their facts that the reference has. A link that the
  reference lacks counts a quarter of a fact. A word that is nearly one of the question or reference is a wrong name,
  and an item of its own.
- clarity: 1, minus 0.5 for raw data (rows, JSON, SQL), 0.3 for sentences of more than 40 words on average, 0.3 for more
  than three times the reference's length, and the share of three-word runs that are repeated. The length of sentences
  and the repetitions of the reference are free.
- professionalism: 1, minus 0.25 each for a missing end of sentence, for shouting (``!!``, words in capitals), for slang
  and emoji, and for words about grading (scores, rubrics, instructions).

The yes or no of a question that asks for one counts as much in the first two as all other facts together.

All four are multiplied by F², where F is the harmonic mean of the first two: 0.44 if one of two facts is missing. A
wrong or missing yes or no halves them again. So an answer without its main fact, however clear, stays below 0.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from groundwire.rewards._types import RewardError
from groundwire.rewards.judge.facts import CJK, Item, compared, facts, items, misspelt, plain, verdict

__all__ = ["grade"]

_TOKEN = re.compile(rf"\d+(?:[.,]\d+)*|[{CJK}]+|[^\W\d_{CJK}]+")
_RAW = re.compile(r"^\s*[\[({]|\[\(|\('|\{\"|```|\bselect\b.+\bfrom\b", re.IGNORECASE | re.DOTALL)
_GRADER = re.compile(r"\b(rubric|grader|scores?|ignore|instructions?|judge)\b|评分|打分|满分|忽略", re.IGNORECASE)
_SLANG = re.compile(r"\b(lol|lmao|omg|wtf|gonna|wanna|dunno|u|ur|thx|pls)\b", re.IGNORECASE)
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf]")
_SHOUTING = re.compile(r"!{2}|\b[A-Z]{4,}\b(?:\W+[A-Z]{4,}\b){2}")
_SENTENCE_END = re.compile(r"[.!?。][\"'\u201d\u2019)\]]*\s*$")
_LONG_SENTENCE, _SHORT_TEXT = 40, 200


_LINK = 0.25
"""What a linking word that is not in the reference counts, of a fact."""


def grade(answer: str, *, reference: str, question: str) -> dict[str, float]:
    """The four scores of ``answer``, 0 to 1 each. Raises :class:`rewards.RewardError` for a reference without facts."""
    answer, reference = plain(answer), plain(reference)
    subjects, expected = compared(question, reference), verdict(reference, question)
    wanted = _stating(items(reference, question, subjects))
    if not wanted and expected is None:  # the question has every fact of the reference: its words count
        question, wanted = "", _stating(items(reference, "", subjects))
    if not wanted and expected is None:
        raise RewardError(f"the reference answer {reference!r} has no facts to compare an answer with")
    given = items(answer, question, subjects)
    shares, precise = [_recall(item, given) for item in wanted], _precision(given, wanted, items(reference, question))
    stated = frozenset().union(*(item.facts for item in given))
    precise += [(0.0, 1.0) for _ in misspelt(stated, facts(plain(question).replace("?", " ")) | facts(reference))]
    agrees = expected is None or verdict(answer, question) == expected
    if expected is not None:
        number = max(1, len(wanted))
        shares += number * [float(agrees)]
        precise += number * [(float(agrees), 1.0)]
    completeness = sum(shares) / len(shares)
    accuracy = sum(right for right, _ in precise) / max(1.0, sum(weight for _, weight in precise))
    both = completeness + accuracy
    scale = (2 * completeness * accuracy / both) ** 2 * (1 if agrees else 0.5) if both else 0.0
    return {
        "accuracy": scale * accuracy,
        "completeness": scale * completeness,
        "clarity": scale * _clarity(answer, reference),
        "professionalism": scale * _professionalism(answer),
    }


def _stating(found: Iterable[Item]) -> list[Item]:
    return list(dict.fromkeys(item for item in found if item.facts))


def _recall(item: Item, given: Iterable[Item]) -> float:
    """The squared share of an item's facts that the answer has, without those stated of another subject."""
    usable = [each for each in given if not each.about or not item.about or each.about & item.about]
    had = frozenset().union(*(each.facts | each.links | each.pairs for each in usable))
    parts = item.facts | item.pairs
    return (len(parts & had) / len(parts)) ** 2


def _precision(given: Iterable[Item], wanted: Iterable[Item], reference: Iterable[Item]) -> list[tuple[float, float]]:
    """The right part and the weight of each different item of the answer."""
    right = frozenset().union(*(item.facts for item in wanted))
    free = frozenset().union(*(item.links for item in reference)) - right
    found = []
    for stated, links in dict.fromkeys((item.facts - free, item.links - free - right) for item in given):
        total = len(stated) + _LINK * len(links)
        if total:
            weight = 1.0 if stated else _LINK
            found.append((weight * len(stated & right) / total, weight))
    return found


def _clarity(answer: str, reference: str) -> float:
    score = 1.0
    score -= 0.5 * bool(_RAW.search(answer))
    score -= 0.3 * (_sentence_length(answer) > max(_LONG_SENTENCE, _sentence_length(reference)))
    score -= 0.3 * (len(answer) > max(_SHORT_TEXT, 3 * len(reference)))
    return max(0.0, score - max(0.0, _repeated(answer) - _repeated(reference)))


def _sentence_length(text: str) -> float:
    """Words, or Chinese characters, a sentence."""
    words = _TOKEN.findall(text)
    length = sum(len(word) if re.match(f"[{CJK}]", word) else 1 for word in words)
    return length / max(1, len(re.findall(r"[.!?;\n]+(?:\s|$)|。", text)))


def _repeated(text: str) -> float:
    """The share of the runs of three words that are repeated."""
    words = _TOKEN.findall(text.casefold())
    runs = set(zip(words, words[1:], words[2:]))  # noqa: B905 (triples: the last words begin none)
    return 1 - len(runs) / max(1, len(words) - 2) if runs else 0.0


def _professionalism(answer: str) -> float:
    faults = (
        not _SENTENCE_END.search(answer),
        _SHOUTING.search(answer),
        _SLANG.search(answer) or _EMOJI.search(answer),
        _GRADER.search(answer),
    )
    return 1 - 0.25 * sum(map(bool, faults))
