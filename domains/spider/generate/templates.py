"""Questions about one table.

A template returns a question and its query; it raises IndexError where the database lacks what it needs. The letter of
its name is the group of ``questions.MIX`` that it belongs to.
"""

# The queries are text for a benchmark, made of names from the lexicon; the numbers are chances.
# ruff: noqa: D103, S608

from __future__ import annotations

from groundwire.domains.spider.generate.phrasing import AGGREGATES, Pair, Writer, plural, spoken

__all__ = [
    "e_aggregate",
    "e_aggregate_where",
    "e_between",
    "e_by_name",
    "e_count",
    "e_count_where",
    "e_distinct",
    "e_list",
    "e_order",
    "e_where",
    "h_average",
    "h_both",
    "h_common",
    "h_extreme_where",
    "h_group_order",
    "m_extreme",
    "m_group",
    "m_group_aggregate",
    "m_having",
    "m_like",
    "m_top",
    "m_two_aggregates",
    "m_two_columns",
    "m_two_conditions",
    "x_average_where",
    "x_common_where",
]


def e_count(w: Writer) -> Pair:
    many = plural(w.table.name)
    text = w.say(
        *(f"How many {many} are there", f"Count the number of {many}", f"What is the number of {many}"),
        *(f"How many {many} do we have", f"Count all {many}", f"Tell me how many {many} exist"),
    )
    return text, f"SELECT count(*) FROM {w.table.name}"


def e_list(w: Writer) -> Pair:
    c, t = w.column("name number category"), w.table.name
    text = w.say(
        *(f"{w.many_of(c)} of all {plural(t)}", f"{w.many()} {plural(c.name)} of all {plural(t)}"),
        *(f"{w.many_of(c)} of every {spoken(t)}", f"What {spoken(c.name)} does each {spoken(t)} have"),
    )
    return text, f"SELECT {c.name} FROM {t}"


def e_where(w: Writer) -> Pair:
    x = w.condition()
    c, t = w.column("name number category", other_than=(x.column.name,)), w.table.name
    text = w.say(
        *(f"{w.many_of(c)} of {plural(t)} {x.text}", f"{w.many()} {plural(c.name)} of the {plural(t)} {x.text}"),
        *(f"For {plural(t)} {x.text}, what is the {spoken(c.name)}", f"{w.many_of(c)} of each {spoken(t)} {x.text}"),
    )
    return text, f"SELECT {c.name} FROM {t} WHERE {x.sql}"


def e_count_where(w: Writer) -> Pair:
    x, many = w.condition(), plural(w.table.name)
    text = w.say(
        *(f"How many {many} are there {x.text}", f"Count the {many} {x.text}", f"Find the number of {many} {x.text}"),
        *(f"What is the number of {many} {x.text}", f"How many {many} do we have {x.text}"),
    )
    return text, f"SELECT count(*) FROM {w.table.name} WHERE {x.sql}"


def e_aggregate(w: Writer) -> Pair:
    c, (a, word) = w.column("number"), w.aggregate()
    many, said = plural(w.table.name), spoken(c.name)
    text = w.say(
        f"{w.one()} {word} {said} of all {many}",
        *(f"{w.one()} {word} {said} of the {many}", f"{w.one()} {word} {said} across {many}"),
        f"For all {many}, what is the {word} {said}",
    )
    return text, f"SELECT {a}({c.name}) FROM {w.table.name}"


def e_aggregate_where(w: Writer) -> Pair:
    x = w.condition()
    c, (a, word) = w.column("number", other_than=(x.column.name,)), w.aggregate()
    text = w.say(
        f"{w.one()} {word} {spoken(c.name)} of {plural(w.table.name)} {x.text}",
        f"For {plural(w.table.name)} {x.text}, find the {word} {spoken(c.name)}",
    )
    return text, f"SELECT {a}({c.name}) FROM {w.table.name} WHERE {x.sql}"


def e_distinct(w: Writer) -> Pair:
    c, many = w.column("category"), plural(w.table.name)
    said = plural(c.name)
    if w.rng.random() < 0.4:
        text = w.say(
            *(f"How many different {said} do the {many} have", f"Count the number of distinct {said} of {many}"),
            *(
                f"How many distinct {said} are there among the {many}",
                f"What is the number of different {said} of {many}",
            ),
        )
        return text, f"SELECT count(DISTINCT {c.name}) FROM {w.table.name}"
    text = w.say(
        *(f"{w.many()} different {said} of {many}", f"{w.many()} distinct {said} of {many}"),
        *(f"{w.many()} different {said} that {many} have", f"{w.many()} {said} of {many} without repeats"),
    )
    return text, f"SELECT DISTINCT {c.name} FROM {w.table.name}"


def e_by_name(w: Writer) -> Pair:
    n, c, t = w.column("name"), w.column("number category"), spoken(w.table.name)
    v, said = w.value(n), spoken(c.name)
    text = w.say(
        *(f"What is the {said} of the {t} named '{v}'", f"Find the {said} of the {t} with {spoken(n.name)} '{v}'"),
        *(
            f"What {said} does the {t} called '{v}' have",
            f"{w.one()} {said} of '{v}'",
            f"{w.one()} {said} of the {t} {v}",
        ),
    )
    return text, f"SELECT {c.name} FROM {w.table.name} WHERE {n.name} = '{v}'"


def e_between(w: Writer) -> Pair:
    c = w.column("number")
    n = w.column("name category")
    low, high = sorted((int(w.value(c)), int(w.value(c))))
    said, many = spoken(c.name), plural(w.table.name)
    text = f"{w.many_of(n)} of {many} " + w.say(
        *(f"with {said} between {low} and {high}", f"whose {said} is between {low} and {high}"),
        f"with {said} from {low} to {high}",
    )
    return text, f"SELECT {n.name} FROM {w.table.name} WHERE {c.name} BETWEEN {low} AND {high}"


def e_order(w: Writer) -> Pair:
    a, c = w.column("name"), w.column("number")
    down, said = w.rng.random() < 0.5, spoken(c.name)
    tail = (
        w.say(
            f"in descending order of {said}",
            f"from the highest to the lowest {said}",
            f"sorted by {said} in descending order",
        )
        if down
        else w.say(
            f"in ascending order of {said}",
            f"sorted by {said}",
            f"ordered by {said}",
            f"from the lowest to the highest {said}",
        )
    )
    two, direction = w.rng.random() < 0.4, "DESC" if down else "ASC"
    what, columns = (f"{spoken(a.name)} and {said}", f"{a.name}, {c.name}") if two else (spoken(a.name), a.name)
    return (
        f"{w.many()} {what} of all {plural(w.table.name)} {tail}",
        f"SELECT {columns} FROM {w.table.name} ORDER BY {c.name} {direction}",
    )


def m_like(w: Writer) -> Pair:
    n = w.column("name")
    first, _, last = w.value(n).partition(" ")
    starts, many, said = w.rng.random() < 0.5, plural(w.table.name), spoken(n.name)
    tail = (
        w.say(f"starts with '{first}'", f"begins with '{first}'")
        if starts
        else w.say(f"contains '{last}'", f"includes '{last}'")
    )
    pattern = f"'{first}%'" if starts else f"'%{last}%'"
    if w.rng.random() < 0.4:
        return (
            f"How many {many} are there whose {said} {tail}",
            f"SELECT count(*) FROM {w.table.name} WHERE {n.name} LIKE {pattern}",
        )
    c = w.column("number category")
    return (
        f"{w.many_of(c)} of {many} whose {said} {tail}",
        f"SELECT {c.name} FROM {w.table.name} WHERE {n.name} LIKE {pattern}",
    )


def m_two_columns(w: Writer) -> Pair:
    a = w.column("name")
    b = w.column("number category")
    said = f"{spoken(a.name)} and {spoken(b.name)}"
    if w.rng.random() < 0.4:
        text = w.say(
            f"{w.many()} {said} of all {plural(w.table.name)}", f"{w.many()} {said} of each {spoken(w.table.name)}"
        )
        return text, f"SELECT {a.name}, {b.name} FROM {w.table.name}"
    x = w.condition(other_than=(b.name,))
    return (
        f"{w.many()} {said} of {plural(w.table.name)} {x.text}",
        f"SELECT {a.name}, {b.name} FROM {w.table.name} WHERE {x.sql}",
    )


def m_two_conditions(w: Writer) -> Pair:
    x = w.condition()
    y = w.condition(other_than=(x.column.name,))
    word, many = w.rng.choice(("and", "or")), plural(w.table.name)
    where = f"{w.table.name} WHERE {x.sql} {word.upper()} {y.sql}"
    if w.rng.random() < 0.35:
        text = w.say(
            f"How many {many} are there {x.text} {word} {y.text}", f"Count the {many} {x.text} {word} {y.text}"
        )
        return text, f"SELECT count(*) FROM {where}"
    n = w.column("name")
    return f"{w.many_of(n)} of {many} {x.text} {word} {y.text}", f"SELECT {n.name} FROM {where}"


def m_group(w: Writer) -> Pair:
    c, many = w.column("category"), plural(w.table.name)
    said = spoken(c.name)
    text = w.say(
        *(f"How many {many} are there for each {said}", f"Show the {said} and the number of {many} for each {said}"),
        *(
            f"For each {said}, count the {many}",
            f"What is the number of {many} per {said}",
            f"Count the {many} by {said}",
        ),
    )
    return text, f"SELECT {c.name}, count(*) FROM {w.table.name} GROUP BY {c.name}"


def m_group_aggregate(w: Writer) -> Pair:
    c, n, (a, word) = w.column("category"), w.column("number"), w.aggregate()
    what, many, said = f"{word} {spoken(n.name)}", plural(w.table.name), spoken(c.name)
    text = w.say(
        *(f"{w.one()} {what} of {many} for each {said}", f"For each {said}, find the {what} of {many}"),
        *(f"{w.one()} {what} of {many} per {said}", f"What is the {what} of the {many} in each {said}"),
    )
    return text, f"SELECT {c.name}, {a}({n.name}) FROM {w.table.name} GROUP BY {c.name}"


def m_extreme(w: Writer) -> Pair:
    c, n = w.column("number"), w.column("name category")
    text, direction = w.extreme(c, spoken(w.table.name))
    return (
        f"{w.one()} {spoken(n.name)} of the {text}",
        f"SELECT {n.name} FROM {w.table.name} ORDER BY {c.name} {direction} LIMIT 1",
    )


def m_top(w: Writer) -> Pair:
    c, n, k = w.column("number"), w.column("name"), w.rng.choice((2, 3, 4, 5))
    text, direction = w.extreme(c, plural(w.table.name), several=True)
    return (
        f"{w.many_of(n)} of the {k} {text}",
        f"SELECT {n.name} FROM {w.table.name} ORDER BY {c.name} {direction} LIMIT {k}",
    )


def m_two_aggregates(w: Writer) -> Pair:
    c, (a, b) = w.column("number"), w.rng.sample(sorted(AGGREGATES), 2)
    words = f"{w.say(*AGGREGATES[a])} and {w.say(*AGGREGATES[b])} {spoken(c.name)}"
    select = f"SELECT {a}({c.name}), {b}({c.name}) FROM {w.table.name}"
    if w.rng.random() < 0.5:
        return f"{w.many()} {words} of all {plural(w.table.name)}", select
    x = w.condition(other_than=(c.name,))
    return f"{w.many()} {words} of {plural(w.table.name)} {x.text}", f"{select} WHERE {x.sql}"


def m_having(w: Writer) -> Pair:
    c, k, more = w.column("category"), w.rng.choice((2, 3, 4)), w.rng.random() < 0.5
    number = w.say(f"more than {k}", f"over {k}") if more else w.say(f"at least {k}", f"{k} or more")
    said, many = plural(c.name), plural(w.table.name)
    text = w.say(
        *(f"Which {said} have {number} {many}", f"{w.many()} {said} with {number} {many}"),
        *(f"Which {said} are shared by {number} {many}", f"{w.many()} {said} that {number} {many} have"),
    )
    return text, f"SELECT {c.name} FROM {w.table.name} GROUP BY {c.name} HAVING count(*) {'>' if more else '>='} {k}"


def h_common(w: Writer) -> Pair:
    c, many, high = w.column("category"), plural(w.table.name), w.rng.random() < 0.7
    said, word = spoken(c.name), "most" if high else "least"
    text = w.say(
        *(f"What is the {word} common {said} of {many}", f"Which {said} has the {'most' if high else 'fewest'} {many}"),
        *(
            f"Find the {said} that the {'largest' if high else 'smallest'} number of {many} have",
            f"Which {said} is {word} common among {many}",
        ),
    )
    return (
        text,
        f"SELECT {c.name} FROM {w.table.name} GROUP BY {c.name} ORDER BY count(*) {'DESC' if high else 'ASC'} LIMIT 1",
    )


def h_extreme_where(w: Writer) -> Pair:
    x = w.condition()
    c, n = w.column("number", other_than=(x.column.name,)), w.column("name")
    text, direction = w.extreme(c, spoken(w.table.name))
    text = w.say(
        f"Among {plural(w.table.name)} {x.text}, what is the {spoken(n.name)} of the {text}",
        f"Of the {plural(w.table.name)} {x.text}, which {spoken(n.name)} belongs to the {text}",
    )
    return text, f"SELECT {n.name} FROM {w.table.name} WHERE {x.sql} ORDER BY {c.name} {direction} LIMIT 1"


def h_average(w: Writer) -> Pair:
    c, n, up = w.column("number"), w.column("name category"), w.rng.random() < 0.6
    word = (
        w.say("above", "greater than", "higher than", "more than")
        if up
        else w.say("below", "less than", "lower than", "under")
    )
    text = w.say(
        f"{w.many_of(n)} of {plural(w.table.name)} whose {spoken(c.name)} is {word} the average",
        f"{w.many_of(n)} of {plural(w.table.name)} with {spoken(c.name)} {word} average",
        f"{w.many_of(n)} of {plural(w.table.name)} whose {spoken(c.name)} is {word} the mean",
    )
    return (
        text,
        f"SELECT {n.name} FROM {w.table.name} WHERE {c.name} {'>' if up else '<'} "
        f"(SELECT avg({c.name}) FROM {w.table.name})",
    )


def h_both(w: Writer) -> Pair:
    c, k, t = w.column("category"), w.column("number"), w.table.name
    low, high = sorted((int(w.value(k)), int(w.value(k))))
    n, said, many = spoken(k.name), plural(c.name), plural(t)
    if w.rng.random() < 0.5:
        text = w.say(
            f"{w.many()} {said} of {many} with {n} above {low} but not of {many} with {n} above {high}",
            f"{w.many()} {said} of {many} whose {n} is over {low}, except those of {many} whose {n} is over {high}",
        )
        return (
            text,
            f"SELECT {c.name} FROM {t} WHERE {k.name} > {low} EXCEPT SELECT {c.name} FROM {t} WHERE {k.name} > {high}",
        )
    text = w.say(
        f"{w.many()} {said} that have both {many} with {n} above {high} and {many} with {n} below {low}",
        f"Which {said} do {many} with {n} above {high} and {many} with {n} below {low} share",
    )
    return (
        text,
        f"SELECT {c.name} FROM {t} WHERE {k.name} > {high} INTERSECT SELECT {c.name} FROM {t} WHERE {k.name} < {low}",
    )


def h_group_order(w: Writer) -> Pair:
    x = w.condition()
    c = w.column("category", other_than=(x.column.name,))
    many, said = plural(w.table.name), spoken(c.name)
    text = w.say(
        f"For each {said}, count the {many} {x.text}, in descending order of the number",
        f"How many {many} {x.text} are there for each {said}, from the most to the fewest",
    )
    return text, f"SELECT {c.name}, count(*) FROM {w.table.name} WHERE {x.sql} GROUP BY {c.name} ORDER BY count(*) DESC"


def x_average_where(w: Writer) -> Pair:
    x = w.condition()
    c, n = w.column("number", other_than=(x.column.name,)), w.column("name")
    up = w.rng.random() < 0.6
    word = w.say("above", "higher than", "over") if up else w.say("below", "lower than", "under")
    return (
        f"{w.many_of(n)} of {plural(w.table.name)} {x.text} and whose {spoken(c.name)} is {word} the average",
        f"SELECT {n.name} FROM {w.table.name} WHERE {x.sql} AND {c.name} {'>' if up else '<'} "
        f"(SELECT avg({c.name}) FROM {w.table.name})",
    )


def x_common_where(w: Writer) -> Pair:
    x = w.condition()
    c = w.column("category", other_than=(x.column.name,))
    said, many = spoken(c.name), plural(w.table.name)
    text = w.say(
        f"What is the most common {said} of {many} {x.text}",
        f"Which {said} has the most {many} {x.text}",
    )
    return text, f"SELECT {c.name} FROM {w.table.name} WHERE {x.sql} GROUP BY {c.name} ORDER BY count(*) DESC LIMIT 1"
