"""The result of an attack, and the file in the user's cache that keeps it for training and its watch."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path
from pydantic import TypeAdapter

from groundwire.rewards._types import Reward
from groundwire.tools.files import read_json
from groundwire.tools.types import AgentStep

CACHE = user_cache_path("groundwire", appauthor=False) / "attacks"


@dataclass(frozen=True, kw_only=True)
class AttackExample:
    """A wrong answer that can be scored again. ``right_score`` is that of the task's right answer."""

    task: str
    answer: str
    steps: list[AgentStep]
    score: float
    right_score: float


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """What a strategy earned. ``tasks`` is the number of tasks for which its answer was known to be wrong."""

    name: str
    variant: str
    """Its best-paid way."""
    fix: str
    """The sentence that would fix the reward."""
    pay: float
    tasks: int
    examples: list[AttackExample]


GOLD_FAILS, GOLD_UNPAID, NO_ROWS = "gold fails", "gold scores nothing", "gold returns nothing"
TRIVIAL_WINS, ATTACK_WINS, REWARD_FAILS = "trivial answer wins", "attack wins", "reward fails"
FILTER_IGNORED = "filter dropped and still wins"


@dataclass(frozen=True)
class Finding:
    """An answer to one task whose score is wrong. ``score`` or ``gold`` is None where the reward raised an error."""

    task: str
    kind: str
    probe: str
    answer: str
    score: float | None
    gold: float | None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """An attack on a reward, or an audit; ``strategies`` is sorted, the best-paid first."""

    reward: str
    source: str
    """Where the tasks are from."""
    truth: str
    tasks: int
    calls: int
    seconds: float
    failed: int
    """Calls in which the reward raised an error."""
    unknown: float
    """The share of the answers of which nobody knows whether they are wrong, 0 to 1: these do not count."""
    strategies: list[StrategyResult]
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Of an audit."""

    @property
    def tasks_by_finding(self) -> dict[str, int]:
        """The number of tasks with a finding of each kind."""
        return dict(Counter(kind for kind, _ in sorted({(finding.kind, finding.task) for finding in self.findings})))

    @property
    def share_with_findings(self) -> float:
        """The share of tasks with a finding, 0 to 1, without conditions that make no difference in the database."""
        return len({finding.task for finding in self.findings if finding.kind != FILTER_IGNORED}) / max(1, self.tasks)

    @property
    def separated(self) -> int:
        """The number of tasks whose gold scores more than every trivial answer and every attack."""
        tied = (GOLD_FAILS, GOLD_UNPAID, TRIVIAL_WINS, ATTACK_WINS)
        return self.tasks - len({finding.task for finding in self.findings if finding.kind in tied})

    def holes(self, above: float) -> list[StrategyResult]:
        """The strategies whose pay is more than ``above``."""
        return [strategy for strategy in self.strategies if strategy.pay > above]

    def to_json(self) -> dict[str, Any]:
        """As JSON; :meth:`from_json` reads it."""
        return {"version": 1, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> AttackResult:
        """Raises ``ValueError`` for JSON of another format."""
        if not isinstance(value, dict) or value.get("version") != 1:
            raise ValueError("no result of an attack, or one of another version of groundwire")
        return TypeAdapter(cls).validate_python(value)


def code_hash(name: str, reward: Reward, tasks: Iterable[Mapping[str, Any]]) -> str:
    """A hash of the reward's name, of the file with its code, and of the tasks' questions.

    A user's function has the name that it was defined with, however it was given.
    """
    function: Any = reward
    while inner := getattr(function, "func", getattr(function, "__wrapped__", None)):
        function = inner
    name = function.__qualname__ if name.count(":") == 1 and hasattr(function, "__qualname__") else name
    code = b""
    with suppress(OSError, TypeError):
        code = Path(inspect.getsourcefile(function) or "").read_bytes()
    questions = json.dumps(sorted([str(task["id"]), str(task.get("question"))] for task in tasks))
    return hashlib.sha256(b"\0".join((name.encode(), code, questions.encode()))).hexdigest()[:32]


def save_attack(result: AttackResult, key: str) -> Path:
    """Write ``result`` into the cache, under a :func:`code_hash`. Raises ``OSError``."""
    file = CACHE / key / "attack.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result.to_json(), ensure_ascii=True, indent=1), encoding="utf-8")
    return file


def load_attack(key: str) -> AttackResult | None:
    """The saved attack, or None if there is none that can be read."""
    with suppress(OSError, ValueError):
        return AttackResult.from_json(read_json(CACHE / key / "attack.json"))
    return None
