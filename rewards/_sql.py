"""What rewards of SQL share: the query in an answer, the judgement on variants in training, and ``executes``.

In training a right query must also be right on its gold's variants (:mod:`groundwire.tools.variants`). On one database
a memorised result, or a query without one of the gold's filters, is often right. A policy would learn that, because it
is paid. What is published, and validation, counts the database alone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from groundwire.rewards._types import METRIC, Reward, RewardError, declared, judges_sql
from groundwire.tools.sql.answers import fenced_sql
from groundwire.tools.types import AgentStep

F = TypeVar("F", bound=Callable[..., Any])
Judge = Callable[[str, str, str], float]
"""The value of a prediction, by its gold, on a database."""

_UNCHECKED = "unchecked"
_VARIANTS = "judged_on_variants"
_training: ContextVar[bool] = ContextVar("training", default=False)
_TOKEN = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|\[[^]]*\]|--.*|/\*|\w+|\S""")
_QUERY, _DATABASE = ("query", "sql"), ("db_path", "database")


class SqlAnswer(NamedTuple):
    """An answer in SQL, and what its task judges it by."""

    predicted: str
    gold: str
    database: str
    question: str


def has_gold_query(task: Mapping[str, Any]) -> bool:
    """Whether a task has a gold query and a database."""
    return all(any(task.get(name) for name in names) for names in (_QUERY, _DATABASE))


def sql_answer(task: Mapping[str, Any], answer: str, reward: str) -> SqlAnswer:
    """The query in ``answer``, which may be a fenced block, with the task's gold query and its database's path.

    Raises :class:`rewards.RewardError` if one is missing.
    """
    gold, database = (next((task[name] for name in names if task.get(name)), None) for names in (_QUERY, _DATABASE))
    if gold is None or database is None:
        missing = _QUERY if gold is None else _DATABASE
        raise RewardError(f"{reward} needs {missing[0]!r} in the task; it has {', '.join(sorted(task))}")
    fenced = fenced_sql(answer)
    return SqlAnswer(answer if fenced is None else fenced, gold, database, str(task.get("question") or ""))


@dataclass(frozen=True, kw_only=True)
class OfTraining:
    """What training pays: ``official`` is the value on the database alone, ``value`` the least on any database."""

    value: float
    official: float
    wrong_on: str = ""
    """The variant with the least value, if that is lower."""
    unchecked: str = ""
    """Why there are no variants."""

    def components(self) -> dict[str, float]:
        """The reward's components."""
        metrics = {f"{METRIC}official": self.official, f"{METRIC}{_UNCHECKED}": float(bool(self.unchecked))}
        return {"match": self.value, **metrics}


def on_variants(answer: SqlAnswer, official: float, judge: Judge) -> OfTraining:
    """The value in training of an answer that has the value ``official`` on its database.

    A wrong answer stays as it is, and so does the gold itself, in any layout.
    """
    from groundwire.tools.variants import NoVariantsError, variants_of  # imports sqlglot, which takes long

    predicted, gold, database, question = answer
    if official <= 0 or _tokens(predicted) == _tokens(gold):
        return OfTraining(value=official, official=official)
    least, wrong_on = official, ""
    try:
        for variant in variants_of(database, gold, question):
            if least > 0 and (value := judge(predicted, gold, variant)) < least:
                least, wrong_on = value, variant
    except NoVariantsError as error:
        return OfTraining(value=official, official=official, unchecked=str(error))
    return OfTraining(value=least, official=official, wrong_on=wrong_on)


def without_variants(tasks: Iterable[Mapping[str, Any]], *, on_end: Callable[[], None]) -> dict[str, str]:
    """The ids of the tasks whose golds have no variants, and why. ``on_end`` is called after each task."""
    from groundwire.tools.variants import NoVariantsError, variants_of

    def problem(task: Mapping[str, Any]) -> str:
        try:
            _, gold, database, question = sql_answer(task, "", "a reward")
            variants_of(database, gold, question)
        except (NoVariantsError, RewardError) as error:
            return str(error)
        finally:
            on_end()
        return ""

    tasks = list(tasks)
    with ThreadPoolExecutor() as threads:
        return {
            str(task["id"]): reason for task, reason in zip(tasks, threads.map(problem, tasks), strict=True) if reason
        }


def unchecked_of(components: Mapping[str, float]) -> bool | None:
    """Whether a right answer was not judged on variants, because there are none; None for any other reward."""
    flags = [value for name, value in components.items() if re.fullmatch(rf"{METRIC}(?:.*\.)?{_UNCHECKED}", name)]
    return any(flags) if flags else None


def _tokens(sql: str) -> list[str]:
    """The query without the case of its words, its blanks and its last semicolon; a comment is one token."""
    return [token if token[0] in "'\"`[" else token.lower() for token in _TOKEN.findall(sql.rstrip("; \t\r\n"))]


def training() -> bool:
    """Whether the answer that is judged pays a policy in training."""
    return _training.get()


@contextmanager
def in_training(on: bool = True) -> Iterator[None]:
    """What a reward judges inside pays a policy in training."""
    token = _training.set(on)
    try:
        yield
    finally:
        _training.reset(token)


def judged_on_variants(function: F) -> F:
    """A decorator for a reward of SQL queries that judges on variants, too, if :func:`training` says so."""
    setattr(function, _VARIANTS, True)
    return judges_sql(function)


def has_variants(reward: Any) -> bool:
    """Whether ``reward``, or a term of it, is :func:`judged_on_variants`."""
    return bool(declared(reward, _VARIANTS, False))


def sql_reward(name: str, judge: Judge, on_variant: Judge, *, always: bool = False) -> Reward:
    """The reward ``name``: the value by ``judge``, in a thread; in training, or ``always``, the least on any database.

    ``on_variant`` judges on a variant.
    """

    async def reward(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float | dict[str, float]:
        sql = sql_answer(task, answer, name)

        def run() -> float | dict[str, float]:
            official = judge(*sql[:3])
            return on_variants(sql, official, on_variant).components() if always or training() else official

        return await asyncio.to_thread(run)

    reward.__name__ = reward.__qualname__ = name
    return judges_sql(reward) if always else judged_on_variants(reward)


def executed(steps: Sequence[AgentStep]) -> bool:
    """Whether at least one tool call succeeded."""
    return any(step["kind"] == "tool" and step["ok"] for step in steps)


async def executes(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
    """1.0 if :func:`executed`, else 0.0: a first signal for a policy that is rarely right.

    It judges the rollout, not the answer, which may be prose. Any query counts, so give it a small weight in a sum.
    """
    return float(executed(steps))
