"""Templates of the easy and the medium questions.

A template returns a question and its query. It raises IndexError if the database lacks a column or a link that it
needs. The order of the templates and of their random choices decides which data a seed gives.
"""

# The queries are made of names from the lexicon; the numbers are probabilities.
# ruff: noqa: S608

from __future__ import annotations

from dev.spider_data.phrasing import AGGREGATES, Pair, Writer, join_sql

__all__ = ["EASY", "MEDIUM"]


def count(w: Writer) -> Pair:
    text = w.say(
        f"How many {w.plural} are there",
        f"Count the number of {w.plural}",
        f"What is the number of {w.plural}",
        f"How many {w.plural} do we have",
        f"Count all {w.plural}",
        f"Tell me how many {w.plural} exist",
    )
    return text, f"SELECT count(*) FROM {w.source}"


def list_all(w: Writer) -> Pair:
    c = w.column("name number category")
    text = w.say(
        f"{w.many_of(c)} of all {w.plural}",
        f"{w.many()} {c.plural} of all {w.plural}",
        f"{w.many_of(c)} of every {w.singular}",
        f"What {c.singular} does each {w.singular} have",
    )
    return text, f"SELECT {c.name} FROM {w.source}"


def where(w: Writer) -> Pair:
    x = w.condition()
    c = w.column("name number category", other_than=(x.column.name,))
    text = w.say(
        f"{w.many_of(c)} of {w.plural} {x.text}",
        f"{w.many()} {c.plural} of the {w.plural} {x.text}",
        f"For {w.plural} {x.text}, what is the {c.singular}",
        f"{w.many_of(c)} of each {w.singular} {x.text}",
    )
    return text, f"SELECT {c.name} FROM {w.source} WHERE {x.sql}"


def count_where(w: Writer) -> Pair:
    x = w.condition()
    text = w.say(
        f"How many {w.plural} are there {x.text}",
        f"Count the {w.plural} {x.text}",
        f"Find the number of {w.plural} {x.text}",
        f"What is the number of {w.plural} {x.text}",
        f"How many {w.plural} do we have {x.text}",
    )
    return text, f"SELECT count(*) FROM {w.source} WHERE {x.sql}"


def aggregate(w: Writer) -> Pair:
    c, (a, word) = w.column("number"), w.aggregate()
    noun = c.singular
    text = w.say(
        f"{w.one()} {word} {noun} of all {w.plural}",
        f"{w.one()} {word} {noun} of the {w.plural}",
        f"{w.one()} {word} {noun} across {w.plural}",
        f"For all {w.plural}, what is the {word} {noun}",
    )
    return text, f"SELECT {a}({c.name}) FROM {w.source}"


def aggregate_where(w: Writer) -> Pair:
    x = w.condition()
    c, (a, word) = w.column("number", other_than=(x.column.name,)), w.aggregate()
    text = w.say(
        f"{w.one()} {word} {c.singular} of {w.plural} {x.text}",
        f"For {w.plural} {x.text}, find the {word} {c.singular}",
    )
    return text, f"SELECT {a}({c.name}) FROM {w.source} WHERE {x.sql}"


def distinct(w: Writer) -> Pair:
    c = w.column("category")
    noun = c.plural
    if w.rng.random() < 0.4:
        text = w.say(
            f"How many different {noun} do the {w.plural} have",
            f"Count the number of distinct {noun} of {w.plural}",
            f"How many distinct {noun} are there among the {w.plural}",
            f"What is the number of different {noun} of {w.plural}",
        )
        return text, f"SELECT count(DISTINCT {c.name}) FROM {w.source}"
    text = w.say(
        f"{w.many()} different {noun} of {w.plural}",
        f"{w.many()} distinct {noun} of {w.plural}",
        f"{w.many()} different {noun} that {w.plural} have",
        f"{w.many()} {noun} of {w.plural} without repeats",
    )
    return text, f"SELECT DISTINCT {c.name} FROM {w.source}"


def by_name(w: Writer) -> Pair:
    n, c, t = w.column("name"), w.column("number category"), w.singular
    v, noun = w.value(n), c.singular
    text = w.say(
        f"What is the {noun} of the {t} named '{v}'",
        f"Find the {noun} of the {t} with {n.singular} '{v}'",
        f"What {noun} does the {t} called '{v}' have",
        f"{w.one()} {noun} of '{v}'",
        f"{w.one()} {noun} of the {t} {v}",
    )
    return text, f"SELECT {c.name} FROM {w.source} WHERE {n.name} = '{v}'"


def between(w: Writer) -> Pair:
    c = w.column("number")
    n = w.column("name category")
    low, high = sorted((int(w.value(c)), int(w.value(c))))
    noun = c.singular
    text = f"{w.many_of(n)} of {w.plural} " + w.say(
        f"with {noun} between {low} and {high}",
        f"whose {noun} is between {low} and {high}",
        f"with {noun} from {low} to {high}",
    )
    return text, f"SELECT {n.name} FROM {w.source} WHERE {c.name} BETWEEN {low} AND {high}"


def order(w: Writer) -> Pair:
    a, c = w.column("name"), w.column("number")
    down, noun = w.rng.random() < 0.5, c.singular
    tail = (
        w.say(
            f"in descending order of {noun}",
            f"from the highest to the lowest {noun}",
            f"sorted by {noun} in descending order",
        )
        if down
        else w.say(
            f"in ascending order of {noun}",
            f"sorted by {noun}",
            f"ordered by {noun}",
            f"from the lowest to the highest {noun}",
        )
    )
    two, direction = w.rng.random() < 0.4, "DESC" if down else "ASC"
    what, columns = (f"{a.singular} and {noun}", f"{a.name}, {c.name}") if two else (a.singular, a.name)
    sql = f"SELECT {columns} FROM {w.source} ORDER BY {c.name} {direction}"
    return f"{w.many()} {what} of all {w.plural} {tail}", sql


def like(w: Writer) -> Pair:
    n = w.column("name")
    first, _, last = w.value(n).partition(" ")
    starts, noun = w.rng.random() < 0.5, n.singular
    tail = (
        w.say(f"starts with '{first}'", f"begins with '{first}'")
        if starts
        else w.say(f"contains '{last}'", f"includes '{last}'")
    )
    pattern = f"'{first}%'" if starts else f"'%{last}%'"
    if w.rng.random() < 0.4:
        sql = f"SELECT count(*) FROM {w.source} WHERE {n.name} LIKE {pattern}"
        return f"How many {w.plural} are there whose {noun} {tail}", sql
    c = w.column("number category")
    sql = f"SELECT {c.name} FROM {w.source} WHERE {n.name} LIKE {pattern}"
    return f"{w.many_of(c)} of {w.plural} whose {noun} {tail}", sql


def two_columns(w: Writer) -> Pair:
    a = w.column("name")
    b = w.column("number category")
    noun = f"{a.singular} and {b.singular}"
    if w.rng.random() < 0.4:
        text = w.say(f"{w.many()} {noun} of all {w.plural}", f"{w.many()} {noun} of each {w.singular}")
        return text, f"SELECT {a.name}, {b.name} FROM {w.source}"
    x = w.condition(other_than=(b.name,))
    sql = f"SELECT {a.name}, {b.name} FROM {w.source} WHERE {x.sql}"
    return f"{w.many()} {noun} of {w.plural} {x.text}", sql


def two_conditions(w: Writer) -> Pair:
    x = w.condition()
    y = w.condition(other_than=(x.column.name,))
    word = w.rng.choice(("and", "or"))
    where = f"{w.source} WHERE {x.sql} {word.upper()} {y.sql}"
    if w.rng.random() < 0.35:
        text = w.say(
            f"How many {w.plural} are there {x.text} {word} {y.text}", f"Count the {w.plural} {x.text} {word} {y.text}"
        )
        return text, f"SELECT count(*) FROM {where}"
    n = w.column("name")
    return f"{w.many_of(n)} of {w.plural} {x.text} {word} {y.text}", f"SELECT {n.name} FROM {where}"


def group(w: Writer) -> Pair:
    c = w.column("category")
    noun = c.singular
    text = w.say(
        f"How many {w.plural} are there for each {noun}",
        f"Show the {noun} and the number of {w.plural} for each {noun}",
        f"For each {noun}, count the {w.plural}",
        f"What is the number of {w.plural} per {noun}",
        f"Count the {w.plural} by {noun}",
    )
    return text, f"SELECT {c.name}, count(*) FROM {w.source} GROUP BY {c.name}"


def group_aggregate(w: Writer) -> Pair:
    c, n, (a, word) = w.column("category"), w.column("number"), w.aggregate()
    what, noun = f"{word} {n.singular}", c.singular
    text = w.say(
        f"{w.one()} {what} of {w.plural} for each {noun}",
        f"For each {noun}, find the {what} of {w.plural}",
        f"{w.one()} {what} of {w.plural} per {noun}",
        f"What is the {what} of the {w.plural} in each {noun}",
    )
    return text, f"SELECT {c.name}, {a}({n.name}) FROM {w.source} GROUP BY {c.name}"


def extreme(w: Writer) -> Pair:
    c, n = w.column("number"), w.column("name category")
    text, direction = w.extreme(c, w.singular)
    sql = f"SELECT {n.name} FROM {w.source} ORDER BY {c.name} {direction} LIMIT 1"
    return f"{w.one()} {n.singular} of the {text}", sql


def top(w: Writer) -> Pair:
    c, n, k = w.column("number"), w.column("name"), w.rng.choice((2, 3, 4, 5))
    text, direction = w.extreme(c, w.plural, several=True)
    sql = f"SELECT {n.name} FROM {w.source} ORDER BY {c.name} {direction} LIMIT {k}"
    return f"{w.many_of(n)} of the {k} {text}", sql


def two_aggregates(w: Writer) -> Pair:
    c, (a, b) = w.column("number"), w.rng.sample(sorted(AGGREGATES), 2)
    words = f"{w.say(*AGGREGATES[a])} and {w.say(*AGGREGATES[b])} {c.singular}"
    select = f"SELECT {a}({c.name}), {b}({c.name}) FROM {w.source}"
    if w.rng.random() < 0.5:
        return f"{w.many()} {words} of all {w.plural}", select
    x = w.condition(other_than=(c.name,))
    return f"{w.many()} {words} of {w.plural} {x.text}", f"{select} WHERE {x.sql}"


def having(w: Writer) -> Pair:
    c, k, more = w.column("category"), w.rng.choice((2, 3, 4)), w.rng.random() < 0.5
    number = w.say(f"more than {k}", f"over {k}") if more else w.say(f"at least {k}", f"{k} or more")
    noun = c.plural
    text = w.say(
        f"Which {noun} have {number} {w.plural}",
        f"{w.many()} {noun} with {number} {w.plural}",
        f"Which {noun} are shared by {number} {w.plural}",
        f"{w.many()} {noun} that {number} {w.plural} have",
    )
    return text, f"SELECT {c.name} FROM {w.source} GROUP BY {c.name} HAVING count(*) {'>' if more else '>='} {k}"


def join(w: Writer) -> Pair:
    child, link, parent = w.link()
    n, m = w.column("name", parent), w.column("name number category", child)
    text = w.say(
        f"{w.many_of(n)} of each {parent.singular} and the {m.singular} of its {child.plural}",
        f"{w.many_of(n)} of {parent.plural} together with the {m.singular} of their {child.plural}",
    )
    return text, f"SELECT {parent.name}.{n.name}, {child.name}.{m.name} FROM {join_sql(child, link, parent)}"


def join_where(w: Writer) -> Pair:
    child, link, parent = w.link()
    x, count = w.condition(parent, qualified=True), w.rng.random() < 0.3
    tail = w.say(
        f"{child.plural} of the {parent.plural} {x.text}",
        f"{child.plural} of {parent.plural} {x.text}",
        f"{child.plural} that belong to {parent.plural} {x.text}",
    )
    where = f"{join_sql(child, link, parent)} WHERE {x.sql}"
    if count:
        return f"{w.say('How many', 'Count the')} {tail}", f"SELECT count(*) FROM {where}"
    c = w.column("name number category", child)
    return f"{w.many_of(c)} of {tail}", f"SELECT {child.name}.{c.name} FROM {where}"


def join_name(w: Writer) -> Pair:
    child, link, parent = w.link()
    n, c = w.column("name", parent), w.column("name number category", child)
    v, join = w.value(n, parent), join_sql(child, link, parent)
    text = w.say(
        f"{w.many_of(c)} of the {child.plural} of the {parent.singular} named '{v}'",
        f"{w.many_of(c)} of {child.plural} of '{v}'",
        f"{w.many_of(c)} of all {child.plural} that the {parent.singular} '{v}' has",
    )
    return text, f"SELECT {child.name}.{c.name} FROM {join} WHERE {parent.name}.{n.name} = '{v}'"


def join_group(w: Writer) -> Pair:
    child, link, parent = w.link()
    n, join = w.column("name", parent), join_sql(child, link, parent)
    text = w.say(
        f"Show the {n.singular} of each {parent.singular} and the number of its {child.plural}",
        f"For each {parent.singular}, show its {n.singular} and how many {child.plural} it has",
        f"How many {child.plural} does each {parent.singular} have? Show the {n.singular} and the number",
    )
    return text, f"SELECT {parent.name}.{n.name}, count(*) FROM {join} GROUP BY {parent.name}.id"


EASY = (count, list_all, where, count_where, aggregate, aggregate_where, distinct, by_name, between, order)
MEDIUM = (
    *(like, two_columns, two_conditions, group, group_aggregate, extreme, top, two_aggregates, having),
    *(join, join_where, join_name, join_group),
)
