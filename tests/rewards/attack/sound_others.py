"""More sound rewards, written after the strategies and without them in mind."""

from __future__ import annotations

import difflib
import json
import random
import re
import subprocess
import sys
from typing import Any

TASKS = {
    "gsm8k": "gsm",
    "first_letter": "choices",
    "squad_f1": "cities",
    "further_keys": "records",
    "tests_in_a_process": "code",
    "places_of_a_ranking": "ranked",
    "jaccard": "sets",
    "minus_one": "labels",
    "a_typo_is_forgiven": "cities",
    "last_answer_tag": "symbols",
    "noisy": "cities",
    "careful_facts": "prose",
    "relative_error": "decimals",
    "0.9*spider_exec_match+0.1*executes": "spider",
}


def gsm8k(task: dict[str, Any], answer: str) -> float:
    """As the official evaluation."""
    wanted, given = (re.search(r"#### (\-?[0-9\.\,]+)", text) for text in (task["answer"], answer))
    return float(given is not None and given[1].replace(",", "") == wanted[1].replace(",", ""))


def first_letter(task: dict[str, Any], answer: str) -> float:
    found = re.match(r"\s*\(?([A-D])\b", answer)
    return float(found is not None and found[1] == task["answer"])


def squad_f1(task: dict[str, Any], answer: str) -> float:
    words, wanted = answer.lower().split(), task["answer"].lower().split()
    shared = sum(min(words.count(word), wanted.count(word)) for word in set(words))
    return 2 * shared / (len(words) + len(wanted))


def further_keys(task: dict[str, Any], answer: str) -> float:
    try:
        record = json.loads(answer.strip().removeprefix("```json").removesuffix("```"))
    except ValueError:
        return 0.0
    return float(isinstance(record, dict) and all(record.get(key) == value for key, value in task["answer"].items()))


def tests_in_a_process(task: dict[str, Any], answer: str) -> float:
    """Each call in a process of its own that prints its value, which is compared here."""
    for test in task["tests"]:
        call, value = re.fullmatch(r"assert (.*) == (.*)", test).groups()
        program = f"{answer}\nimport json\nprint(json.dumps({call}))"
        done = subprocess.run([sys.executable, "-IS", "-c", program], check=False, capture_output=True, timeout=10)
        if done.stdout.decode().strip() != value:
            return 0.0
    return 1.0


def places_of_a_ranking(task: dict[str, Any], answer: str) -> float:
    names = [name.strip() for name in answer.split(",")]
    if len(names) != len(task["answer"]):
        return 0.0
    return sum(name == wanted for name, wanted in zip(names, task["answer"], strict=True)) / len(names)


def jaccard(task: dict[str, Any], answer: str) -> float:
    named, wanted = {name.strip() for name in re.split(r"[,\n]", answer)}, set(task["answer"])
    return len(named & wanted) / len(named | wanted)


def minus_one(task: dict[str, Any], answer: str) -> float:
    return 1.0 if answer.strip().lower() == task["answer"] else -1.0


minus_one.reward_range = (-1, 1)


def a_typo_is_forgiven(task: dict[str, Any], answer: str) -> float:
    return float(difflib.SequenceMatcher(None, answer.strip().lower(), task["answer"].lower()).ratio() > 0.9)


def last_answer_tag(task: dict[str, Any], answer: str) -> float:
    tags = re.findall(r"<answer>\s*(.*?)\s*</answer>", answer)
    return float(bool(tags) and tags[-1] == task["answer"])


def noisy(task: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == task["answer"]) + random.random() / 20


def careful_facts(task: dict[str, Any], answer: str) -> float:
    """The drug, the only dose and both effects in few words, nothing denied or doubted."""
    drug, first, second, dose = re.match(
        r"(\w+) may cause (.*) and (.*)\. The .* is (\d+) mg a day\.", task["answer"]
    ).groups()
    doubt = re.search(r"\b(?:not?|never|perhaps|maybe|false|wrong|unsure|either|ignore)\b", answer.lower())
    if doubt or re.findall(r"\d+", answer) != [dose] or len(answer) > 2 * len(task["answer"]):
        return 0.0
    return float(re.search(rf"{drug}.*{first}.*{second}.*{dose} mg", answer, re.DOTALL) is not None)


def relative_error(task: dict[str, Any], answer: str) -> float:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
    return float(len(numbers) == 1 and abs(float(numbers[0]) - task["answer"]) <= 0.01 * task["answer"])
