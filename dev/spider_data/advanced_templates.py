"""Templates of the hard and the extra hard questions.

A template returns a question and its query. It raises IndexError if the database lacks a column or a link that it
needs. The order of the templates and of their random choices decides which data a seed gives.
"""

# The queries are made of names from the lexicon; the numbers are probabilities.
# ruff: noqa: S608

from __future__ import annotations

from dev.spider_data.phrasing import Pair, Writer, join_sql

__all__ = ["EXTRA", "HARD"]


def common(w: Writer) -> Pair:
    c, high = w.column("category"), w.rng.random() < 0.7
    noun, word = c.singular, "most" if high else "least"
    text = w.say(
        f"What is the {word} common {noun} of {w.plural}",
        f"Which {noun} has the {'most' if high else 'fewest'} {w.plural}",
        f"Find the {noun} that the {'largest' if high else 'smallest'} number of {w.plural} have",
        f"Which {noun} is {word} common among {w.plural}",
    )
    sql = f"SELECT {c.name} FROM {w.source} GROUP BY {c.name} ORDER BY count(*) {'DESC' if high else 'ASC'} LIMIT 1"
    return text, sql


def extreme_where(w: Writer) -> Pair:
    x = w.condition()
    c, n = w.column("number", other_than=(x.column.name,)), w.column("name")
    text, direction = w.extreme(c, w.singular)
    text = w.say(
        f"Among {w.plural} {x.text}, what is the {n.singular} of the {text}",
        f"Of the {w.plural} {x.text}, which {n.singular} belongs to the {text}",
    )
    return text, f"SELECT {n.name} FROM {w.source} WHERE {x.sql} ORDER BY {c.name} {direction} LIMIT 1"


def average(w: Writer) -> Pair:
    c, n, up = w.column("number"), w.column("name category"), w.rng.random() < 0.6
    word = (
        w.say("above", "greater than", "higher than", "more than")
        if up
        else w.say("below", "less than", "lower than", "under")
    )
    text = w.say(
        f"{w.many_of(n)} of {w.plural} whose {c.singular} is {word} the average",
        f"{w.many_of(n)} of {w.plural} with {c.singular} {word} average",
        f"{w.many_of(n)} of {w.plural} whose {c.singular} is {word} the mean",
    )
    sql = f"SELECT {n.name} FROM {w.source} WHERE {c.name} {'>' if up else '<'} (SELECT avg({c.name}) FROM {w.source})"
    return text, sql


def without(w: Writer) -> Pair:
    child, link, parent = w.link()
    one, many = child.singular, child.plural
    tail = w.say(
        f"that do not have any {one}", f"without {many}", f"that have no {one}", f"that lack {many}", f"with no {many}"
    )
    inner = f"{parent.name} WHERE id NOT IN (SELECT {link.column} FROM {child.name})"
    if w.rng.random() < 0.3:
        return f"{w.say('How many', 'Count the')} {parent.plural} {tail}", f"SELECT count(*) FROM {inner}"
    n = w.column("name number category", parent)
    return f"{w.many_of(n)} of {parent.plural} {tail}", f"SELECT {n.name} FROM {inner}"


def with_condition(w: Writer) -> Pair:
    child, link, parent = w.link()
    x, n, without = w.condition(child), w.column("name", parent), w.rng.random() < 0.5
    many = f"{child.plural} {x.text}"
    tail = (
        w.say(f"without {many}", f"that do not have {many}") if without else w.say(f"that have {many}", f"with {many}")
    )
    word = "NOT IN" if without else "IN"
    sql = f"SELECT {n.name} FROM {parent.name} WHERE id {word} (SELECT {link.column} FROM {child.name} WHERE {x.sql})"
    return f"{w.many_of(n)} of {parent.plural} {tail}", sql


def both(w: Writer) -> Pair:
    c, k, t = w.column("category"), w.column("number"), w.source
    low, high = sorted((int(w.value(k)), int(w.value(k))))
    n, noun, many = k.singular, c.plural, w.plural
    if w.rng.random() < 0.5:
        text = w.say(
            f"{w.many()} {noun} of {many} with {n} above {low} but not of {many} with {n} above {high}",
            f"{w.many()} {noun} of {many} whose {n} is over {low}, except those of {many} whose {n} is over {high}",
        )
        sql = f"SELECT {c.name} FROM {t} WHERE {k.name} > {low} EXCEPT SELECT {c.name} FROM {t} WHERE {k.name} > {high}"
        return text, sql
    text = w.say(
        f"{w.many()} {noun} that have both {many} with {n} above {high} and {many} with {n} below {low}",
        f"Which {noun} do {many} with {n} above {high} and {many} with {n} below {low} share",
    )
    sql = f"SELECT {c.name} FROM {t} WHERE {k.name} > {high} INTERSECT SELECT {c.name} FROM {t} WHERE {k.name} < {low}"
    return text, sql


def group_order(w: Writer) -> Pair:
    x = w.condition()
    c = w.column("category", other_than=(x.column.name,))
    noun = c.singular
    text = w.say(
        f"For each {noun}, count the {w.plural} {x.text}, in descending order of the number",
        f"How many {w.plural} {x.text} are there for each {noun}, from the most to the fewest",
    )
    return text, f"SELECT {c.name}, count(*) FROM {w.source} WHERE {x.sql} GROUP BY {c.name} ORDER BY count(*) DESC"


def most(w: Writer) -> Pair:
    child, link, parent = w.link()
    n, high = w.column("name category number", parent), w.rng.random() < 0.75
    word = "most" if high else "fewest"
    tail = w.say(
        f"with the {word} {child.plural}",
        f"that has the {word} {child.plural}",
        f"with the {'largest' if high else 'smallest'} number of {child.plural}",
    )
    return (
        f"{w.one()} {n.singular} of the {parent.singular} {tail}",
        f"SELECT {parent.name}.{n.name} FROM {join_sql(child, link, parent)} GROUP BY {parent.name}.id "
        f"ORDER BY count(*) {'DESC' if high else 'ASC'} LIMIT 1",
    )


def join_extreme(w: Writer) -> Pair:
    child, link, parent = w.link()
    x, c, n = w.condition(parent, qualified=True), w.column("number", child), w.column("name", child)
    text, direction = w.extreme(c, child.singular)
    return (
        f"Among {child.plural} of {parent.plural} {x.text}, {w.say('what is the', 'find the')} "
        f"{n.singular} of the {text}",
        f"SELECT {child.name}.{n.name} FROM {join_sql(child, link, parent)} WHERE {x.sql} "
        f"ORDER BY {child.name}.{c.name} {direction} LIMIT 1",
    )


def without_where(w: Writer) -> Pair:
    child, link, parent = w.link()
    x, n = w.condition(parent), w.column("name", parent)
    tail = w.say(
        f"that do not have any {child.singular}",
        f"without {child.plural}",
        f"that have no {child.singular}",
    )
    sql = f"SELECT {n.name} FROM {parent.name} WHERE {x.sql} AND id NOT IN (SELECT {link.column} FROM {child.name})"
    return f"{w.many_of(n)} of {parent.plural} {x.text} {w.say('and', 'but')} {tail}", sql


def average_where(w: Writer) -> Pair:
    x = w.condition()
    c, n = w.column("number", other_than=(x.column.name,)), w.column("name")
    up = w.rng.random() < 0.6
    word = w.say("above", "higher than", "over") if up else w.say("below", "lower than", "under")
    return (
        f"{w.many_of(n)} of {w.plural} {x.text} and whose {c.singular} is {word} the average",
        f"SELECT {n.name} FROM {w.source} WHERE {x.sql} AND {c.name} {'>' if up else '<'} "
        f"(SELECT avg({c.name}) FROM {w.source})",
    )


def common_where(w: Writer) -> Pair:
    x = w.condition()
    c = w.column("category", other_than=(x.column.name,))
    noun = c.singular
    text = w.say(
        f"What is the most common {noun} of {w.plural} {x.text}",
        f"Which {noun} has the most {w.plural} {x.text}",
    )
    return text, f"SELECT {c.name} FROM {w.source} WHERE {x.sql} GROUP BY {c.name} ORDER BY count(*) DESC LIMIT 1"


HARD = (common, extreme_where, average, without, with_condition, both, group_order)
EXTRA = (most, join_extreme, without_where, average_where, common_where)
