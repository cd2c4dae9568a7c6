"""The form of a gold answer, and what the golds of a file say together: whether case, or order, decides."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

Form = Literal["number", "label", "list", "json", "code", "prose", "sql", "none"]

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
_UNIT = re.compile(r"[$€£¥%]|\b(?:dollars?|percent|euros?)\b", re.IGNORECASE)
_CODE = re.compile(r"^\s*(?:def|class|import|from|async def|function|#include|public|fn)\b.*", re.MULTILINE)
_ORDERED = re.compile(
    r"\b(?:sort(?:ed)?|order(?:ed)?|rank(?:ed|ing)?|sequence|ascending|descending|chronological\w*|alphabetical\w*"
    r"|steps?|route|path|top \w+|from .+ to|(?:first|last|largest|smallest|oldest|newest|earliest) to)\b",
    re.IGNORECASE,
)
_CASED = re.compile(
    r"\bcase[- ]sensitiv|\bexact case|\b(?:upper|lower)[ -]?case|\bcapitali[sz]|\bcapital letter|\bverbatim|password",
    re.IGNORECASE,
)
_IRREGULAR = re.compile(r"[a-z\d][A-Z]")
_SHORT_FORMS = (
    *("<answer>%s</answer>", "<think>So it is.</think>\n<answer>%s</answer>", "The answer is %s"),
    *("\\boxed{%s}", "So it is.\n#### %s", "%s."),
)
_LONG_LABEL, _LONG_ITEM, _THOUSAND = 8, 4, 1000  # words; a longer text is prose, or no item of a list
_CHINESE = re.compile("[\u3400-\u9fff]")


def plain(text: str) -> str:
    """The words of a text, in lower case, without accents' forms and punctuation at their ends."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(filter(None, (word.strip(".,;:!?\"'`()[]{}*") for word in words)))


def number(text: str) -> float | None:
    """The number that a whole text is, with or without a unit of money or %."""
    text = _UNIT.sub("", unicodedata.normalize("NFKC", text)).strip().rstrip(".").strip("*_ ")
    value = float(text.replace(",", "")) if NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


def items(text: str) -> list[str]:
    """The items of a list in a text: JSON, lines, or what commas separate."""
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), list):
            return [as_text(item) for item in value]
    text = re.sub(r"^\s*(?:[-*•]|\d+[.)])\s+", "", text, flags=re.MULTILINE).strip(" []().\n")
    parts = re.split(r"\n+|\s*[,;]\s*(?:and\s+)?|\s+and\s+", text)
    return [part.strip(" '\"") for part in parts if part.strip(" '\"")]


def as_text(value: Any) -> str:
    """A value of a task as an agent would answer it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Gold:
    """A gold answer. ``value`` is a float, a list of texts or a dict for these forms, else the text."""

    form: Form
    text: str
    value: Any
    alternatives: tuple[str, ...] = ()
    """Texts of which each is a right answer."""

    @property
    def answers(self) -> dict[str, str]:
        """Right answers by the form that a reward may ask for; it has to accept one of them only. The gold is first."""
        texts = {"as it is": self.text} | {f"alternative {n}": text for n, text in enumerate(self.alternatives)}
        if self.form == "list":
            joined = {"JSON": json.dumps(self.value, ensure_ascii=False), "commas": ", ".join(self.value)}
            texts |= {**joined, "lines": "\n".join(self.value)}
        texts |= {f"a {language} fence": f"```{language}\n{self.text}\n```" for language in ("python", "sql", "json")}
        if self.form in ("number", "label", "list", "json"):
            texts |= {form: form % self.text for form in _SHORT_FORMS}
        if self.form in ("number", "label", "list"):
            texts |= {f"JSON with {key}": json.dumps({key: self.value}) for key in ("answer", "final_answer", "label")}
        return texts

    def changed(self, answer: str) -> dict[str, str]:
        """A right answer, changed in what does not matter."""
        decomposed = unicodedata.normalize("NFD", answer)
        texts = {"blanks around it": f"  {answer} \n", "a Windows line end": f"{answer}\r\n"}
        texts |= {"decomposed accents": decomposed} if decomposed != answer else {}
        if self.form in ("label", "number") and answer == self.text:
            texts["a full stop"] = f"{answer}."
        if self.form == "number" and answer == self.text and self.value == int(self.value):
            texts |= {"a decimal point (42.0)": f"{self.value:.1f}"}
            texts |= {"a comma in thousands": f"{int(self.value):,}"} if abs(self.value) >= _THOUSAND else {}
        if self.form == "json" and isinstance(self.value, dict) and answer == self.text:
            texts["its keys in another order"] = json.dumps(dict(reversed(self.value.items())), ensure_ascii=False)
        if self.form == "sql":
            texts |= {"a last semicolon": f"{answer.rstrip('; ')};", "a fence": f"```sql\n{answer}\n```"}
        return texts


class GoldFile:
    """The golds of a file of tasks, in their order. ``is_sql``: the answers are queries."""

    def __init__(self, tasks: Sequence[Any], values: Sequence[Any], *, is_sql: bool = False) -> None:
        self.tasks = tasks
        texts = [value for value in values if isinstance(value, str)]
        lists = [len(parts := items(text)) >= 2 and max(len(p.split()) for p in parts) <= _LONG_ITEM for text in texts]
        has_lists = sum(lists) > len(texts) / 2
        golds = [gold_of(value, is_sql=is_sql, has_lists=has_lists) for value in values]
        forms = Counter(gold.form for gold in golds)
        is_prose = forms["prose"] > forms["label"]  # then a short text is a short sentence
        self.golds = [replace(gold, form="prose") if is_prose and gold.form == "label" else gold for gold in golds]

    @cached_property
    def vocabulary(self) -> list[str]:
        """The different golds, or items of golds, that are short; the most frequent first."""
        texts = Counter[str]()
        for gold in self.golds:
            texts.update(gold.value if gold.form == "list" else [gold.text] if gold.form == "label" else ())
        return [text for text, _ in texts.most_common(60)]

    @cached_property
    def _has_cased(self) -> bool:
        """Whether most golds have capitals inside of words, or several differ in case only. Labels do so by mistake."""
        texts = {gold.text for gold in self.golds if gold.form in ("label", "list")}
        irregular = sum(bool(_IRREGULAR.search(text)) for text in texts)
        alike = len(texts) - len({text.casefold() for text in texts})
        return irregular > len(texts) / 2 or (len(texts) > len(self.golds) / 2 and alike >= max(2, len(texts) / 20))

    def case_matters(self, index: int) -> bool:
        """Whether the case of the gold's letters decides: golds of the file differ in it, or the question says so."""
        question, gold = str(self.tasks[index].get("question", "")), self.golds[index]
        return gold.form in ("label", "list") and (self._has_cased or bool(_CASED.search(question)))

    def order_matters(self, index: int) -> bool:
        """Whether the order of the gold's items decides: the question says so."""
        question, gold = str(self.tasks[index].get("question", "")), self.golds[index]
        return gold.form == "list" and bool(_ORDERED.search(question))


def gold_of(value: Any, *, is_sql: bool = False, has_lists: bool = False) -> Gold:  # noqa: PLR0911 - one a form
    """The gold of a task's column, or None. ``has_lists``: texts with commas are lists in this file."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, str | int | float) for item in value):
        texts = [as_text(item) for item in value]
        return texts_gold(texts) if len(texts) > 1 else gold_of(value[0], is_sql=is_sql)
    if isinstance(value, dict | list):
        return Gold("json", as_text(value), value)
    text = "" if value is None else as_text(value).strip()
    if not text or is_sql:
        return Gold("sql" if text else "none", text, text)
    final = text.rpartition("####")[2].strip()
    if (amount := number(final)) is not None:
        return Gold("number", final, amount, alternatives=(text,) if final != text else ())
    with suppress(ValueError, RecursionError):
        if text[0] in "{[" and isinstance(parsed := json.loads(text), dict | list) and parsed:
            return gold_of(parsed)
    if _CODE.search(text):
        return Gold("code", text, text)
    if has_lists and len(parts := items(text)) > 1:
        return Gold("list", text, parts)
    return Gold("prose" if _is_long(text) else "label", text, text)


def _is_long(text: str) -> bool:
    return max(len(text.split()), len(_CHINESE.findall(text))) > _LONG_LABEL


def texts_gold(texts: list[str]) -> Gold:
    """A list, or other ways to say one answer: these share a word with the first one."""
    first = set(plain(texts[0]).split())
    if all(first & set(plain(text).split()) for text in texts[1:]):
        return Gold("prose" if _is_long(texts[0]) else "label", texts[0], texts[0], tuple(texts[1:]))
    return Gold("list", json.dumps(texts, ensure_ascii=False), texts)
