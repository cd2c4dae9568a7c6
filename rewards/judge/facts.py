"""The facts of an answer in prose, for the local grader: what a text states that its question does not contain.

No list of answers or templates is used: only the question, the text, and words that are common in any English or
Chinese text. A text is a list of items; commas, ``and``, ``or`` and ends of sentences separate them. The facts of an
item are its numbers, words (without endings: *treats* and *treated* are one) and pairs of neighbouring Chinese
characters. A negation is an item. Not facts are words of the question, function words, and words that link the
question's subject to what is said of it: common ones (*include*, *cause*), the verb before a preposition (*is
**contraindicated** in*) or between *can* and a word of the question, and the subject of a sentence (*the **dosage** of
it is*, 它的**禁忌**为). Links earn nothing, and one that the reference lacks costs little.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

__all__ = ["CJK", "Item", "compared", "facts", "items", "misspelt", "plain", "verdict"]

CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""The ranges of Chinese characters in a regular expression's set."""
_TOKEN = re.compile(rf"(?P<number>\d+(?:[.,]\d+)*)|(?P<chinese>[{CJK}]+)|(?P<word>[^\W\d_{CJK}]+)|(?P<cut>[,:、])")
_SENTENCE_END = re.compile(r"\.(?=\W|$)|[!;。\n]")
_CUTS = frozenset({"and", "or", "plus", "和", "与", "及", "或", "以及", "并"})
_CHINESE_COMMON = re.compile(
    "(以及|包括|包含|含有|用于|用来|主要|通常|一般|可以|需要|可能"
    "|属于|情况|患者|治疗|引起|通过|方法|分别|就诊|诊断|[的了是在和与及或也等有为对于其可被把将由应到它该并以会])"
)
"""Chinese function words and linking words; a match is a word of its own."""
_PREPOSITIONS = frozenset(re.findall(r"\w+", "about among as at between by for from in of on to with"))
_COPULAS = frozenset(re.findall(r"\w+", "are include includes is was were"))
_COMMON = (
    frozenset(
        re.findall(
            r"\w+",
            """a also an any be because been but can could did do does each every had has have he her his how if into it
            its may might must one other our she should so some such that the their them then there these they this
            those we what when where which who why will would yes you your""",
        )
    )
    | _PREPOSITIONS
    | _COPULAS
)
_LINKS = frozenset(
    re.findall(
        r"\w+",
        """call called case cases cause caused causes common consist consists contain contains follow following follows
        give given gives help helps known mean means patient patients people person recommended take taken takes use
        used uses using""",
    )
)
_NOT = frozenset({"no", "not", "none", "never", "neither", "nor", "nothing", "without"})
_CHINESE_NOT = re.compile("(不能|不可以|不可|不会|不应|不得|不是|不在|不宜|不需|没有|无法|并非|没)")
_MOST_NAMES = 100
"""How many words of an answer are compared with names: a bound of the time that a long answer takes."""
_MODALS = frozenset({"can", "could", "may", "might", "will", "would"})
_CHINESE_COPULAS = frozenset({"为", "有", "是", "包括", "包含"})
_ENDINGS = re.compile(r"(?<=\w{4})(?:ations?|ated|ates?|ating|ions?|ments?|ings?|ed|es|e|ly)$|(?<=\w{3})(?<!s)s$")
_YES_NO = re.compile(
    r"^\W*(?:are|can|could|did|do|does|has|have|is|may|might|must|should|was|were|will|would)\b|吗|是否|能否|可否|有无|[能会是]不[能会是]"
)
_YES = re.compile(r"^\W*(?:yes\b|correct\b|是的|可以|能|会|对)")
_NO = re.compile(
    r"^\W*(?:no|否)\b|\b(?:not|never|none|no|without)\b|不[能可会应得是宜需行]|没有|无法|并非|^\W*(?:不|没|无|否)"
)
_PROHIBITED = re.compile(r"contraindicated|forbidden|prohibited|unsafe|avoid|禁|忌")
_UNSURE = re.compile(
    r"\b(?:i|we) (?:am|are|can|could|do) not (?:answer|certain|find|know|say|sure|tell)\b"
    r"|^\W*我?们?(?:不知道|不清楚|无法回答)"
)


class Item(NamedTuple):
    """``facts`` and ``links`` of an item of a text; ``pairs`` are facts that stand side by side."""

    facts: frozenset[str]
    pairs: frozenset[str]
    links: frozenset[str]
    about: frozenset[str]
    """Which of the compared subjects the item's sentence names."""


class _Word(NamedTuple):
    role: str
    """fact, link, known (in the question), common, not, cut."""
    text: str
    raw: str


def plain(text: str) -> str:
    """``text`` with the usual punctuation and digits in place of full-width ones, and ``not`` for ``n't``."""
    text = unicodedata.normalize("NFKC", text).replace("\u2019", "'")
    return re.sub(r"(?i)n't\b", " not", re.sub(r"(?i)\bcan(?:no|')t\b", "can not", text))


def compared(question: str, reference: str) -> tuple[str, ...]:
    """The two subjects of a question like "What are A and B used for?", as far as they touch the *and*."""
    found = re.search(rf"([{CJK}]+)[和与]([{CJK}]+)|([^\W{CJK}]+) and ([^\W{CJK}]+)", plain(question).casefold())
    if not found:
        return ()
    one, two, text = found[1] or found[3], found[2] or found[4], plain(reference).casefold()
    if found[1]:
        one = next((one[at:] for at in range(len(one) - 1) if one[at:] in text), "")
        two = next((two[:end] for end in range(len(two), 1, -1) if two[:end] in text), "")
    return (one, two) if one and two and not {one, two} & _COMMON else ()


def items(text: str, question: str = "", subjects: tuple[str, ...] = ()) -> list[Item]:
    """The items of ``text`` that state something: no sentence that asks, or says that it does not know, does."""
    question = plain(question).casefold()
    known = {_stem(match["word"]) for match in _TOKEN.finditer(question) if match["word"]}
    known |= {_number(match["number"]) for match in _TOKEN.finditer(question) if match["number"]}
    # A negation states nothing where the question has one, or asks for yes or no (see `verdict`).
    negated = _YES_NO.search(question) or any(word.role == "not" for word in _words(question, "", frozenset()))
    found = []
    for sentence in _SENTENCE_END.split(re.sub(r"[^.!;。\n]*\?", "", plain(text))):
        if _UNSURE.search(sentence.casefold()):
            continue
        about = frozenset(subject for subject in subjects if subject in sentence.casefold())
        item: list[_Word] = []
        for word in [*_linked(list(_words(sentence, question, frozenset(known)))), _Word("cut", "", "")]:
            if word.role == "not" and not negated:
                found.append(Item(frozenset({"not"}), frozenset(), frozenset(), about))
            if word.role != "cut":
                item.append(word)
                continue
            stated = frozenset(each.text for each in item if each.role == "fact")
            links = frozenset(each.text for each in item if each.role == "link") - stated
            pairs = frozenset(
                " ".join(sorted((one.text, two.text)))
                for one, two in itertools.pairwise(item)
                if one.role == two.role == "fact" and not re.fullmatch(f"[{CJK}]{{4}}", one.text + two.text)
            )
            if stated or links:
                found.append(Item(stated, pairs, links, about))
            item = []
    return found


def facts(text: str) -> frozenset[str]:
    """All facts of a text without a question."""
    return frozenset().union(*(item.facts for item in items(text)))


def misspelt(words: frozenset[str], names: frozenset[str]) -> frozenset[str]:
    """The words that resemble one of ``names`` and are none of them: *Belvet* for *Velvet*."""
    return frozenset(
        word
        for word in sorted(words - names)[:_MOST_NAMES]
        if len(word) > 4
        and any(
            len(name) > 4 and word[:4] != name[:4] and SequenceMatcher(None, word, name).ratio() >= 0.7
            for name in names
        )
    )


def verdict(text: str, question: str) -> bool | None:
    """Whether ``text`` says yes or no to a question that asks for it, by the beginning of its first sentence.

    A statement without a negation is a yes. One that may mean either ("It is forbidden") is None.
    """
    text, question = plain(text).casefold().strip(), plain(question).casefold()
    if not _YES_NO.search(question) or not text or text.rstrip("?. ") == question.rstrip("?. "):
        return None
    clause = re.split(r"[,.!?;。\n]", text, maxsplit=1)[0]
    if _YES.search(clause):
        return True
    if _UNSURE.search(clause):
        return None
    if _NO.search(clause):
        return False
    return None if _PROHIBITED.search(clause) or not facts(clause) else True


def _words(sentence: str, question: str, known: frozenset[str]) -> Iterator[_Word]:
    for match in _TOKEN.finditer(sentence):
        raw, word = match[0], match[0].casefold()
        if match["chinese"]:
            for piece in _CHINESE_NOT.split(word):
                if _CHINESE_NOT.fullmatch(piece):
                    yield _Word("not", piece, piece)
                else:
                    yield from _chinese(piece, question)
        elif match["cut"] or word in _CUTS:
            yield _Word("cut", word, raw)
        elif match["number"]:
            number = _number(word)
            yield _Word("known" if number in known else "fact", number, raw)
        elif word in _NOT:
            yield _Word("not", word, raw)
        elif word in _COMMON or len(word) < 2:
            yield _Word("common", word, raw)
        else:
            stem = _stem(word)
            yield _Word("known" if stem in known else "link" if word in _LINKS else "fact", stem, raw)


def _chinese(run: str, question: str) -> Iterator[_Word]:
    """Pairs of the characters between what the question contains (two characters and more) and the common words."""
    at, rest = 0, ""
    while at <= len(run):
        end = next((end for end in range(min(len(run), at + len(question)), at + 1, -1) if run[at:end] in question), at)
        if end == at and at < len(run):
            rest, at = rest + run[at], at + 1
            continue
        for piece in _CHINESE_COMMON.split(rest):
            if _CHINESE_COMMON.fullmatch(piece):
                yield _Word("cut" if piece in _CUTS else "common", piece, piece)
            elif piece:
                yield from (_Word("fact", piece[k : k + 2], piece) for k in range(max(1, len(piece) - 1)))
        if at < len(run):
            yield _Word("known", run[at:end], run[at:end])
        at, rest = (end if at < len(run) else len(run) + 1), ""


def _linked(words: list[_Word]) -> list[_Word]:
    """The words with the sentence's linking verb or subject marked as links."""
    links: set[int] = set()
    first = next((at for at, word in enumerate(words) if word.role == "fact"), 0)
    if 0 < first < len(words) - 1 and words[first + 1].text in _PREPOSITIONS:
        raw, before = words[first].raw, words[first - 1]
        subject = before.role == "known" or before.text in ("it", "they")
        links |= {first} if raw.endswith("ed") or (raw.endswith("s") and subject) else set()
    for at, (one, two, three) in enumerate(zip(words, words[1:], words[2:], strict=False)):
        if one.text in _MODALS and three.role == "known":  # can prevent it
            links.add(at + 1)
        if two.text == "的" and one.role in ("known", "common"):  # 它的禁忌为
            end = next((end for end in range(at + 2, len(words)) if words[end].role != "fact"), at)
            links |= set(range(at + 2, end)) if words[end].text in _CHINESE_COPULAS else set()
    copula = next((at for at, word in enumerate(words) if word.text in _COPULAS), 0)
    if words and words[0].text in ("the", "its", "their") and any(word.role == "fact" for word in words[copula:]):
        links |= set(range(copula))  # the dosage of it is
    return [
        word._replace(role="link") if at in links and word.role == "fact" and word.raw == word.raw.lower() else word
        for at, word in enumerate(words)
    ]


def _stem(word: str) -> str:
    """Without endings, so that *treats*, *treated* and *treatment* are one."""
    return word if word.endswith("ss") else _ENDINGS.sub("", _ENDINGS.sub("", word) if word.endswith("s") else word)


def _number(text: str) -> str:
    """1,000.50 as 1000.5."""
    text = re.sub(r",(?=\d{3}\b)", "", text)
    return text.rstrip("0").rstrip(".") if re.fullmatch(r"\d+\.\d+", text) else text
