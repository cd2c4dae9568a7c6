"""Questions about two tables, one of which refers to the other.

A template returns a question and its query; it raises IndexError where the database lacks what it needs. The letter of
its name is the group of ``questions.MIX`` that it belongs to.
"""

# The queries are text for a benchmark, made of names from the lexicon; the numbers are chances.
# ruff: noqa: D103, S608

from __future__ import annotations

from groundwire.domains.spider.generate.databases import Link, Table
from groundwire.domains.spider.generate.phrasing import Pair, Writer, plural, spoken

__all__ = [
    "h_with_condition",
    "h_without",
    "m_join",
    "m_join_group",
    "m_join_name",
    "m_join_where",
    "x_join_extreme",
    "x_most",
    "x_without_where",
]


def _join(child: Table, link: Link, parent: Table) -> str:
    return f"{parent.name} JOIN {child.name} ON {parent.name}.id = {child.name}.{link.column}"


# Templates. The letter is the group of MIX; the label of a question is counted from its query.


def m_join(w: Writer) -> Pair:
    child, link, parent = w.link()
    n, m = w.column("name", parent), w.column("name number category", child)
    text = w.say(
        f"{w.many_of(n)} of each {spoken(parent.name)} and the {spoken(m.name)} of its {plural(child.name)}",
        f"{w.many_of(n)} of {plural(parent.name)} together with the {spoken(m.name)} of their {plural(child.name)}",
    )
    return text, f"SELECT {parent.name}.{n.name}, {child.name}.{m.name} FROM {_join(child, link, parent)}"


def m_join_where(w: Writer) -> Pair:
    child, link, parent = w.link()
    x, count = w.condition(parent, qualified=True), w.rng.random() < 0.3
    tail = w.say(
        *(
            f"{plural(child.name)} of the {plural(parent.name)} {x.text}",
            f"{plural(child.name)} of {plural(parent.name)} {x.text}",
        ),
        f"{plural(child.name)} that belong to {plural(parent.name)} {x.text}",
    )
    where = f"{_join(child, link, parent)} WHERE {x.sql}"
    if count:
        return f"{w.say('How many', 'Count the')} {tail}", f"SELECT count(*) FROM {where}"
    c = w.column("name number category", child)
    return f"{w.many_of(c)} of {tail}", f"SELECT {child.name}.{c.name} FROM {where}"


def m_join_name(w: Writer) -> Pair:
    child, link, parent = w.link()
    n, c = w.column("name", parent), w.column("name number category", child)
    v = w.value(n, parent)
    text = w.say(
        f"{w.many_of(c)} of the {plural(child.name)} of the {spoken(parent.name)} named '{v}'",
        f"{w.many_of(c)} of {plural(child.name)} of '{v}'",
        f"{w.many_of(c)} of all {plural(child.name)} that the {spoken(parent.name)} '{v}' has",
    )
    return text, f"SELECT {child.name}.{c.name} FROM {_join(child, link, parent)} WHERE {parent.name}.{n.name} = '{v}'"


def m_join_group(w: Writer) -> Pair:
    child, link, parent = w.link()
    n = w.column("name", parent)
    text = w.say(
        f"Show the {spoken(n.name)} of each {spoken(parent.name)} and the number of its {plural(child.name)}",
        f"For each {spoken(parent.name)}, show its {spoken(n.name)} and how many {plural(child.name)} it has",
        f"How many {plural(child.name)} does each {spoken(parent.name)} have? Show the {spoken(n.name)} and the number",
    )
    return text, f"SELECT {parent.name}.{n.name}, count(*) FROM {_join(child, link, parent)} GROUP BY {parent.name}.id"


def h_without(w: Writer) -> Pair:
    child, link, parent = w.link()
    one, many = spoken(child.name), plural(child.name)
    tail = w.say(
        f"that do not have any {one}", f"without {many}", f"that have no {one}", f"that lack {many}", f"with no {many}"
    )
    inner = f"{parent.name} WHERE id NOT IN (SELECT {link.column} FROM {child.name})"
    if w.rng.random() < 0.3:
        return f"{w.say('How many', 'Count the')} {plural(parent.name)} {tail}", f"SELECT count(*) FROM {inner}"
    n = w.column("name number category", parent)
    return f"{w.many_of(n)} of {plural(parent.name)} {tail}", f"SELECT {n.name} FROM {inner}"


def h_with_condition(w: Writer) -> Pair:
    child, link, parent = w.link()
    x, n, without = w.condition(child), w.column("name", parent), w.rng.random() < 0.5
    many = f"{plural(child.name)} {x.text}"
    tail = (
        w.say(f"without {many}", f"that do not have {many}") if without else w.say(f"that have {many}", f"with {many}")
    )
    word = "NOT IN" if without else "IN"
    return (
        f"{w.many_of(n)} of {plural(parent.name)} {tail}",
        f"SELECT {n.name} FROM {parent.name} WHERE id {word} (SELECT {link.column} FROM {child.name} WHERE {x.sql})",
    )


def x_most(w: Writer) -> Pair:
    child, link, parent = w.link()
    n, high = w.column("name category number", parent), w.rng.random() < 0.75
    word = "most" if high else "fewest"
    tail = w.say(
        *(f"with the {word} {plural(child.name)}", f"that has the {word} {plural(child.name)}"),
        f"with the {'largest' if high else 'smallest'} number of {plural(child.name)}",
    )
    return (
        f"{w.one()} {spoken(n.name)} of the {spoken(parent.name)} {tail}",
        f"SELECT {parent.name}.{n.name} FROM {_join(child, link, parent)} GROUP BY {parent.name}.id "
        f"ORDER BY count(*) {'DESC' if high else 'ASC'} LIMIT 1",
    )


def x_join_extreme(w: Writer) -> Pair:
    child, link, parent = w.link()
    x, c, n = w.condition(parent, qualified=True), w.column("number", child), w.column("name", child)
    text, direction = w.extreme(c, spoken(child.name))
    return (
        f"Among {plural(child.name)} of {plural(parent.name)} {x.text}, {w.say('what is the', 'find the')} "
        f"{spoken(n.name)} of the {text}",
        f"SELECT {child.name}.{n.name} FROM {_join(child, link, parent)} WHERE {x.sql} "
        f"ORDER BY {child.name}.{c.name} {direction} LIMIT 1",
    )


def x_without_where(w: Writer) -> Pair:
    child, link, parent = w.link()
    x, n = w.condition(parent), w.column("name", parent)
    tail = w.say(
        f"that do not have any {spoken(child.name)}",
        f"without {plural(child.name)}",
        f"that have no {spoken(child.name)}",
    )
    return (
        f"{w.many_of(n)} of {plural(parent.name)} {x.text} {w.say('and', 'but')} {tail}",
        f"SELECT {n.name} FROM {parent.name} WHERE {x.sql} AND id NOT IN (SELECT {link.column} FROM {child.name})",
    )
