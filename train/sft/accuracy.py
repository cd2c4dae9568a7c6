"""Execution accuracy of a model's first queries on held-out questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from groundwire.adapters.sql_agents.prompts import extract_sql
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.policy.chat.response import FORMATS
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.errors import ContextLengthError
from groundwire.train.policy.types import Sampling
from groundwire.train.sft.data.examples import encode
from groundwire.train.sft.data.golds import Question, write_turns

__all__ = ["first_query_accuracy"]


def first_query_accuracy(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    settings: SFTSettings,
    *,
    on_end: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The share of questions whose greedy first query has the gold query's rows, for each agent.

    A prompt that is too long counts as wrong.
    """
    engine = LocalEngine(model, tokenizer, max_model_len=settings.max_model_len)
    right = dict.fromkeys(settings.backend, 0.0)
    try:
        futures = []
        for question in questions:
            for backend, example in zip(
                settings.backend, encode(tokenizer, write_turns(question, settings)), strict=True
            ):
                sampling = Sampling(temperature=0.0, max_tokens=settings.max_tokens)
                try:
                    futures.append((question, backend, engine.submit(example.prompt_ids, sampling)))
                except ContextLengthError:
                    on_end()
        for question, backend, future in futures:
            sql = _query(future.result().text, backend)
            right[backend] += execution_match(sql, question.gold, question.database).score
            on_end()
    finally:
        engine.close()
    return {backend: round(count / max(1, len(questions)), 4) for backend, count in right.items()}


def _query(reply: str, backend: str) -> str:
    if backend == "langgraph":
        return extract_sql(reply)
    import json

    _, calls = FORMATS["hermes"].parse(reply, frozenset(["query_database_by_sql"]))
    try:
        return str(json.loads(calls[0]["function"]["arguments"])["sql"])
    except (LookupError, TypeError, ValueError):
        return ""
