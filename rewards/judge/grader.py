"""A grader without a model: it compares the facts of an answer with the reference's, and applies rules of style.

It is deterministic and free, for laptops and tests. It can be fooled, because it ignores the order of words: its scores
are a hint, not a replacement for a judge model.

**Facts** of a text are its numbers, its words without the most common ones, and pairs of neighbouring Chinese
characters. Negations are facts; facts of the question are not, because repeating them answers nothing.

- accuracy: the share of the answer's facts that are in the reference.
- completeness: the share of the reference's facts that are in the answer.
- clarity: 1, minus 0.5 for raw data (rows, JSON, SQL), 0.3 for sentences of more than 40 words on average, 0.3 for more
  than three times the reference's length, and the share of three-word runs that are repeated.
- professionalism: 1, minus 0.25 each for a missing end of sentence, for shouting (``!!``, words in capitals), for slang
  and emoji, and for words about grading (scores, rubrics, instructions).

Below half of the reference's facts, the other three scores are scaled down in proportion: one right word, however
clear, is hardly an answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from groundwire.rewards._types import RewardError

__all__ = ["facts", "grade"]

_CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"(?P<number>\d+(?:[.,]\d+)*)|(?P<chinese>[{_CJK}]+)|(?P<word>[^\W\d_{_CJK}]+)")
_JOINS = re.compile("[的了是在和与及或也等有为对于其可被把将]")
"""Chinese function words. The negations 不, 无, 没 and 非 are not among them."""
_COMMON = frozenset(
    re.findall(
        r"\w+",
        """a about also an and any are as at be because been but by can could did do does for from had has have he her
        his how if in into is it its may might of on one or other our she should some such that the their them then
        there these they this those to was we were what when where which who will with would you your""",
    )
)
_RAW = re.compile(r"^\s*[\[({]|\[\(|\('|\{\"|```|\bselect\b.+\bfrom\b", re.IGNORECASE | re.DOTALL)
_GRADER = re.compile(r"\b(rubric|grader|scores?|ignore|instructions?|judge)\b|评分|打分|满分|忽略", re.IGNORECASE)
_SLANG = re.compile(r"\b(lol|lmao|omg|wtf|gonna|wanna|dunno|u|ur|thx|pls)\b", re.IGNORECASE)
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf]")
_SHOUTING = re.compile(r"!{2}|\b[A-Z]{4,}\b(?:\W+[A-Z]{4,}\b){2}")
_SENTENCE_END = re.compile(r"[.!?。][\"'\u201d\u2019)\]]*\s*$")
_LONG_SENTENCE, _SHORT_TEXT = 40, 200


def grade(answer: str, *, reference: str, question: str) -> dict[str, float]:
    """The four scores of ``answer``, 0 to 1 each. Raises :class:`rewards.RewardError` for a reference without facts."""
    # Full-width punctuation and digits become the usual ones.
    answer, reference = unicodedata.normalize("NFKC", answer), unicodedata.normalize("NFKC", reference)
    known = facts(question)
    wanted = facts(reference) - known or facts(reference)
    if not wanted:
        raise RewardError(f"the reference answer {reference!r} has no facts to compare an answer with")
    # If the question has every fact of the reference ("Is it …?" "Yes, it is"), its words count.
    given = facts(answer) - (known - wanted)
    right = len(wanted & given)
    completeness = right / len(wanted)
    scale = min(1.0, 2 * completeness)
    return {
        "accuracy": scale * right / max(1, len(given)),
        "completeness": completeness,
        "clarity": scale * _clarity(answer, reference),
        "professionalism": scale * _professionalism(answer),
    }


def facts(text: str) -> frozenset[str]:
    """The facts of a text: numbers, content words without a plural s, and pairs of Chinese characters."""
    found: set[str] = set()
    for match in _TOKEN.finditer(unicodedata.normalize("NFKC", text).casefold()):
        if match["number"]:
            found.add(_number(match["number"]))
        elif match["chinese"]:
            for run in _JOINS.split(match["chinese"]):
                found |= {run[at : at + 2] for at in range(max(1, len(run) - 1))} if run else set()
        elif match["word"] not in _COMMON:
            word = match["word"]
            found.add(word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word)
    return frozenset(found)


def _number(text: str) -> str:
    """1,000.50 as 1000.5."""
    text = re.sub(r",(?=\d{3}\b)", "", text)
    return text.rstrip("0").rstrip(".") if re.fullmatch(r"\d+\.\d+", text) else text


def _clarity(answer: str, reference: str) -> float:
    words = [match[0] for match in _TOKEN.finditer(answer.casefold())]
    length = sum(len(word) if re.match(f"[{_CJK}]", word) else 1 for word in words)
    sentences = max(1, len(re.findall(r"[.!?;\n]+(?:\s|$)|。", answer)))
    score = 1.0
    score -= 0.5 * bool(_RAW.search(answer))
    score -= 0.3 * (length / sentences > _LONG_SENTENCE)
    score -= 0.3 * (len(answer) > max(_SHORT_TEXT, 3 * len(reference)))
    runs = Counter(zip(words, words[1:], words[2:]))  # noqa: B905 (triples: the last words begin none)
    if runs:
        score -= 1 - len(runs) / sum(runs.values())
    return max(0.0, score)


def _professionalism(answer: str) -> float:
    faults = (
        not _SENTENCE_END.search(answer),
        _SHOUTING.search(answer),
        _SLANG.search(answer) or _EMOJI.search(answer),
        _GRADER.search(answer),
    )
    return 1 - 0.25 * sum(map(bool, faults))
