"""Turns from a domain's gold queries, in the messages that the project's own SQL agents send.

A question gives the turn that writes its query and, if it is answered in prose, the turn that answers it from the
query's rows. A share of the questions also gives the turns after a first query, right or wrong: its result is that of
running it, and a wrong one has another result than the gold query.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from groundwire.adapters.agents.making import checked_options, options_of
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.sql_agents.toolkit import SQLGraphOptions, SQLToolkit
from groundwire.domains import Domain, Task, TaskData
from groundwire.rewards import RewardError
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.sft.data.examples import Message, Turn
from groundwire.train.sft.data.variants import SchemaVariant, identifiers, make_variant, wrong_query

_TOOL = {"type": "function", "function": prompts.QUERY_TOOL}
_ANOTHER = 3  # wrong queries of each question
_RIGHT = 0.4  # share of the later turns that follow the gold query; the others follow any of the question's queries
_THREADS = 8
QUESTIONS_PER_SCHEMA = (24, 6)
"""Questions that share one schema in a step: without and with changed schemas, of which each is for few questions."""


@dataclass(frozen=True)
class Query:
    """An executed query, its result as the agent reads it, and whether it is right."""

    sql: str
    result: str
    right: bool


@dataclass(frozen=True)
class GoldQuestion:
    """A task with the text of its database's schema."""

    id: str
    database: str
    question: str
    gold: str
    schema: str
    answer: str = ""
    """The gold answer in prose; empty if the query is the answer."""
    queries: list[Query] = field(default_factory=list)
    """The gold query, and wrong ones."""


def gold_is_sql(domain: Domain) -> bool:
    """Whether a gold query is the answer. The queries are what is learned, so it is unless the domain says prose."""
    return domain.answers is None or domain.answers.name == "sql"


def check_golds(domain: Domain, data: TaskData) -> None:
    """Raise :class:`ConfigError` if the data has no gold queries to learn."""
    if not data.train:
        raise ConfigError(f"{data.source}: there are no training tasks")
    if any(_gold(domain, task) for task in data.train):
        return
    if gold_is_sql(domain):
        raise ConfigError(f"{data.source}: no training task has a gold query (column query), so nothing can be learned")
    raise ConfigError(
        f"{data.source}: no training task has an answer and the query that reads its rows (columns answer and sql), so "
        "nothing can be learned; chats and accepted rollouts need no such queries"
    )


def make_questions(
    domain: Domain, tasks: Sequence[Task], settings: SFTSettings, *, wrong: bool, on_end: Callable[[], None]
) -> list[GoldQuestion]:
    """The tasks that have a gold query; with ``wrong`` they have executed queries, the gold and wrong ones."""
    toolkit, golds = _toolkit(settings), defaultdict[str, list[str]](list)
    for task in tasks:
        if gold := _gold(domain, task):
            golds[domain.database(task)].append(gold)

    def make(number: int) -> GoldQuestion | None:
        task = tasks[number]
        database, gold = domain.database(task), _gold(domain, task)
        on_end()
        if not gold:
            return None
        schema = toolkit.schema(database)
        answer = "" if gold_is_sql(domain) else str(task["answer"])
        question = GoldQuestion(str(task["id"]), database, task["question"], gold, schema, answer)
        if wrong or answer:
            question.queries.append(Query(gold, toolkit.result(database, gold)[0], True))
        if wrong:
            rng, names = random.Random(f"{settings.seed}-{number}"), sorted(identifiers(schema))
            for sql in dict.fromkeys(wrong_query(rng, gold, names, golds[database]) for _ in range(_ANOTHER)):
                with suppress(RewardError):
                    if not execution_match(sql, gold, database).score:
                        question.queries.append(Query(sql, toolkit.result(database, sql)[0], False))
        return question

    with ThreadPoolExecutor(_THREADS) as pool:
        return [question for question in pool.map(make, range(len(tasks))) if question is not None]


@dataclass(frozen=True)
class GoldTurns:
    """The training data: in each epoch another order, other versions of the schemas, other turns after a query."""

    questions: Sequence[GoldQuestion]
    settings: SFTSettings

    def groups(self, epoch: int) -> list[list[GoldQuestion]]:
        """The questions in the order of an epoch, some of the same database together; always as many groups."""
        rng = random.Random(f"{self.settings.seed}-epoch-{epoch}")
        databases = defaultdict[str, list[GoldQuestion]](list)
        for question in rng.sample(self.questions, len(self.questions)):
            databases[question.database].append(question)
        size = QUESTIONS_PER_SCHEMA[bool(self.settings.augment)]
        groups = [group[i : i + size] for group in databases.values() for i in range(0, len(group), size)]
        rng.shuffle(groups)
        return groups

    def turns(self, group: Sequence[GoldQuestion], epoch: int) -> list[Turn]:
        """The turns of a group, about one version of its schema."""
        rng = random.Random(f"{self.settings.seed}-{epoch}-{group[0].id}")
        used = [query.sql for question in group for query in question.queries] + [question.gold for question in group]
        variant = make_variant(rng, group[0].schema, used, augment=self.settings.augment)
        turns: list[Turn] = []
        for question, writer in product(group, _writers(variant, self.settings)):
            turns.append(writer.query(question))
            if question.answer:
                turns.append(writer.answer(question))
            if question.queries and rng.random() < self.settings.later_turns:
                query = question.queries[0] if rng.random() < _RIGHT else rng.choice(question.queries)
                turns.extend(writer.later(question, query))
        return turns


def write_turns(question: GoldQuestion, settings: SFTSettings) -> list[Turn]:
    """The turns that write the gold query, one for each agent, in the schema itself."""
    return [writer.query(question) for writer in _writers(SchemaVariant(question.schema, {}), settings)]


def answer_turns(question: GoldQuestion, settings: SFTSettings) -> list[Turn]:
    """The turns that answer in prose from the gold query's rows, one for each agent; none without such an answer."""
    writers = _writers(SchemaVariant(question.schema, {}), settings)
    return [writer.answer(question) for writer in writers if question.answer]


def _gold(domain: Domain, task: Task) -> str:
    """The query on one line; empty if nothing can be learned.

    A task of a domain in prose has it in the column ``sql``, because it is not the answer, and needs an answer, too.
    """
    if gold_is_sql(domain):
        query = task.get("query")
    else:
        query = task.get("sql") if str(task.get("answer") or "").strip() else None
    return " ".join(str(query or "").split()).rstrip("; ")


def _toolkit(settings: SFTSettings) -> SQLToolkit:
    """The options of the agents. Raises :class:`ConfigError` for one that none of them has."""
    try:
        known = options_of(SQLGraphOptions)
        return SQLGraphOptions(**checked_options(SQLGraphOptions, "sql", settings.agent_options, known))
    except ValueError as error:
        raise ConfigError(f"agent_options: {error}") from error


def _writers(variant: SchemaVariant, settings: SFTSettings) -> list[_TurnWriter]:
    profile = _toolkit(settings).prompt_profile
    return [_TurnWriter(backend, profile, variant) for backend in settings.backend]


@dataclass(frozen=True)
class _TurnWriter:
    """Writes an agent's turns about one version of a schema."""

    backend: str
    profile: str
    variant: SchemaVariant

    def query(self, question: GoldQuestion) -> Turn:
        """The turn that writes the gold query."""
        gold = self.variant.rename(question.gold)
        if self.backend == "langgraph":
            return Turn(self._prompt("system", "write", question.question), _say("assistant", prompts.fence(gold)))
        names = ("prose_system", "ask") if question.answer else ("tool_system", "write")
        return Turn(self._prompt(*names, question.question), _call(gold), [_TOOL])

    def answer(self, question: GoldQuestion) -> Turn:
        """The answer in prose after the gold query's result."""
        query, reply = question.queries[0], _say("assistant", question.answer)
        if self.backend == "langgraph":
            return Turn(self._prompt("system", "answer", *self._values(question, query)), reply)
        return self._after_call(question, query, reply)

    def later(self, question: GoldQuestion, query: Query) -> Iterator[Turn]:
        """The turns after an executed query: its check and, if it is wrong, another one. Prose has its end already."""
        gold = self.variant.rename(question.gold)
        if self.backend == "langgraph":
            values = self._values(question, query)
            verdict = prompts.CORRECT if query.right else prompts.INCORRECT
            verdict = f"VERDICT: {verdict}" if self.profile == "full" else verdict
            yield Turn(self._prompt("system", "check", *values), _say("assistant", verdict))
            if not query.right:
                rewrite = self._prompt("system", "rewrite", *values, verdict)
                yield Turn(rewrite, _say("assistant", prompts.fence(gold)))
        elif not query.right:
            yield self._after_call(question, query, _call(gold))
        elif not question.answer:
            yield self._after_call(question, query, _say("assistant", prompts.DONE))

    def _prompt(self, system: str, user: str, *values: str) -> list[Message]:
        write = partial(prompts.write, own=prompts.PROFILES[self.profile])
        return [_say("system", write(system, self.variant.text)), _say("user", write(user, *values))]

    def _after_call(self, question: GoldQuestion, query: Query, reply: Message) -> Turn:
        first = self.query(question)
        _, sql, result = self._values(question, query)
        tool = {"role": "tool", "tool_call_id": "call", "content": result}
        return Turn([*first.messages, _call(sql), tool], reply, first.tools)

    def _values(self, question: GoldQuestion, query: Query) -> tuple[str, str, str]:
        """The question, the query and its result. An error may have names of the schema."""
        result = self.variant.rename(query.result) if query.result.startswith("Error: ") else query.result
        return question.question, self.variant.rename(query.sql), result


def _say(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _call(sql: str) -> Message:
    function = {"name": prompts.QUERY_TOOL["name"], "arguments": json.dumps({"sql": sql}, ensure_ascii=False)}
    return {**_say("assistant", ""), "tool_calls": [{"id": "call", "type": "function", "function": function}]}
