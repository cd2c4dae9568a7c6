"""Choose the variants for a gold: make many of its database, keep the few that separate wrong queries.

What counts are the near misses that give the gold's result on the original database, and that result itself, which a
policy can memorise. A variant is used only if the gold's result there does not depend on ties, which SQLite orders as
it likes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groundwire.tools.sql import DatabaseError, QueryError, run_query, sorted_row
from groundwire.tools.variants.fuzz import RowStyle, make_rows, write_database
from groundwire.tools.variants.mutations import literals, memorised, mutations
from groundwire.tools.variants.tables import Schema, read_schema
from groundwire.tools.variants.ties import TieProbe, depends_on_ties, tie_probes

_VERSION = 10
_CANDIDATES = 48
_FEW_ROWS = 3
_PATIENCE = 10
"""Variants without a gain, one after the other, after which no more are made if one tells constants from the gold."""
_ENOUGH = 5
"""Variants that separate a wrong query; it is not tried on more."""
_MOST_FILES = 3
"""Variants that are kept, at most."""
_LEAST = 2
"""Variants that are kept though one separates all: a lucky guess is rarely right on several."""
_GOLD_TIMEOUT_S, _TIMEOUT_S, _MUTATION_TIMEOUT_S = 5.0, 1.0, 0.2
_ORIGINAL_S, _BUDGET_S = 5.0, 15.0
_MAX_ROWS = 5000
_MAX_COUNT = 300
_SHARES = ((0.2, 0.6), (0.7, 0.3), (0.5, 0.5))
_STYLES = tuple(RowStyle(rows=rows, keep=keep, known=known) for rows in (25, 8, 40, 5) for keep, known in _SHARES)
_RESULT, _NO_ROWS = "the gold's result on the original", "no rows"
"""Stand for all wrong queries that return this result as constants, and for those that return nothing elsewhere."""


@dataclass(frozen=True)
class GoldSource:
    """All that the variants of a gold are made of: the sampled database, and the gold's result there."""

    database: str
    gold: str
    question: str
    schema: Schema
    result: Any
    """None: it fails or is slow."""
    key: str
    """A hash of it, and of the way that variants are made."""


@dataclass
class _Search:
    source: GoldSource
    misses: list[str]
    probes: list[TieProbe]
    separated: dict[int, set[str]] = field(default_factory=dict)
    """The wrong queries that each variant separates; only variants that the gold can use."""


def read_source(database: str, gold: str, question: str) -> GoldSource:
    """Read a sample of the database, and run the gold. Raises :class:`groundwire.tools.sql.DatabaseError`."""
    schema = read_schema(database, literals(gold)[2])
    result = _outcome(database, gold, _is_ordered(gold), timeout_s=_GOLD_TIMEOUT_S)
    made_of = json.dumps([_VERSION, _MOST_FILES, [gold], [question], repr(schema), repr((result,))])
    key = hashlib.sha256(made_of.encode(errors="replace")).hexdigest()
    return GoldSource(database, gold, question, schema, result, key)


def build_variants(source: GoldSource, folder: Path) -> None:
    """Write a few variants into the empty ``folder``: none if no variant tells the gold from its near misses.

    The same data always gives the same variants. Raises :class:`groundwire.tools.sql.DatabaseError`.
    """
    started = time.perf_counter()
    misses = _near_misses(source, started + _ORIGINAL_S)
    search = _Search(source, misses, tie_probes(source.gold))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        files = _try_variants(Path(name), search, started + _BUDGET_S)
        for place, variant in enumerate(_choose(search.separated)):
            files[variant].rename(folder / f"{place}.sqlite")


def _known_values(schema: Schema, values: Mapping[str, Sequence[Any]], question: str) -> dict[str, list[Any]]:
    """The values of conditions, and the texts of the sample that the question mentions, by column name."""
    known = {name: list(compared) for name, compared in values.items()}
    asked = question.lower()
    for column in (column for table in schema.tables for column in table.columns):
        mentioned = [v for v in column.values if isinstance(v, str) and len(v) > 2 and v.lower() in asked]
        known.setdefault(column.name.lower(), []).extend(mentioned)
    return {name: list(dict.fromkeys(wanted)) for name, wanted in known.items() if wanted}


def _near_misses(source: GoldSource, deadline: float) -> list[str]:
    """What is as right as the gold on its database, or could not be run in time: mutations, and parts as values."""
    database, gold, result = source.database, source.gold, source.result
    ordered, misses = _is_ordered(gold), []

    def value_of(query: str) -> Any:
        with contextlib.suppress(QueryError):
            rows = run_query(database, query, timeout_s=_MUTATION_TIMEOUT_S, max_rows=2).rows
            if len(rows) == len(rows[0] if rows else ()) == 1 and not isinstance(rows[0][0], bytes):
                return rows[0][0]
        return None

    for mutation in [*mutations(gold, source.schema.columns_by_table()), *memorised(gold, value_of)]:
        late = result is None or time.perf_counter() > deadline
        if late or _outcome(database, mutation, ordered, timeout_s=_MUTATION_TIMEOUT_S) == result:
            misses.append(mutation)
    return misses


def _try_variants(folder: Path, search: _Search, deadline: float) -> dict[int, Path]:
    """Make variants until more of them separate no more; record in ``search`` what each does. Raises DatabaseError."""
    source = search.source
    values, counts, _ = literals(source.gold)
    known = _known_values(source.schema, values, source.question)
    largest = max((number for number in counts if number <= _MAX_COUNT), default=0)
    files: dict[int, Path] = {}
    problem: object = "there was no time"
    most = last_gain = 0
    for variant in range(_CANDIDATES):
        if time.perf_counter() > deadline:
            break
        rng, style = random.Random(f"{source.key} {variant}"), _STYLES[variant % len(_STYLES)]
        if largest > 5 and variant % 4 == 3:  # HAVING count(*) > 20 needs groups of that size
            style = replace(style, rows=largest * 4)
        elif variant >= _CANDIDATES // 2 and variant % 2:  # few rows rarely have equal sort keys
            style = replace(style, rows=_FEW_ROWS)
        path = folder / f"{variant}.sqlite"
        try:
            write_database(path, source.schema, make_rows(source.schema, known, style, rng))
        except sqlite3.Error as error:
            problem = error
            continue
        files[variant] = path
        if (queries := _separated(str(path), search)) is not None:
            search.separated[variant] = queries
        times = _times_separated(search)
        separated = sum(min(count, _ENOUGH) for count in times.values())
        last_gain = variant if separated > most else last_gain
        most = max(most, separated)
        if variant - last_gain >= _PATIENCE and times.keys() >= {_RESULT, _NO_ROWS}:
            break
    if not files:
        raise DatabaseError(f"no variant of {source.database} can be made: {problem}")
    return files


def _times_separated(search: _Search) -> Counter[str]:
    """The number of variants that separate each wrong query."""
    return Counter(query for queries in search.separated.values() for query in queries)


def _separated(path: str, search: _Search) -> set[str] | None:
    """The wrong queries with another result than the gold's on a variant; None if the gold cannot use the variant."""
    gold, original = search.source.gold, search.source.result
    ordered = _is_ordered(gold)
    expected = _outcome(path, gold, ordered)
    if expected is None or _is_nothing(expected, gold) or depends_on_ties(path, search.probes, equal_rows=True):
        return None
    times = _times_separated(search)
    outcomes = {query: _outcome(path, query, ordered) for query in search.misses if times[query] < _ENOUGH}
    nothing = type(expected)()
    outcomes |= {_RESULT: nothing if original is None else original, _NO_ROWS: nothing}
    return {query for query, outcome in outcomes.items() if outcome is not None and outcome != expected}


def _choose(separated_by: Mapping[int, set[str]]) -> list[int]:
    """A few variants, each the one that separates most of what is left, then most in all."""
    chosen, separated = list[int](), set[str]()
    left = {variant: queries for variant, queries in separated_by.items() if queries}
    while left and len(chosen) < _MOST_FILES:
        best = max(left, key=lambda variant: (len(separated | left[variant]), len(left[variant])))
        if len(chosen) >= _LEAST and left[best] <= separated:
            break
        chosen.append(best)
        separated |= left.pop(best)
    return chosen


def _is_ordered(gold: str) -> bool:
    return "order by" in gold.lower()


def _is_nothing(outcome: Any, gold: str) -> bool:
    """Whether the largest or first of no rows was asked for: MAX has a row with NULL then, and LIMIT 1 has none."""
    return all(value is None for row in outcome for value in row) and (bool(outcome) or " limit " in gold.lower())


def _outcome(path: str, sql: str, ordered: bool, *, timeout_s: float = _TIMEOUT_S) -> Any:
    """The result of a query in a form that the order of its columns does not change; None if it fails.

    Results that differ in this form differ by the rules of Spider's evaluator, too.
    """
    with contextlib.suppress(QueryError):
        rows = run_query(path, sql, timeout_s=timeout_s, max_rows=_MAX_ROWS).rows
        canonical = list(map(sorted_row, rows))
        return canonical if ordered else Counter(canonical)
    return None
