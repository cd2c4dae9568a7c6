"""Questions of every group of templates, about any database.

A warm start reads mostly plain questions (``freedom``), and the tasks of reinforcement learning are phrased freely:
what is left to learn is language, which carries over to any subject.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from groundwire.domains.spider.generate import join_templates as linked
from groundwire.domains.spider.generate import templates
from groundwire.domains.spider.generate.databases import Database
from groundwire.domains.spider.generate.phrasing import Pair, Writer

__all__ = ["MIX", "GeneratedQuestion", "write_question"]

MIX = {"easy": 0.28, "medium": 0.42, "hard": 0.18, "extra": 0.12}
"""The share of each group of templates; Spider's own levels are spread about so."""


class GeneratedQuestion(NamedTuple):
    """A question, its query, and the template that made both."""

    text: str
    sql: str
    template: str


TEMPLATES: dict[str, list[Callable[[Writer], Pair]]] = {
    "easy": [
        templates.e_count,
        templates.e_list,
        templates.e_where,
        templates.e_count_where,
        templates.e_aggregate,
        templates.e_aggregate_where,
        templates.e_distinct,
        templates.e_by_name,
        templates.e_between,
        templates.e_order,
    ],
    "medium": [
        templates.m_like,
        templates.m_two_columns,
        templates.m_two_conditions,
        templates.m_group,
        templates.m_group_aggregate,
        templates.m_extreme,
        templates.m_top,
        templates.m_two_aggregates,
        templates.m_having,
        linked.m_join,
        linked.m_join_where,
        linked.m_join_name,
        linked.m_join_group,
    ],
    "hard": [
        templates.h_common,
        templates.h_extreme_where,
        templates.h_average,
        linked.h_without,
        linked.h_with_condition,
        templates.h_both,
        templates.h_group_order,
    ],
    "extra": [
        linked.x_most,
        linked.x_join_extreme,
        linked.x_without_where,
        templates.x_average_where,
        templates.x_common_where,
    ],
}


def write_question(
    rng: random.Random, database: Database, *, freedom: float = 1.0, mix: Mapping[str, float] = MIX
) -> GeneratedQuestion:
    """A random question about ``database``; ``freedom`` 0 keeps to the plainer half of the phrasings."""
    groups, weights = list(mix), list(mix.values())
    while True:
        template = rng.choice(TEMPLATES[rng.choices(groups, weights)[0]])
        try:
            pair = template(Writer(rng, database, freedom))
        except IndexError:  # the table lacks a column, or nothing is linked
            continue
        text, sql = pair
        asks = text.startswith(("What", "How", "Which", "Can")) or ", what " in text or ", which " in text
        return GeneratedQuestion(text + ("?" if asks else "."), sql, template.__name__)
