"""What agents see of a task: its question, its database, and the columns that are no gold answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from groundwire import domains, rewards
from groundwire.adapters import Question
from groundwire.domains import Domain, Task
from groundwire.tools.types import TEXT, AnswerKind

_log = logging.getLogger(__name__)


def answers_of(domain: Domain, reward: rewards.Reward) -> AnswerKind:
    """How answers are read: as the domain says, else the reward, else the domain's own reward."""
    answers = domain.answers or rewards.answers_of(reward)
    if answers is None and domain.default_reward in rewards.names():
        answers = rewards.answers_of(rewards.get(domain.default_reward))
    return answers or TEXT


@dataclass
class AgentView:
    """The view of the tasks of ``domain``, whose answers are ``answers``, when the reward may read ``read``.

    ``shown`` are the columns that agents see all the same. ``compares``: whether it ranks the answers of a group.
    """

    domain: Domain
    answers: AnswerKind
    read: frozenset[str]
    shown: tuple[str, ...] = ()
    compares: bool = False

    @classmethod
    def of(cls, domain: Domain, reward: rewards.Reward, agent_columns: str = "") -> AgentView:
        """The view of a run with ``reward`` and the setting ``agent_columns``."""
        shown = tuple(filter(None, agent_columns.split(",")))
        compares = rewards.comparison_of(reward) is not None
        return cls(domain, answers_of(domain, reward), rewards.names_read(reward), shown, compares)

    def columns(self, task: Task) -> dict[str, Any]:
        """The columns that an agent sees."""
        return domains.visible_columns(self.domain, task, read=self.read, shown=self.shown)

    def question(self, task: Task, database: str) -> Question:
        """What an agent gets."""
        return Question(
            id=task["id"], text=task["question"], database=database, answers=self.answers, columns=self.columns(task)
        )

    def line(self, tasks: Iterable[Task]) -> str:
        """One line about the columns of ``tasks``: those that agents see, and those that are hidden."""
        return domains.columns_line(self.domain, tasks, read=self.read, shown=self.shown)

    def gold(self, task: Task) -> str:
        """The gold answer, for people."""
        return domains.gold_answer(task, self.domain.gold_columns, read=self.read)

    def gold_value(self, task: Task) -> Any:
        """The gold answer as its column holds it; None without one."""
        return domains.gold_value(task, self.domain.gold_columns, read=self.read)

    async def score(self, reward: rewards.Reward, task: Task, answer: str, steps: Any) -> Any:
        """Call ``reward``. A column that it reads, and that its code does not name, is hidden from then on."""
        names = set[str]()
        try:
            return await reward(rewards.RecordedTask(task, names), answer, steps)
        finally:
            if late := [name for name in sorted(names - self.read) if self._sees(name, task)]:
                _log.warning(
                    "the reward has read %s, which agents saw until now: from here on it is hidden, unless "
                    "agent_columns names it",
                    " and ".join(late),
                )
            self.read |= names

    def _sees(self, name: str, task: Task) -> bool:
        return self.columns(task) != replace(self, read=self.read | {name}).columns(task)
