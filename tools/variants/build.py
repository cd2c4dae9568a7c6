"""Choose the variants of golds: make many of a database, keep the few that separate wrong queries.

What counts are the near misses that give the gold's result on the original database, and that result itself, which a
policy can memorise. A variant is used only if no gold's result there depends on ties, which SQLite orders as it likes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groundwire.tools.sql import DatabaseError, QueryError, run_query
from groundwire.tools.variants.fuzz import RowStyle, make_rows, write_database
from groundwire.tools.variants.mutations import literals, memorised, mutations
from groundwire.tools.variants.tables import Schema, read_schema
from groundwire.tools.variants.ties import TieProbe, depends_on_ties, tie_probes

_VERSION = 10
_CANDIDATES = 48
_FEW_ROWS = 3
_PATIENCE = 10
"""Variants without a gain, one after the other, after which no more are made if one tells constants from each gold."""
_ENOUGH = 5
"""Variants that separate a wrong query; it is not tried on more."""
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
class GoldsJob:
    """One database, golds that are separated together, their questions, and the folder that gets the variants."""

    database: str
    golds: tuple[str, ...]
    questions: tuple[str, ...]
    folder: Path
    count: int


@dataclass(frozen=True, kw_only=True)
class Built:
    """``near_misses`` of the golds give the gold's result on the original; ``separated`` of them not on a variant."""

    database: str
    files: int = 0
    near_misses: int = 0
    separated: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class GoldsSource:
    """All that variants are made of: the sampled database, and each gold's result (None: it fails or is slow)."""

    schema: Schema
    results: tuple[Any, ...]
    key: str
    """A hash of it, of the golds and of the way that variants are made."""


@dataclass
class _Gold:
    sql: str
    result: Any
    misses: list[str]
    probes: list[TieProbe]
    kills: dict[int, set[str]] = field(default_factory=dict)
    """By variant, the wrong queries that it separates; only variants that this gold can use."""


def build_variants(job: GoldsJob) -> Built:
    """Write at most ``job.count`` variants into ``job.folder``, which loses everything else.

    The same data always gives the same variants. A database of which none can be made is a ``problem``.
    """

    def build() -> Built:
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        try:
            return build_of(read_source(job), job)
        except DatabaseError as error:
            return Built(database=job.database, problem=str(error))

    with ThreadPoolExecutor(1) as thread:  # a query of the main thread would start a thread of its own
        return thread.submit(build).result()


def read_source(job: GoldsJob) -> GoldsSource:
    """Read a sample of the database, and run the golds. Raises :class:`groundwire.tools.sql.DatabaseError`."""
    schema = read_schema(job.database, [pair for gold in job.golds for pair in literals(gold)[2]])
    results = tuple(_outcome(job.database, gold, _is_ordered(gold), timeout_s=_GOLD_TIMEOUT_S) for gold in job.golds)
    made_of = json.dumps([_VERSION, job.count, job.golds, job.questions, repr(schema), repr(results)])
    return GoldsSource(schema, results, hashlib.sha256(made_of.encode(errors="replace")).hexdigest())


def build_of(source: GoldsSource, job: GoldsJob) -> Built:
    """As :func:`build_variants`, from what was read, into the empty folder of ``job``.

    Raises :class:`groundwire.tools.sql.DatabaseError`.
    """
    found = [literals(gold) for gold in job.golds]
    known = _known_values(source.schema, [values for values, _, _ in found], job.questions)
    columns = source.schema.columns_by_table()
    started = time.perf_counter()
    golds = [
        _Gold(gold, result, _near_misses(job.database, gold, result, columns, started + _ORIGINAL_S), tie_probes(gold))
        for gold, result in zip(job.golds, source.results, strict=True)
    ]
    largest = max((n for _, counts, _ in found for n in counts if n <= _MAX_COUNT), default=0)
    with tempfile.TemporaryDirectory(dir=job.folder) as name:
        files = _try_variants(Path(name), job.database, source, known, golds, largest, started + _BUDGET_S)
        chosen = _choose(golds, job.count)
        for place, variant in enumerate(chosen):
            files[variant].rename(job.folder / f"{place}.sqlite")
    killed = [set[str]().union(*(gold.kills.get(variant, ()) for variant in chosen)) for gold in golds]
    return Built(
        database=job.database,
        files=len(chosen),
        near_misses=sum(len(gold.misses) for gold in golds),
        separated=sum(len(done & set(gold.misses)) for gold, done in zip(golds, killed, strict=True)),
    )


def _known_values(
    schema: Schema, found: Iterable[Mapping[str, Sequence[Any]]], questions: Sequence[str]
) -> dict[str, list[Any]]:
    """The values of conditions, and the texts of the sample that a question mentions, by column name."""
    known: dict[str, dict[Any, None]] = {}
    for values in found:
        for name, each in values.items():
            known.setdefault(name, {}).update(dict.fromkeys(each))
    asked = "\n".join(questions).lower()
    for table in schema.tables:
        for column in table.columns:
            mentioned = [v for v in column.values if isinstance(v, str) and len(v) > 2 and v.lower() in asked]
            known.setdefault(column.name.lower(), {}).update(dict.fromkeys(mentioned))
    return {name: list(values) for name, values in known.items() if values}


def _near_misses(
    database: str, gold: str, result: Any, columns: Mapping[str, Sequence[str]], deadline: float
) -> list[str]:
    """The mutations of ``gold`` with its result on ``database``, and those that could not be run in time.

    Also ``gold`` with a part replaced by its value there.
    """
    ordered, found = _is_ordered(gold), []

    def value_of(query: str) -> Any:
        with contextlib.suppress(QueryError):
            rows = run_query(database, query, timeout_s=_MUTATION_TIMEOUT_S, max_rows=2).rows
            if len(rows) == len(rows[0] if rows else ()) == 1 and not isinstance(rows[0][0], bytes):
                return rows[0][0]
        return None

    for mutation in [*mutations(gold, columns), *memorised(gold, value_of)]:
        late = result is None or time.perf_counter() > deadline
        if late or _outcome(database, mutation, ordered, timeout_s=_MUTATION_TIMEOUT_S) == result:
            found.append(mutation)
    return found


def _try_variants(
    folder: Path,
    database: str,
    source: GoldsSource,
    known: Mapping[str, Sequence[Any]],
    golds: Sequence[_Gold],
    largest: int,
    deadline: float,
) -> dict[int, Path]:
    """Make variants until more of them separate no more; record in ``golds`` what each separates.

    Raises :class:`groundwire.tools.sql.DatabaseError` if none can be made.
    """
    files: dict[int, Path] = {}
    problem: object = "there was no time"
    most = last_gain = 0
    for variant in range(_CANDIDATES):
        if time.perf_counter() > deadline:
            break
        rng, style = random.Random(f"{source.key} {variant}"), _STYLES[variant % len(_STYLES)]
        if largest > 5 and variant % 4 == 3:
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
        for gold in golds:
            killed = _separated(str(path), gold)
            if killed is not None:
                gold.kills[variant] = killed
        found = sum(min(count, _ENOUGH) for gold in golds for count in _counts(gold).values())
        last_gain = variant if found > most else last_gain
        most = max(most, found)
        if variant - last_gain >= _PATIENCE and all(_counts(gold).keys() >= {_RESULT, _NO_ROWS} for gold in golds):
            break
    if not files:
        raise DatabaseError(f"no variant of {database} can be made: {problem}")
    return files


def _counts(gold: _Gold) -> Counter[str]:
    """The number of variants that separate each wrong query."""
    return Counter(each for killed in gold.kills.values() for each in killed)


def _separated(path: str, gold: _Gold) -> set[str] | None:
    """The wrong queries with another result than the gold's on a variant; None if this gold cannot use the variant."""
    ordered = _is_ordered(gold.sql)
    expected = _outcome(path, gold.sql, ordered)
    if expected is None or _is_nothing(expected, gold) or depends_on_ties(path, gold.probes, equal_rows=True):
        return None
    counts = _counts(gold)
    outcomes = {each: _outcome(path, each, ordered) for each in gold.misses if counts[each] < _ENOUGH}
    nothing = type(expected)()
    outcomes |= {_RESULT: nothing if gold.result is None else gold.result, _NO_ROWS: nothing}
    return {each for each, outcome in outcomes.items() if outcome is not None and outcome != expected}


def _choose(golds: Sequence[_Gold], count: int) -> list[int]:
    """Up to ``count`` variants, each the one that separates most of what is left, then most in all."""
    chosen: list[int] = []
    left = [variant for variant in sorted({v for gold in golds for v in gold.kills}) if _kills(golds, [variant])]
    while left and len(chosen) < count:
        best = max(left, key=lambda v: (_kills(golds, [*chosen, v]), _kills(golds, [v])))
        if len(chosen) >= _LEAST and _kills(golds, [*chosen, best]) == _kills(golds, chosen):
            break
        chosen.append(best)
        left.remove(best)
    return chosen


def _kills(golds: Sequence[_Gold], variants: Sequence[int]) -> int:
    """How many wrong queries some variants separate together."""
    return sum(len(set[str]().union(*(gold.kills.get(variant, ()) for variant in variants))) for gold in golds)


def _is_ordered(gold: str) -> bool:
    return "order by" in gold.lower()


def _is_nothing(outcome: Any, gold: _Gold) -> bool:
    """Whether the largest or first of no rows was asked for: MAX has a row with NULL then, and LIMIT 1 has none."""
    return all(value is None for row in outcome for value in row) and (bool(outcome) or " limit " in gold.sql.lower())


def _outcome(path: str, sql: str, ordered: bool, *, timeout_s: float = _TIMEOUT_S) -> Any:
    """The result of a query in a form that the order of its columns does not change; None if it fails.

    Results that differ in this form differ by the rules of Spider's evaluator, too.
    """
    with contextlib.suppress(QueryError):
        rows = run_query(path, sql, timeout_s=timeout_s, max_rows=_MAX_ROWS).rows
        canonical = [tuple(sorted(row, key=lambda value: str(value) + str(type(value)))) for row in rows]
        return canonical if ordered else Counter(canonical)
    return None
