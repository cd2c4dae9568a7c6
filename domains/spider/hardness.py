"""Spider's four hardness levels, counted over tokens.

The official evaluator (taoyds/spider, ``evaluation.py``) parses a gold with its own small grammar and counts three
things. The counts depend on details of that grammar: a trailing ORDER BY belongs to the last part of a UNION, an
aggregate in HAVING is ignored, a NOT counts as one. A complete SQL parser would disagree, so this module counts over a
tree of tokens with the same rules, also for queries that the official grammar cannot parse. Two of Spider's 7,873 golds
differ, where the official parser loses the OR after a comparison of two columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Union

LEVELS = ("easy", "medium", "hard", "extra")

_AGGREGATES = ["max", "min", "count", "sum", "avg"]
_SET_OPERATORS = {"intersect", "union", "except"}
_SUBQUERY = "(select)"
_TOKEN = re.compile(
    r"""--[^\n]* | /\*.*?\*/ | \s+                           # comments and blanks, dropped
    | (?P<word> '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*`   # quoted: with its quotes it equals no keyword
    | [^\W\d][\w.]* | [\d.]+ | [<>!=|]+ | . )""",
    re.VERBOSE | re.DOTALL,
)

Tree = list[Union[str, "Tree"]]
"""Lower-case tokens; a parenthesis is a nested list."""


def hardness(sql: str) -> str:
    """The level of a gold query: ``easy``, ``medium``, ``hard`` or ``extra``. Text without a query is easy."""
    clauses, nested = _clauses(_tree(sql))
    tables, on = _tables_and_conditions(clauses["from"])
    where, having = list(_flat(clauses["where"])), list(_flat(clauses["having"]))
    conditions = on + where + having

    clause_count = sum(bool(clauses[name]) for name in ("where", "group", "order", "limit"))
    basic = clause_count + max(tables - 1, 0) + conditions.count("or") + conditions.count("like")
    nested += conditions.count(_SUBQUERY)

    columns, group = _items(clauses["select"]), _items(clauses["group"])
    aggregates = sum(_starts_with_aggregate(column) for column in columns)
    aggregates += _aggregates(clauses["group"]) + _aggregates(clauses["order"])
    aggregates += _negations(where) + _negations(having) + _connectives(having)
    others = sum((aggregates > 1, len(columns) > 1, _connectives(where) > 0, len(group) > 1))
    # As ``eval_hardness``, where these counts are component1, component2 and others.
    if nested:
        return "hard" if nested == 1 and basic <= 1 and others == 0 else "extra"
    if basic <= 1 and others == 0:
        return "easy"
    if (basic <= 1 and others <= 2) or (basic <= 2 and others < 2):
        return "medium"
    if (basic <= 2 and others > 2) or (basic == 3 and others <= 2):
        return "hard"
    return "extra"


def _tree(sql: str) -> Tree:
    root: Tree = []
    stack = [root]
    for match in _TOKEN.finditer(sql):
        word = match["word"]
        if word == "(":
            inner: Tree = []
            stack[-1].append(inner)
            stack.append(inner)
        elif word == ")":
            if len(stack) > 1:
                stack.pop()
        elif word:
            stack[-1].append(word.lower())
    return root


def _clauses(tree: Tree) -> tuple[dict[str, Tree], int]:
    """The clauses of a query up to its first set operator, and 1 if there is one. The rest is ignored."""
    clauses: dict[str, Tree] = {name: [] for name in ("select", "from", "where", "group", "having", "order", "limit")}
    current: Tree = []
    for position, word in enumerate(tree):
        if isinstance(word, str):
            if word in _SET_OPERATORS:
                return clauses, 1
            following = tree[position + 1 : position + 2]
            if word in clauses and (word not in ("group", "order") or following == ["by"]):
                current = clauses[word]
                continue
            if word == "by" and tree[position - 1] in ("group", "order"):
                continue
            if word == ";":
                break
        elif not any(clauses.values()) and word[:1] == ["select"]:  # a query in parentheses
            clauses, _ = _clauses(word)
            continue
        current.append(word)
    return clauses, 0


def _flat(tree: Tree) -> Iterator[str]:
    """The tokens of a clause without its parentheses; a subquery is one token."""
    for word in tree:
        if isinstance(word, str):
            yield word
        elif word[:1] == ["select"]:
            yield _SUBQUERY
        else:
            yield from _flat(word)


def _tables_and_conditions(tree: Tree) -> tuple[int, list[str]]:
    """The number of tables in a FROM clause, subqueries included, and the tokens of its ON conditions."""
    tables, on, in_condition = bool(tree) + 0, [], False
    for word in _flat(tree):
        if word in ("join", ","):
            tables, in_condition = tables + 1, False
        elif word == "on":
            in_condition = True
        elif in_condition:
            on.append(word)
    return tables, on


def _items(tree: Tree) -> list[Tree]:
    items: list[Tree] = [[]]
    for word in tree:
        if word == ",":
            items.append([])
        elif word != "distinct":
            items[-1].append(word)
    return items


def _starts_with_aggregate(item: Tree) -> bool:
    return len(item) > 1 and item[0] in _AGGREGATES and isinstance(item[1], list)


def _aggregates(tree: Tree) -> int:
    return sum(_starts_with_aggregate(tree[position:]) for position in range(len(tree)))


def _negations(condition: list[str]) -> int:
    return sum(word == "not" and condition[max(i - 1, 0)] != "is" for i, word in enumerate(condition))


def _connectives(condition: list[str]) -> int:
    """The number of ANDs and ORs between conditions, without the AND of each BETWEEN."""
    return condition.count("and") + condition.count("or") - condition.count("between")
