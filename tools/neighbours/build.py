"""Choose the neighbours of a database: make many variants, keep the few that separate the golds from their near misses.

What counts are the near misses that give the gold's result on the original database. For each gold a variant is used
only if the gold's result there does not depend on ties, which SQLite orders as it likes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groundwire.tools.neighbours.fuzz import Style, make_rows, write_database
from groundwire.tools.neighbours.index import read_counts, write_index
from groundwire.tools.neighbours.mutations import literals, mutations
from groundwire.tools.neighbours.tables import Schema, read_schema
from groundwire.tools.neighbours.ties import TieProbe, depends_on_ties, tie_probes
from groundwire.tools.sql import DatabaseError, QueryError, run_query

__all__ = ["Built", "Job", "build_all", "build_neighbours"]

_VERSION = 3
_CANDIDATES = 48
_PATIENCE = 10
"""Variants without a gain, one after the other, after which no more are made."""
_ENOUGH = 5
"""Variants that separate a mutation; it is not tried on more."""
_FOR_ONE_GOLD = 2
_JOBS_PER_PROCESS = 3
"""Fewer are done before another process has started."""
_OTHERS = 6
_TIMEOUT_S, _MUTATION_TIMEOUT_S = 1.0, 0.2
_ORIGINAL_S, _BUDGET_S = 20.0, 60.0
_MAX_ROWS = 5000
_MAX_COUNT = 300
_SHARES = ((0.2, 0.6), (0.7, 0.3), (0.5, 0.5))
_STYLES = tuple(Style(rows=rows, keep=keep, known=known) for rows in (25, 8, 40, 5) for keep, known in _SHARES)


@dataclass(frozen=True)
class Job:
    """One database, its golds, and the folder that gets its neighbours, and loses everything else."""

    database: str
    golds: tuple[str, ...]
    questions: tuple[str, ...]
    folder: Path
    count: int
    previous: Path | None = None
    """The folder of an earlier run; neighbours made of the same data are copied."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """``near_misses`` of the golds give the gold's result on the original; ``separated`` of them not on a neighbour."""

    database: str
    files: int = 0
    near_misses: int = 0
    separated: int = 0
    problem: str | None = None


@dataclass
class _Gold:
    sql: str
    misses: list[str]
    others: list[str]
    probes: list[TieProbe]
    kills: dict[int, set[str]] = field(default_factory=dict)
    """By variant, the near misses that it separates; only variants that this gold can use."""


def build_all(jobs: Iterable[Job], *, on_end: Callable[[], None] = lambda: None) -> list[Built]:
    """:func:`build_neighbours` of each job, in as many processes as there are CPUs."""
    todo = list(jobs)
    workers = min(len(todo) // _JOBS_PER_PROCESS, os.cpu_count() or 1)
    if workers < 2:
        return [_with_end(build_neighbours(job), on_end) for job in todo]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [_with_end(built, on_end) for built in pool.map(build_neighbours, todo)]


def _with_end(built: Built, on_end: Callable[[], None]) -> Built:
    on_end()
    return built


def build_neighbours(job: Job) -> Built:
    """Write at most ``job.count`` neighbours and their index, unless the folder has those of the same data.

    The same data always gives the same neighbours. The index is written last, so an interrupted build is not taken for
    a complete one.
    """
    with ThreadPoolExecutor(1) as thread:  # a query of the main thread would start a thread of its own
        return thread.submit(_build, job).result()


def _build(job: Job) -> Built:
    found = [literals(gold) for gold in job.golds]
    try:
        schema = read_schema(job.database, [pair for _, _, pairs in found for pair in pairs])
    except DatabaseError as error:
        _empty(job.folder)
        write_index(job.folder, "", {gold: [] for gold in job.golds})
        return Built(database=job.database, problem=str(error))
    key = _key(job, schema)
    if (counts := read_counts(job.folder, key)) is not None:
        return _built(job, counts)
    _empty(job.folder)
    if job.previous is not None and (counts := read_counts(job.previous, key)) is not None:
        shutil.copytree(job.previous, job.folder, dirs_exist_ok=True)
        return _built(job, counts)
    known = _known_values(schema, [values for values, _, _ in found], job.questions)
    columns = schema.columns_by_table()
    started = time.process_time()
    golds = [_near_misses(job.database, gold, columns, started + _ORIGINAL_S) for gold in job.golds]
    largest = max((n for _, counts, _ in found for n in counts if n <= _MAX_COUNT), default=0)
    with tempfile.TemporaryDirectory(dir=job.folder) as name:
        files = _try_variants(Path(name), schema, known, golds, largest, key, started + _BUDGET_S)
        chosen = _choose(golds, job.count)
        for place, variant in enumerate(chosen):
            files[variant].rename(job.folder / f"{place}.sqlite")
    counts = {
        "files": len(chosen),
        "near_misses": sum(len(gold.misses) for gold in golds),
        "separated": sum(len(set(gold.misses) & _killed(gold, chosen)) for gold in golds),
    }
    write_index(job.folder, key, {gold.sql: _names(gold, chosen) for gold in golds}, **counts)
    return _built(job, counts)


def _empty(folder: Path) -> None:
    """Remove what an interrupted or other run left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _built(job: Job, counts: Mapping[str, int]) -> Built:
    files, near_misses, separated = (counts.get(name, 0) for name in ("files", "near_misses", "separated"))
    return Built(database=job.database, files=files, near_misses=near_misses, separated=separated)


def _key(job: Job, schema: Schema) -> str:
    made_of = json.dumps([_VERSION, job.count, job.golds, job.questions, repr(schema)])
    return hashlib.sha256(made_of.encode(errors="replace")).hexdigest()


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


def _near_misses(database: str, gold: str, columns: Mapping[str, Sequence[str]], deadline: float) -> _Gold:
    """The mutations of ``gold`` with its result on ``database``, and the others that run."""
    ordered = _is_ordered(gold)
    expected = _outcome(database, gold, ordered)
    misses: list[str] = []
    others: list[str] = []
    for mutation in mutations(gold, columns) if expected is not None else ():
        outcome = None
        if time.process_time() < deadline:
            outcome = _outcome(database, mutation, ordered, timeout_s=_MUTATION_TIMEOUT_S)
        if outcome is not None:
            (misses if outcome == expected else others).append(mutation)
    return _Gold(gold, misses, others[: _OTHERS // 2 if misses else _OTHERS], tie_probes(gold))


def _try_variants(
    folder: Path,
    schema: Schema,
    known: Mapping[str, Sequence[Any]],
    golds: Sequence[_Gold],
    largest: int,
    key: str,
    deadline: float,
) -> dict[int, Path]:
    """Make variants until more of them separate no more; record in ``golds`` what each separates."""
    files: dict[int, Path] = {}
    most = last_gain = 0
    for variant in range(_CANDIDATES):
        if time.process_time() > deadline:
            break
        rng, style = random.Random(f"{key} {variant}"), _STYLES[variant % len(_STYLES)]
        if largest > 5 and variant % 4 == 3:
            style = Style(rows=largest * 4, keep=style.keep, known=style.known)
        path = folder / f"{variant}.sqlite"
        try:
            write_database(path, schema, make_rows(schema, known, style, rng))
        except sqlite3.Error:
            continue
        files[variant] = path
        for gold in golds:
            killed = _separated(str(path), gold)
            if killed is not None:
                gold.kills[variant] = killed
        found = sum(min(count, _ENOUGH) for gold in golds for count in _counts(gold).values())
        last_gain = variant if found > most else last_gain
        most = max(most, found)
        if variant - last_gain >= _PATIENCE:
            break
    return files


def _counts(gold: _Gold) -> Counter[str]:
    """The number of variants that separate each mutation."""
    return Counter(each for killed in gold.kills.values() for each in killed)


def _separated(path: str, gold: _Gold) -> set[str] | None:
    """The mutations with another result than the gold's on a variant; None if this gold cannot use the variant."""
    ordered = _is_ordered(gold.sql)
    expected = _outcome(path, gold.sql, ordered)
    if expected is None or depends_on_ties(path, gold.probes, equal_rows=True):
        return None
    counts = _counts(gold)
    left = [each for each in (*gold.misses, *gold.others) if counts[each] < _ENOUGH]
    outcomes = {each: _outcome(path, each, ordered) for each in left}
    return {each for each, outcome in outcomes.items() if outcome is not None and outcome != expected}


def _choose(golds: Sequence[_Gold], count: int) -> list[int]:
    """Up to ``count`` variants, each the one that separates most of what is left; near misses count most."""
    chosen: list[int] = []
    variants = sorted({variant for gold in golds for variant in gold.kills})
    killed: list[set[str]] = [set() for _ in golds]
    while len(chosen) < count:
        gains = {v: sum(_gain(gold, v, done) for gold, done in zip(golds, killed, strict=True)) for v in variants}
        best = max(gains, key=lambda v: gains[v], default=None)
        if best is None or gains[best] <= 0:
            break
        chosen.append(best)
        for gold, done in zip(golds, killed, strict=True):
            done.update(gold.kills.get(best, ()))
    return chosen


def _gain(gold: _Gold, variant: int, done: set[str]) -> float:
    new = gold.kills.get(variant, set()) - done
    near = sum(1 for each in gold.misses if each in new)
    return near + 0.01 * (len(new) - near)


def _names(gold: _Gold, chosen: Sequence[int]) -> list[str]:
    """The files that this gold needs: those that separate most, at most two."""
    done: set[str] = set()
    names: list[str] = []
    while len(names) < _FOR_ONE_GOLD:
        place = max(range(len(chosen)), key=lambda i: _gain(gold, chosen[i], done), default=None)
        if place is None or _gain(gold, chosen[place], done) < (1 if names else 0.001):
            break
        names.append(f"{place}.sqlite")
        done |= gold.kills[chosen[place]]
    return names


def _killed(gold: _Gold, chosen: Sequence[int]) -> set[str]:
    used = {int(name.removesuffix(".sqlite")) for name in _names(gold, chosen)}
    return set().union(*(gold.kills[chosen[place]] for place in used)) if used else set()


def _is_ordered(gold: str) -> bool:
    return "order by" in gold.lower()


def _outcome(path: str, sql: str, ordered: bool, *, timeout_s: float = _TIMEOUT_S) -> Any:
    """The result of a query in a form that the order of its columns does not change; None if it fails.

    Results that differ in this form differ by the rules of Spider's evaluator, too.
    """
    with contextlib.suppress(QueryError):
        rows = run_query(path, sql, timeout_s=timeout_s, max_rows=_MAX_ROWS).rows
        canonical = [tuple(sorted(row, key=lambda value: str(value) + str(type(value)))) for row in rows]
        return canonical if ordered else Counter(canonical)
    return None
