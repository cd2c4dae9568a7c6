"""Invented drugs and diseases, and the database that describes them.

Each drug and disease belongs to one split, as do the drugs and diseases that its row mentions: no name of a validation
question is in a training question or answer. Symptoms, measures and ingredients are common to both.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dev.medical_data.lexicon import LANGUAGES, PHRASES, Phrase

__all__ = ["DISEASE_FIELDS", "DRUG_FIELDS", "Entity", "Medicine", "make_medicine", "write"]

DRUG_FIELDS = (
    *("drug_class", "ingredients", "indications", "dosage", "adverse_reactions", "contraindications"),
    *("interactions", "storage"),
)
DISEASE_FIELDS = ("department", "symptoms", "causes", "complications", "diagnosis", "treatment", "prevention")
_SIZES = {"train": (90, 48), "validation": (30, 16)}
"""How many drugs and diseases each split has."""


@dataclass(frozen=True)
class Entity:
    """A drug or a disease: its name, and the values of each field of its table."""

    name: Phrase
    fields: dict[str, tuple[Phrase, ...]]


@dataclass(frozen=True)
class Medicine:
    """The drugs and diseases of one split."""

    drugs: list[Entity]
    diseases: list[Entity]


def make_medicine(rng: random.Random) -> dict[str, Medicine]:
    """The drugs and diseases of each split."""
    drug_names = iter(_invent_names(rng, PHRASES["drug_endings"], sum(drugs for drugs, _ in _SIZES.values())))
    ingredients = _invent_names(rng, PHRASES["ingredient_endings"], 60)
    all_diseases = [
        Phrase(f"{image.en} {ailment.en}", f"{image.zh}{ailment.zh}")
        for image, ailment in itertools.product(PHRASES["images"], PHRASES["ailments"])
    ]
    disease_names = iter(rng.sample(all_diseases, sum(diseases for _, diseases in _SIZES.values())))
    return {
        split: _split(rng, list(itertools.islice(drug_names, n)), list(itertools.islice(disease_names, m)), ingredients)
        for split, (n, m) in _SIZES.items()
    }


def _invent_names(rng: random.Random, endings: Sequence[Phrase], count: int) -> list[Phrase]:
    stems = list(itertools.product(PHRASES["syllables"], repeat=2))
    made = []
    for number, stem in enumerate(rng.sample(stems, count)):  # each stem once, so that no two names are similar
        ending = endings[number % len(endings)]
        name = "".join(part.en for part in stem) + ending.en
        made.append(Phrase(name.capitalize(), "".join(part.zh for part in stem) + ending.zh))
    return made


def _split(
    rng: random.Random, drug_names: Sequence[Phrase], disease_names: Sequence[Phrase], ingredients: Sequence[Phrase]
) -> Medicine:
    treats = {name: tuple(rng.sample(disease_names, rng.choice((1, 1, 2)))) for name in drug_names}
    drugs = []
    for name in drug_names:
        others = [other for other in drug_names if other != name]
        fields = {
            "drug_class": (rng.choice(PHRASES["classes"]),),
            "ingredients": tuple(rng.sample(ingredients, rng.choice((1, 2, 2, 3)))),
            "indications": treats[name],
            "dosage": (rng.choice(PHRASES["dosages"]),),
            "adverse_reactions": tuple(rng.sample(PHRASES["symptoms"], rng.choice((2, 3, 3, 4)))),
            "contraindications": tuple(rng.sample(PHRASES["conditions"], rng.choice((1, 2, 3)))),
            "interactions": tuple(rng.sample(others, rng.choice((1, 2)))),
            "storage": (rng.choice(PHRASES["storages"]),),
        }
        drugs.append(Entity(name, fields))
    diseases = []
    for name in disease_names:
        treating = tuple(drug for drug, treated in treats.items() if name in treated)
        symptoms = rng.sample(PHRASES["symptoms"], 6)
        fields = {
            "department": (rng.choice(PHRASES["departments"]),),
            "symptoms": tuple(symptoms[: rng.choice((2, 3, 4))]),
            "causes": tuple(rng.sample(PHRASES["causes"], rng.choice((1, 2)))),
            "complications": tuple(symptoms[4 : 4 + rng.choice((1, 2))]),
            "diagnosis": tuple(rng.sample(PHRASES["diagnoses"], rng.choice((1, 2, 2)))),
            "treatment": (*treating[:2], *rng.sample(PHRASES["measures"], rng.choice((1, 2)))),
            "prevention": tuple(rng.sample(PHRASES["preventions"], rng.choice((1, 2)))),
        }
        diseases.append(Entity(name, fields))
    return Medicine(drugs, diseases)


def _column(items: Iterable[Phrase], language: str) -> str:
    return ("、" if language == "zh" else ", ").join(item.text(language) for item in items)


def write(medicine: Iterable[Medicine], path: Path) -> None:
    """Write the SQLite file: ``drugs_info`` and ``disease``, with a row for each language."""
    splits = list(medicine)
    drugs = [drug for split in splits for drug in split.drugs]
    diseases = [disease for split in splits for disease in split.diseases]
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    for table, fields, entities in (("drugs_info", DRUG_FIELDS, drugs), ("disease", DISEASE_FIELDS, diseases)):
        columns = ("id", "language", "name", *fields)
        connection.execute(
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {', '.join(f'{column} TEXT' for column in columns[1:])})"
        )
        rows = [
            (language, entity.name.text(language), *(_column(entity.fields[field], language) for field in fields))
            for entity in sorted(entities, key=lambda entity: entity.name)
            for language in LANGUAGES
        ]
        connection.executemany(
            f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})",  # noqa: S608 - names of ours
            [(number, *row) for number, row in enumerate(rows, 1)],
        )
    connection.commit()
    connection.execute("VACUUM")
    connection.close()
