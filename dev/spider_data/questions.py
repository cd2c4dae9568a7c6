"""Random questions about any database.

Pretraining uses mostly plain phrasings, the tasks of reinforcement learning all of them (``freedom``): what a policy
then learns is language, which helps with every subject.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dev.spider_data.advanced_templates import EXTRA, HARD
from dev.spider_data.basic_templates import EASY, MEDIUM
from dev.spider_data.databases import Database
from dev.spider_data.phrasing import Pair, Writer

__all__ = ["MIX", "TEMPLATES", "GeneratedQuestion", "write_question"]

MIX = {"easy": 0.28, "medium": 0.42, "hard": 0.18, "extra": 0.12}
"""The share of each group of templates, which gives about the shares of Spider's levels."""
TEMPLATES: dict[str, Sequence[Callable[[Writer], Pair]]] = {
    "easy": EASY,
    "medium": MEDIUM,
    "hard": HARD,
    "extra": EXTRA,
}


class GeneratedQuestion(NamedTuple):
    """A question, its query, and the template of both."""

    text: str
    sql: str
    template: str


def write_question(
    rng: random.Random, database: Database, *, freedom: float = 1.0, mix: Mapping[str, float] = MIX
) -> GeneratedQuestion:
    """A random question about ``database``; with ``freedom`` 0 only the plainer half of the phrasings is used."""
    groups, weights = list(mix), list(mix.values())
    while True:
        template = rng.choice(TEMPLATES[rng.choices(groups, weights)[0]])
        try:
            text, sql = template(Writer(rng, database, freedom))
        except IndexError:  # the table lacks a column, or the database has no links
            continue
        asks = text.startswith(("What", "How", "Which", "Can")) or ", what " in text or ", which " in text
        return GeneratedQuestion(text + ("?" if asks else "."), sql, template.__name__)
