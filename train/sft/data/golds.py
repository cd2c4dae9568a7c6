"""Turns from a domain's gold queries, in the messages that the project's own SQL agents send.

A question gives the turn that writes its query and, if it is answered in prose, the turn that answers it from the
query's rows. A share of the questions also gives the turns after a first query, right or wrong: its result is that of
running it, and a wrong one has another result than the gold query.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from groundwire.adapters.agents.making import checked_options, options_of
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.sql_agents.toolkit import SQLGraphOptions, SQLToolkit
from groundwire.domains import Domain, Task, TaskData
from groundwire.rewards import RewardError
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.sft.data.examples import Example, Message, Turn, encode
from groundwire.train.sft.data.variants import SchemaVariant, identifiers, make_variant, wrong_query

_TOOL = {"type": "function", "function": prompts.QUERY_TOOL}
_ANOTHER = 3
"""Wrong queries of each question."""
_RIGHT = 0.4
"""Share of the later turns that follow the gold query; the others follow any of the question's queries."""
_THREADS = 8
QUESTIONS_PER_SCHEMA = (24, 6)
"""Questions that share one schema in a step: without and with changed schemas, of which each is for few questions."""


@dataclass(frozen=True)
class Query:
    """An executed query, its result as the agent reads it, and whether it is right."""

    sql: str
    result: str
    right: bool

    @property
    def failed(self) -> bool:
        """Whether the result is an error, which may have names of the schema."""
        return self.result.startswith("Error: ")


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
    if any(_is_gold(domain, task) for task in data.train):
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
    golds: dict[str, list[str]] = {}
    for task in tasks:
        golds.setdefault(domain.database(task), []).append(_one_line(domain, task))

    def make(numbered: tuple[int, Task]) -> GoldQuestion | None:
        number, task = numbered
        database, gold = domain.database(task), _one_line(domain, task)
        on_end()
        if not _is_gold(domain, task):
            return None
        schema = _toolkit(settings).schema(database)
        answer = "" if gold_is_sql(domain) else str(task["answer"])
        question = GoldQuestion(str(task["id"]), database, task["question"], gold, schema, answer)
        if wrong or answer:
            question.queries.append(Query(gold, _toolkit(settings).result(database, gold)[0], True))
        if wrong:
            rng = random.Random(f"{settings.seed}-{number}")
            question.queries.extend(_wrong_queries(rng, question, golds[database], settings))
        return question

    with ThreadPoolExecutor(_THREADS) as pool:
        return [question for question in pool.map(make, enumerate(tasks)) if question is not None]


@dataclass(frozen=True)
class GoldTurns:
    """The training data: in each epoch another order, other versions of the schemas, other turns after a query."""

    questions: Sequence[GoldQuestion]
    settings: SFTSettings

    def groups(self, epoch: int) -> list[list[GoldQuestion]]:
        """The questions in the order of an epoch, some of the same database together; always as many groups."""
        rng = random.Random(f"{self.settings.seed}-epoch-{epoch}")
        databases: dict[str, list[GoldQuestion]] = {}
        for question in rng.sample(self.questions, len(self.questions)):
            databases.setdefault(question.database, []).append(question)
        size = QUESTIONS_PER_SCHEMA[bool(self.settings.augment)]
        groups = [group[i : i + size] for group in databases.values() for i in range(0, len(group), size)]
        rng.shuffle(groups)
        return groups

    def examples(self, tokenizer: Any, group: Sequence[GoldQuestion], epoch: int) -> list[Example]:
        """The examples of a group."""
        return encode(tokenizer, self.turns(group, epoch))

    def turns(self, group: Sequence[GoldQuestion], epoch: int) -> list[Turn]:
        """The turns of a group, about one version of its schema."""
        rng = random.Random(f"{self.settings.seed}-{epoch}-{group[0].id}")
        used = [query.sql for each in group for query in each.queries] + [each.gold for each in group]
        variant = make_variant(rng, group[0].schema, used, augment=self.settings.augment)
        return [turn for question in group for turn in _turns(rng, question, variant, self.settings)]


def write_turns(question: GoldQuestion, settings: SFTSettings) -> list[Turn]:
    """The turns that write the gold query, one for each agent, in the schema itself."""
    variant = SchemaVariant(question.schema, {})
    return [_write(question, variant, backend, settings) for backend in settings.backend]


def answer_turns(question: GoldQuestion, settings: SFTSettings) -> list[Turn]:
    """The turns that answer in prose from the gold query's rows, one for each agent; none without such an answer."""
    variant = SchemaVariant(question.schema, {})
    return [_answer(question, variant, backend, settings) for backend in settings.backend if question.answer]


def _is_gold(domain: Domain, task: Task) -> bool:
    answered = gold_is_sql(domain) or str(task.get("answer") or "").strip()
    return bool(answered and _one_line(domain, task))


def _one_line(domain: Domain, task: Task) -> str:
    """The query on one line; of a domain in prose the one in the column ``sql``, because it is not the answer."""
    column = "query" if gold_is_sql(domain) else "sql"
    return " ".join(str(task.get(column) or "").split()).rstrip("; ")


def _wrong_queries(
    rng: random.Random, question: GoldQuestion, others: list[str], settings: SFTSettings
) -> Iterator[Query]:
    names = sorted(identifiers(question.schema))
    for sql in dict.fromkeys(wrong_query(rng, question.gold, names, others) for _ in range(_ANOTHER)):
        with suppress(RewardError):
            if not execution_match(sql, question.gold, question.database).score:
                yield Query(sql, _toolkit(settings).result(question.database, sql)[0], False)


def _turns(rng: random.Random, question: GoldQuestion, variant: SchemaVariant, settings: SFTSettings) -> Iterator[Turn]:
    for backend in settings.backend:
        yield _write(question, variant, backend, settings)
        if question.answer:
            yield _answer(question, variant, backend, settings)
        if question.queries and rng.random() < settings.later_turns:
            query = question.queries[0] if rng.random() < _RIGHT else rng.choice(question.queries)
            yield from (_text_turns if backend == "langgraph" else _tool_turns)(question, query, variant, settings)


def _toolkit(settings: SFTSettings) -> SQLToolkit:
    """The options of the agents. Raises :class:`ConfigError` for one that none of them has."""
    try:
        known = options_of(SQLGraphOptions)
        return SQLGraphOptions(**checked_options(SQLGraphOptions, "sql", settings.agent_options, known))
    except ValueError as error:
        raise ConfigError(f"agent_options: {error}") from error


def _writer(settings: SFTSettings) -> Callable[..., str]:
    return partial(prompts.write, own=prompts.PROFILES[_toolkit(settings).prompt_profile])


def _write(question: GoldQuestion, variant: SchemaVariant, backend: str, settings: SFTSettings) -> Turn:
    write = _writer(settings)
    if backend == "langgraph":
        start = [_say("system", write("system", variant.text)), _say("user", write("write", question.question))]
        return Turn(start, _say("assistant", prompts.fence(variant.rename(question.gold))))
    names = ("prose_system", "ask") if question.answer else ("tool_system", "write")
    start = [_say("system", write(names[0], variant.text)), _say("user", write(names[1], question.question))]
    return Turn(start, _call(variant.rename(question.gold)), [_TOOL])


def _answer(question: GoldQuestion, variant: SchemaVariant, backend: str, settings: SFTSettings) -> Turn:
    """The answer in prose after the gold query's result."""
    query = question.queries[0]
    if backend == "openai-agents":
        return _after_call(question, query, variant, _say("assistant", question.answer), settings)
    write = _writer(settings)
    user = write("answer", question.question, variant.rename(query.sql), query.result)
    start = [_say("system", write("system", variant.text)), _say("user", user)]
    return Turn(start, _say("assistant", question.answer))


def _text_turns(question: GoldQuestion, query: Query, variant: SchemaVariant, settings: SFTSettings) -> Iterator[Turn]:
    """The check of an executed query, and if it is wrong its rewrite."""
    write = _writer(settings)
    system = _say("system", write("system", variant.text))
    shown = question.question, variant.rename(query.sql), _shown_result(query, variant)
    verdict = prompts.CORRECT if query.right else prompts.INCORRECT
    verdict = f"VERDICT: {verdict}" if settings.agent_options.get("prompt_profile") == "full" else verdict
    yield Turn([system, _say("user", write("check", *shown))], _say("assistant", verdict))
    if not query.right:
        message = write("rewrite", *shown, verdict)
        yield Turn([system, _say("user", message)], _say("assistant", prompts.fence(variant.rename(question.gold))))


def _tool_turns(question: GoldQuestion, query: Query, variant: SchemaVariant, settings: SFTSettings) -> Iterator[Turn]:
    """The turn after a query's result: the end, or another query. A question in prose has its end already."""
    if not query.right:
        yield _after_call(question, query, variant, _call(variant.rename(question.gold)), settings)
    elif not question.answer:
        yield _after_call(question, query, variant, _say("assistant", prompts.DONE), settings)


def _after_call(
    question: GoldQuestion, query: Query, variant: SchemaVariant, reply: Message, settings: SFTSettings
) -> Turn:
    first = _write(question, variant, "openai-agents", settings)
    tool = {"role": "tool", "tool_call_id": "call", "content": _shown_result(query, variant)}
    return Turn([*first.messages, _call(variant.rename(query.sql)), tool], reply, first.tools)


def _shown_result(query: Query, variant: SchemaVariant) -> str:
    return variant.rename(query.result) if query.failed else query.result


def _say(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _call(sql: str) -> Message:
    function = {"name": prompts.QUERY_TOOL["name"], "arguments": json.dumps({"sql": sql}, ensure_ascii=False)}
    return {**_say("assistant", ""), "tool_calls": [{"id": "call", "type": "function", "function": function}]}
