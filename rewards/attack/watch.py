"""Whether an answer that won in training is one of a known attack on its reward: only if it is known to be wrong.

The texts of mechanical strategies are made once for each task, and kept if they are wrong; a query is tried when it has
won. An answer with nearly the same words, or what a learnt strategy is paid for, counts if the gold calls it wrong.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from groundwire.rewards._types import METRIC, Reward
from groundwire.rewards.attack.engine import Attack
from groundwire.rewards.attack.forms import GoldFile
from groundwire.rewards.attack.result import AttackResult
from groundwire.rewards.attack.strategies import STRATEGIES
from groundwire.rewards.attack.truth import GoldTruth, executes_right
from groundwire.tools.files import read_json
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import AnswerKind

FILE = "known_attacks.json"
"""In the folder of a run whose reward has known attacks."""
PAID = 0.5
"""The part of a right answer's pay from which a wrong one has won."""
LEARNT = "learnt: "
"""Begins the name of a learnt strategy; its template follows."""
_ALIKE, _LEAST, _MOST = 0.85, 6, 200
"""How alike the words and signs of two texts are, and how many there are: of fewer, one says little."""
ATTACK = f"{METRIC}known attack: "
"""Begins the component of a reward that names the strategy of an answer."""


def is_attack(components: Mapping[str, float]) -> bool:
    """Whether an answer with these components was found to be one of a known attack."""
    return any(name.startswith(ATTACK) for name in components)


def fill(template: str, task: Mapping[str, Any]) -> str:
    """The text of a learnt strategy: ``{1}`` is the first long word of the task's question, ``{2}`` the second."""
    words = question_words(task) or [""]
    return re.sub(r"\{(\d+)\}", lambda place: words[(int(place[1]) - 1) % len(words)], template)


def question_words(task: Mapping[str, Any]) -> list[str]:
    """The long words of a question, each once."""
    return list(dict.fromkeys(re.findall(r"\w{4,}", str(task.get("question", "")))))


def contains(answer: str, text: str) -> bool:
    """Whether the words and signs of ``text`` are in the answer, in their order, in any case, with any numbers."""
    place = 0
    for piece in _pieces(re.sub(r"\d+", "0", text)):
        pattern = re.escape(piece).replace("0", r"\d+")
        if (match := re.compile(pattern, re.IGNORECASE).search(answer, place)) is None:
            return False
        place = match.end()
    return True


@dataclass(frozen=True)
class KnownAttacks:
    """What the attack on the reward of a run has found, for its training tasks."""

    wins_from: float
    """The least reward of an answer that has won."""
    zero: bool
    """Whether such answers score the least reward."""
    names: list[str]
    texts: dict[str, dict[str, str]]
    """By task: wrong answers, and the names of their strategies."""
    golds: dict[str, Any]
    """By task; empty where answers are queries."""

    @classmethod
    async def of(
        cls,
        result: AttackResult,
        tasks: Sequence[Mapping[str, Any]],
        reward: Reward,
        *,
        golds: Sequence[Any],
        answers: AnswerKind,
        zero: bool,
    ) -> KnownAttacks | None:
        """What an attack on ``reward`` has found, for these tasks; None if it found nothing."""

        async def unknown(*_: Any) -> bool:
            return False

        holes = {hole.name: hole for hole in result.holes(PAID)}
        strategies = [strategy for strategy in STRATEGIES if strategy.name in holes]
        file = GoldFile(tasks, golds, is_sql=answers is SQL)
        truth: Any = unknown if answers is SQL else GoldTruth(file)
        making, texts = Attack(file, reward, truth, random.Random(0)), defaultdict[str, dict[str, str]](dict)
        for index, task in enumerate(tasks if strategies else ()):
            for strategy, attempt, _ in await making.plan(index, strategies):
                if attempt.variant == holes[strategy.name].variant:
                    texts[str(task["id"])][attempt.answer.strip()] = strategy.name
        right = [example.right_score for hole in holes.values() for example in hole.examples]
        known = {} if answers is SQL else {str(task["id"]): gold for task, gold in zip(tasks, golds, strict=True)}
        return cls(PAID * max(right, default=1.0), zero, [*holes], dict(texts), known) if holes else None

    @classmethod
    def read(cls, folder: Path) -> KnownAttacks | None:
        """Those in the folder of a run, if it has some."""
        return cls(**read_json(folder / FILE)) if (folder / FILE).exists() else None

    def match(self, task: Mapping[str, Any], answer: str) -> str:
        """The strategy of a wrong answer to this task; "" if it is of none, or may be right."""
        known = self.texts.get(str(task["id"]), {})
        if name := known.get(answer.strip(), ""):
            return name if self.golds or executes_right(task, answer) is False else ""
        learnt = {fill(name.removeprefix(LEARNT), task): name for name in self.names if name.startswith(LEARNT)}
        pieces = _pieces(answer)
        alike = SequenceMatcher(b=pieces, autojunk=False)
        name = next((name for text, name in learnt.items() if contains(answer, text)), "")
        for text, mechanical in known.items() if len(pieces) >= _LEAST and not name else ():
            alike.set_seq1(_pieces(text))
            name = mechanical if alike.ratio() >= _ALIKE else name
        gold = self.golds.get(str(task["id"]))
        is_wrong = name and gold is not None and GoldTruth(GoldFile([task], [gold])).verdict(0, answer) is False
        return name if is_wrong else ""


def _pieces(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())[:_MOST]
