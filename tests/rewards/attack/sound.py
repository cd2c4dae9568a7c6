"""Sound rewards. Some are strict, some pay a part for a part of the answer. The tasks of each are in ``TASKS``."""

from __future__ import annotations

import json
import re
from typing import Any

TASKS = {
    "exact": "cities",
    "last_number": "numbers",
    "boxed": "numbers",
    "close": "decimals",
    "label": "labels",
    "letter": "choices",
    "ranked_list": "ranked",
    "f1_of_items": "sets",
    "share_of_fields": "records",
    "small_format_bonus": "labels",
    "cached": "cities",
    "facts": "prose",
}


def exact(task: dict[str, Any], answer: str) -> float:
    return float(" ".join(answer.split()).casefold().rstrip(".") == task["answer"].casefold())


def last_number(task: dict[str, Any], answer: str) -> float:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(task["answer"]))


def boxed(task: dict[str, Any], answer: str) -> float:
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", answer)
    return float(len(boxes) == 1 and boxes[0].strip() == task["answer"])


def close(task: dict[str, Any], answer: str) -> float:
    try:
        return float(abs(float(answer.strip().lstrip("$")) - task["answer"]) <= 0.01)
    except ValueError:
        return 0.0


def label(task: dict[str, Any], answer: str) -> float:
    """Of a long answer the last word."""
    words = re.findall(r"[a-z]+", answer.lower())
    return float(bool(words) and words[-1] == task["answer"])


def letter(task: dict[str, Any], answer: str) -> float:
    found = re.fullmatch(r"\s*(?:the answer is\s*)?\(?([A-D])\)?[.\s]*", answer, re.IGNORECASE)
    return float(found is not None and found[1].upper() == task["answer"])


def ranked_list(task: dict[str, Any], answer: str) -> float:
    try:
        return float(json.loads(answer) == task["answer"])
    except ValueError:
        return 0.0


def f1_of_items(task: dict[str, Any], answer: str) -> float:
    named, wanted = {part.strip() for part in answer.split(",")} - {""}, set(task["answer"])
    return 2 * len(named & wanted) / (len(named) + len(wanted))


def share_of_fields(task: dict[str, Any], answer: str) -> float:
    try:
        record = json.loads(answer)
    except ValueError:
        return 0.0
    if not isinstance(record, dict) or record.keys() - task["answer"].keys():
        return 0.0
    return sum(record.get(key) == value for key, value in task["answer"].items()) / len(task["answer"])


def small_format_bonus(task: dict[str, Any], answer: str) -> float:
    found = re.fullmatch(r"\s*<answer>(.*?)</answer>\s*", answer, re.DOTALL)
    return 0.0 if found is None else 0.1 + 0.9 * (found[1].strip().lower() == task["answer"])


_verdicts: dict[tuple[str, str], float] = {}


def cached(task: dict[str, Any], answer: str) -> float:
    return _verdicts.setdefault((task["id"], answer), float(answer.strip() == task["answer"]))


def facts(task: dict[str, Any], answer: str) -> float:
    """The drug, each effect in its order, and the only dose; nothing denied or doubted."""
    drug, first, second, dose = re.fullmatch(
        r"(\w+) may cause (.*) and (.*)\. The .* is (\d+) mg a day\.", task["answer"]
    ).groups()
    wanted = rf"{drug} (?:may|can) cause {first} and {second}\. (?:The|Its)[\w ]* is {dose} mg a day\.?"
    return float(re.fullmatch(wanted, " ".join(answer.split())) is not None)
