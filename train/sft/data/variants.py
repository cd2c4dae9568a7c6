"""Wrong queries that resemble a gold query, and other versions of a schema: order, fewer tables, other spellings.

Other versions are against learning the databases by heart. One changes the text of the prompt and the names in the
queries alike. The spelling of all names changes in one way (case, a prefix, camel case), so that a question still fits
its names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from groundwire.tools.schema import RESERVED

_TABLE = re.compile(r"CREATE TABLE (\S+|\"[^\"]*\") \( (.*) \)")
_TOKEN = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|[A-Za-z_]\w*|\s+|.", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_SWAPS = {"avg": "max", "max": "min", "min": "sum", "sum": "avg", "desc": "ASC", "asc": "DESC", ">": "<", "<": ">"}
_SWAPS |= {"and": "OR", "or": "AND", ">=": ">", "<=": "<", "distinct": "", "count": "sum", "intersect": "UNION"}
_QUERY_TOKEN = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|\w+|[<>=!]+|\s+|.", re.DOTALL)
_CLAUSE = re.compile(r"\s+(?:WHERE|LIMIT|ORDER BY|GROUP BY|HAVING|AND|EXCEPT|INTERSECT|UNION)\s.*", re.I | re.DOTALL)


@dataclass(frozen=True)
class SchemaVariant:
    """A schema's text, and :meth:`rename` for the queries and error messages about it."""

    text: str
    names: dict[str, str]
    """New spellings by the old ones in lower case; empty if nothing was renamed."""

    def rename(self, sql: str) -> str:
        """``sql`` with the new names; literals, functions and keywords stay."""
        return _rename(sql, self.names) if self.names else sql


def make_variant(rng: random.Random, schema: str, used: Iterable[str], *, augment: float) -> SchemaVariant:
    """A random version of ``schema`` with at least the tables of the queries ``used``; often the schema itself.

    ``augment`` is the probability of each kind of change.
    """
    blocks = _blocks(schema)
    if rng.random() < augment:
        words = {word.lower() for sql in used for word in _NAME.findall(sql)}
        keep = rng.random()
        blocks = [block for block in blocks if _table_name(block).lower() in words or rng.random() < keep]
    if rng.random() < augment:
        rng.shuffle(blocks)
    if rng.random() < augment:
        blocks = [_shuffle_columns(rng, block) for block in blocks]
    text = "\n".join("\n".join(block) for block in blocks)
    if rng.random() >= augment:
        return SchemaVariant(text, {})
    spell = rng.choice(_SPELLINGS)
    names = {name.lower(): new for name in sorted(identifiers(text)) if (new := spell(name)).lower() not in RESERVED}
    if len({new.lower() for new in names.values()}) < len(names):  # two names would become one
        return SchemaVariant(text, {})
    return SchemaVariant("\n".join(_rename_line(line, names) for line in text.split("\n")), names)


def wrong_query(rng: random.Random, gold: str, names: Sequence[str], others: Sequence[str]) -> str:
    """Another query than ``gold``: with another name or operator, without a clause, or of another question.

    ``names`` are those of the schema, ``others`` the golds of other questions about the database. The result of the
    query can still be the right one: compare it.
    """
    for _ in range(8):
        tokens = _QUERY_TOKEN.findall(gold)
        kind = rng.randrange(5)
        if kind == 0 and others:
            changed = rng.choice(others)
        elif kind == 1:
            changed = _CLAUSE.sub("", gold, count=1)
        elif kind == 2:
            changed = "".join(_SWAPS.get(token.lower(), token) for token in tokens)
        else:
            places = [i for i, token in enumerate(tokens) if token in names]
            if places and names:
                tokens[rng.choice(places)] = rng.choice(names) if kind == 3 else rng.choice(("id", "name", "date"))
            changed = "".join(tokens)
        if changed.split() != gold.split():
            return changed
    return "SELECT 1"


def identifiers(schema: str) -> set[str]:
    """The plain names of tables and columns in a schema's text."""
    names = set()
    for block in _blocks(schema):
        if match := _TABLE.match(block[0]):
            names |= {match[1], *(column.split(" ")[0] for column in _split(match[2]))}
    return {name for name in names if _NAME.fullmatch(name) and name.lower() not in RESERVED}


def _blocks(schema: str) -> list[list[str]]:
    """The lines of each table: its CREATE TABLE, and its example values."""
    return [block.split("\n") for block in re.split(r"\n(?=CREATE TABLE)", schema)]


def _table_name(block: list[str]) -> str:
    match = _TABLE.match(block[0])
    return match[1].strip('"') if match else ""


def _split(columns: str) -> list[str]:
    parts, depth = [""], 0
    for word in columns.split(" "):
        depth += (word == "(") - (word == ")")
        if word == "," and not depth:
            parts.append("")
        else:
            parts[-1] += f" {word}" if parts[-1] else word
    return parts


def _shuffle_columns(rng: random.Random, block: list[str]) -> list[str]:
    if not (match := _TABLE.match(block[0])):
        return block
    parts = _split(match[2])
    keys = [part for part in parts if part.startswith(("primary key (", "foreign key ("))]
    columns = [part for part in parts if part not in keys]
    rng.shuffle(columns)
    return [f"CREATE TABLE {match[1]} ( {' , '.join([*columns, *keys])} )", *block[1:]]


def _rename_line(line: str, names: dict[str, str]) -> str:
    """A line of the schema's text; types, keywords and example values stay."""
    if line.startswith("-- "):
        name, colon, values = line[3:].partition(" : ")
        return f"-- {names.get(name.lower(), name)}{colon}{values}"
    match = _TABLE.match(line)
    if not match:
        return line
    parts = []
    for part in _split(match[2]):
        if part.startswith(("primary key (", "foreign key (")):
            parts.append(_rename(part, names))
        else:
            name, space, kind = part.partition(" ")
            parts.append(f"{names.get(name.lower(), name)}{space}{kind}")
    return f"CREATE TABLE {names.get(match[1].lower(), match[1])} ( {' , '.join(parts)} )"


def _rename(sql: str, names: dict[str, str]) -> str:
    tokens = _TOKEN.findall(sql)
    for index, token in enumerate(tokens):
        following = "".join(tokens[index + 1 : index + 3]).lstrip()
        if token.lower() in names and not following.startswith("("):
            tokens[index] = names[token.lower()]
    return "".join(tokens)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


_SPELLINGS: tuple[Callable[[str], str], ...] = (
    str.lower,
    str.upper,
    str.capitalize,
    _camel,
    _snake,
    lambda name: f"{name}_",
    lambda name: f"t_{name}",
    lambda name: f"my_{_snake(name)}",
)
