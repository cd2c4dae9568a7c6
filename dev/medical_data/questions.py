"""Questions about the generated medicine with their answers in prose, in English and in Chinese.

An answer states what the rows contain, in whole sentences and nothing more. A question about one field is ``easy``; one
about two fields, or with a yes or no, is ``medium``; one about two rows or both tables is ``hard``. With each question
comes the query that reads the rows of its answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dev.medical_data.facts import DISEASE_FIELDS, DRUG_FIELDS, Entity, Medicine
from dev.medical_data.lexicon import PHRASES, QUESTIONS, Phrase

__all__ = ["GeneratedQuestion", "about_disease", "about_drug"]

Triple = tuple[str, str, str]
"""A question, its answer, and the query that reads the rows of the answer."""


class GeneratedQuestion(NamedTuple):
    """A question with its gold answer, and the query that reads what the answer states."""

    text: str
    answer: str
    sql: str
    language: str
    hardness: str


def about_drug(rng: random.Random, drug: Entity, medicine: Medicine, language: str) -> list[GeneratedQuestion]:
    """One question of each hardness."""
    hard: Callable[..., Triple] = rng.choice((_shared, _either))
    other = rng.choice([each for each in medicine.drugs if each != drug])
    medium = rng.choice((_two_fields, _may_take))
    return _by_hardness(
        language,
        _one_field(rng, drug, DRUG_FIELDS, language),
        medium(rng, drug, DRUG_FIELDS, language),
        hard(drug, other, language),
    )


def about_disease(rng: random.Random, disease: Entity, medicine: Medicine, language: str) -> list[GeneratedQuestion]:
    """One question of each hardness."""
    return _by_hardness(
        language,
        _one_field(rng, disease, DISEASE_FIELDS, language),
        _two_fields(rng, disease, DISEASE_FIELDS, language),
        _drugs_for(disease, medicine, language),
    )


def _by_hardness(language: str, *triples: Triple) -> list[GeneratedQuestion]:
    levels = ("easy", "medium", "hard")
    return [GeneratedQuestion(*triple, language, level) for triple, level in zip(triples, levels, strict=True)]


def _one_field(rng: random.Random, entity: Entity, fields: Sequence[str], language: str) -> Triple:
    field, name = rng.choice(fields), entity.name.text(language)
    text = rng.choice(QUESTIONS[language][field].questions).format(name=name)
    return _capitalized(text), _answer(entity, field, language, name), _select((field,), name)


def _two_fields(rng: random.Random, entity: Entity, fields: Sequence[str], language: str) -> Triple:
    (one, two), name = rng.sample(fields, 2), entity.name.text(language)
    first = QUESTIONS[language][one].questions[0].format(name=name)
    answer, sql = _answer(entity, one, language, name), _select((one, two), name)
    if language == "zh":
        second = QUESTIONS["zh"][two].questions[0].format(name="它")
        return first[:-1] + "，" + second, answer + _answer(entity, two, "zh", "它"), sql
    second = QUESTIONS["en"][two].questions[0].format(name="it")
    text = f"{_capitalized(first)[:-1]}, and {second[0].lower()}{second[1:]}"
    return text, f"{answer} {_answer(entity, two, 'en', 'it')}", sql


def _may_take(rng: random.Random, drug: Entity, fields: Sequence[str], language: str) -> Triple:
    """Yes or no, with the reason."""
    contraindications, name = drug.fields["contraindications"], drug.name.text(language)
    forbidden = rng.random() < 0.5
    others = [each for each in PHRASES["conditions"] if each not in contraindications]
    condition = rng.choice(contraindications if forbidden else others).text(language)
    reason, sql = _answer(drug, "contraindications", language, name), _select(("contraindications",), name)
    if language == "zh":
        verdict = "不可以" if forbidden else "可以，该情况不在禁忌之列"
        return f"{condition}的患者可以使用{name}吗？", f"{verdict}。{reason}", sql
    verdict = "No." if forbidden else f"Yes, {condition} is not among its contraindications."
    return f"Can {name} be taken in case of {condition}?", f"{verdict} {reason}", sql


def _shared(drug: Entity, other: Entity, language: str) -> Triple:
    """The values that two rows have in common."""
    common = [each for each in drug.fields["adverse_reactions"] if each in other.fields["adverse_reactions"]]
    one, two, listed = drug.name.text(language), other.name.text(language), _list(common, language)
    sql = _select(("name", "adverse_reactions"), one, two)
    if language == "zh":
        answer = f"{one}和{two}共同的不良反应有{listed}。" if common else f"{one}和{two}没有共同的不良反应。"
        return f"{one}和{two}有哪些共同的不良反应？", answer, sql
    shared, none = f"share these adverse reactions: {listed}.", "have no adverse reactions in common."
    return f"Which adverse reactions do {one} and {two} share?", f"{one} and {two} {shared if common else none}", sql


def _either(drug: Entity, other: Entity, language: str) -> Triple:
    """The same field of two rows."""
    one, two = drug.name.text(language), other.name.text(language)
    answers = [_answer(drug, "indications", language, one), _answer(other, "indications", language, two)]
    sql = _select(("name", "indications"), one, two)
    if language == "zh":
        return f"{one}和{two}分别用于治疗什么？", "".join(answers), sql
    return f"What are {one} and {two} each used for?", " ".join(answers), sql


def _drugs_for(disease: Entity, medicine: Medicine, language: str) -> Triple:
    """From one table to the other."""
    drugs = [drug.name for drug in medicine.drugs if disease.name in drug.fields["indications"]]
    name, listed = disease.name.text(language), _list(sorted(drugs), language)
    sql = f"SELECT name FROM drugs_info WHERE indications LIKE '%{name}%'"  # noqa: S608 - names of ours
    if language == "zh":
        answer = f"适应症包括{name}的药物有{listed}。" if drugs else f"没有药物的适应症包括{name}。"
        return f"哪些药物的适应症包括{name}？", answer, sql
    verb = "is" if len(drugs) == 1 else "are"
    answer = f"{listed} {verb} indicated for {name}." if drugs else f"No drug is indicated for {name}."
    return f"Which drugs are indicated for {name}?", answer, sql


def _answer(entity: Entity, field: str, language: str, name: str) -> str:
    items = _list(entity.fields[field], language)
    return _capitalized(QUESTIONS[language][field].answer.format(name=name, list=items))


def _select(fields: Sequence[str], *names: str) -> str:
    """The query that reads ``fields`` of the drugs or the disease with these names."""
    table = "drugs_info" if fields[-1] in DRUG_FIELDS else "disease"
    quoted = ", ".join(f"'{name}'" for name in names)
    condition = f"name = {quoted}" if len(names) == 1 else f"name IN ({quoted})"
    return f"SELECT {', '.join(fields)} FROM {table} WHERE {condition}"  # noqa: S608 - names of ours


def _list(phrases: Sequence[Phrase], language: str) -> str:
    texts = [phrase.text(language) for phrase in phrases]
    if len(texts) < 2:
        return "".join(texts)
    comma, conjunction = ("、", "和") if language == "zh" else (", ", " and ")
    return comma.join(texts[:-1]) + conjunction + texts[-1]


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]
