"""The vocabulary of the generated databases, from ``lexicon.json``: subjects, entities, attributes and their values.

An entity has a one-letter kind, which decides the attributes that suit it: ``p`` a person or an animal, ``l`` a place,
``t`` a thing, ``e`` an event, ``o`` an organisation. No name is an SQL keyword, so none is ever quoted. Nouns with an
irregular plural are left out, as a policy of a million parameters has more important things to learn.

No training database is about one of the new subjects.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "ADJECTIVES",
    "CATEGORIES",
    "FAMILIAR_SUBJECTS",
    "FIRST_NAMES",
    "LAST_NAMES",
    "MODIFIERS",
    "NEW_SUBJECTS",
    "NUMBERS",
    "PHRASINGS",
    "SUBJECTS",
    "SYLLABLES",
    "THINGS",
    "Category",
    "Number",
    "words",
]


class Number(NamedTuple):
    """A numeric attribute: its range, the kinds of entity that it suits, and its adjectives if it has any."""

    low: int
    high: int
    kinds: str
    most: str = ""
    least: str = ""
    more: str = ""
    less: str = ""


class Category(NamedTuple):
    """An attribute with few values: the kinds of entity that it suits, and the values."""

    kinds: str
    values: list[str]


_JSON: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())

SUBJECTS: dict[str, dict[str, str]] = {
    subject: dict(entity.split("/") for entity in entities.split()) for subject, entities in _JSON["subjects"].items()
}
"""Subject to its entities, each with its kind."""
NEW_SUBJECTS = tuple(_JSON["new_subjects"].split())
FAMILIAR_SUBJECTS = tuple(subject for subject in SUBJECTS if subject not in NEW_SUBJECTS)
NUMBERS = {name: Number(*number) for name, number in _JSON["numbers"].items()}
CATEGORIES = {name: Category(kinds, values.split()) for name, (kinds, values) in _JSON["categories"].items()}
MODIFIERS: dict[str, list[str]] = {kind: _JSON[f"{kind}_modifiers"].split() for kind in ("number", "category")}
"""Words before an attribute: ``annual_salary``, ``home_city``."""
FIRST_NAMES: list[str] = _JSON["first_names"].split()
LAST_NAMES: list[str] = _JSON["last_names"].split()
ADJECTIVES: list[str] = _JSON["adjectives"].split()
THINGS: list[str] = _JSON["things"].split()
SYLLABLES: list[str] = _JSON["syllables"].split()
PHRASINGS: dict[str, list[str]] = _JSON["phrasings"]
"""Openings of a question, and conditions on a column by operator; the plainest phrasing first."""


def words() -> list[str]:
    """Every word of every name and value, sorted: a tokenizer should have a token for each."""
    names = [entity for entities in SUBJECTS.values() for entity in entities]
    names += [*NUMBERS, *CATEGORIES, *FIRST_NAMES, *LAST_NAMES, *ADJECTIVES, *THINGS]
    names += [name for group in MODIFIERS.values() for name in group]
    names += [value for category in CATEGORIES.values() for value in category.values]
    return sorted({word for name in names for word in name.split("_")})
