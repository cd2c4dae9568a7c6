"""Questions about the generated medicine, with their answers in prose, in English and in Chinese.

An answer says what the rows say, in whole sentences and nothing more. A question of one field is ``easy``; of two
fields, or with a yes or no that follows from one, ``medium``; about two rows, or from one table to the other, ``hard``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from groundwire.domains.medical.generate import lexicon
from groundwire.domains.medical.generate.facts import DISEASE_FIELDS, DRUG_FIELDS, Entity, Medicine
from groundwire.domains.medical.generate.lexicon import Said

__all__ = ["GeneratedQuestion", "about_disease", "about_drug"]


class GeneratedQuestion(NamedTuple):
    """A question with its gold answer."""

    text: str
    answer: str
    language: str
    hardness: str


class _Words(NamedTuple):
    """A field: ways to ask for it about ``{name}``, and how it is answered with ``{list}``, each in one language."""

    ask: tuple[str, ...]
    say: str


_EN = {
    "drug_class": _Words(
        ("What class of drug is {name}?", "To which class does {name} belong?"), "{name} is a {list}."
    ),
    "ingredients": _Words(
        ("What are the ingredients of {name}?", "What does {name} contain?"), "{name} contains {list}."
    ),
    "indications": _Words(("What is {name} used for?", "What is {name} indicated for?"), "{name} is used for {list}."),
    "dosage": _Words(("How is {name} taken?", "What is the dosage of {name}?"), "The dosage of {name} is {list}."),
    "adverse_reactions": _Words(
        ("What are the adverse reactions of {name}?", "Which side effects can {name} have?"),
        "The adverse reactions of {name} are {list}.",
    ),
    "contraindications": _Words(
        ("What are the contraindications of {name}?", "When must {name} not be taken?"),
        "{name} is contraindicated in case of {list}.",
    ),
    "interactions": _Words(
        ("Which drugs does {name} interact with?", "What should {name} not be combined with?"),
        "{name} interacts with {list}.",
    ),
    "storage": _Words(("How should {name} be stored?", "How do I store {name}?"), "{name} should be stored {list}."),
    "department": _Words(
        ("Which department treats {name}?", "Where should a patient with {name} go?"), "{name} is treated by {list}."
    ),
    "symptoms": _Words(
        ("What are the symptoms of {name}?", "How does {name} show itself?"), "The symptoms of {name} are {list}."
    ),
    "causes": _Words(("What causes {name}?", "Where does {name} come from?"), "{name} is caused by {list}."),
    "complications": _Words(
        ("What complications can {name} have?", "What can {name} lead to?"), "{name} can lead to {list}."
    ),
    "diagnosis": _Words(
        ("How is {name} diagnosed?", "Which examinations confirm {name}?"), "{name} is diagnosed with {list}."
    ),
    "treatment": _Words(("How is {name} treated?", "What helps against {name}?"), "{name} is treated with {list}."),
    "prevention": _Words(("How can {name} be prevented?", "What protects from {name}?"), "{list} can prevent {name}."),
}
_ZH = {
    "drug_class": _Words(("{name}属于哪一类药物？", "{name}是什么类别的药？"), "{name}属于{list}。"),
    "ingredients": _Words(("{name}的成分是什么？", "{name}含有哪些成分？"), "{name}的成分为{list}。"),
    "indications": _Words(("{name}用于治疗什么？", "{name}的适应症是什么？"), "{name}用于治疗{list}。"),
    "dosage": _Words(("{name}怎么服用？", "{name}的用法用量是什么？"), "{name}的用法用量为{list}。"),
    "adverse_reactions": _Words(("{name}有哪些不良反应？", "服用{name}会有什么副作用？"), "{name}的不良反应有{list}。"),
    "contraindications": _Words(("{name}有哪些禁忌？", "什么情况下不能使用{name}？"), "{name}的禁忌为{list}。"),
    "interactions": _Words(("{name}与哪些药物有相互作用？", "{name}不能与什么药同用？"), "{name}与{list}有相互作用。"),
    "storage": _Words(("{name}应如何保存？", "{name}怎样贮藏？"), "{name}应{list}。"),
    "department": _Words(("{name}应该看哪个科？", "{name}由哪个科室治疗？"), "{name}应到{list}就诊。"),
    "symptoms": _Words(("{name}有哪些症状？", "{name}有什么表现？"), "{name}的症状有{list}。"),
    "causes": _Words(("{name}的病因是什么？", "什么会引起{name}？"), "{name}由{list}引起。"),
    "complications": _Words(("{name}有哪些并发症？", "{name}可能引发什么？"), "{name}的并发症有{list}。"),
    "diagnosis": _Words(("{name}如何诊断？", "确诊{name}需要做哪些检查？"), "{name}通过{list}诊断。"),
    "treatment": _Words(("{name}如何治疗？", "得了{name}怎么办？"), "{name}的治疗方法有{list}。"),
    "prevention": _Words(("如何预防{name}？", "怎样避免得{name}？"), "预防{name}的方法有{list}。"),
}
_WORDS = {"en": _EN, "zh": _ZH}


def about_drug(rng: random.Random, drug: Entity, medicine: Medicine, language: str) -> list[GeneratedQuestion]:
    """One question of each hardness."""
    hard: Callable[..., GeneratedQuestion] = rng.choice((_shared, _either))
    other = rng.choice([each for each in medicine.drugs if each != drug])
    middle = rng.choice((_two_fields, _may_take))
    return [
        _one_field(rng, drug, DRUG_FIELDS, language),
        middle(rng, drug, DRUG_FIELDS, language),
        hard(drug, other, language),
    ]


def about_disease(rng: random.Random, disease: Entity, medicine: Medicine, language: str) -> list[GeneratedQuestion]:
    """One question of each hardness."""
    return [
        _one_field(rng, disease, DISEASE_FIELDS, language),
        _two_fields(rng, disease, DISEASE_FIELDS, language),
        _drugs_for(disease, medicine, language),
    ]


def _one_field(rng: random.Random, entity: Entity, fields: Sequence[str], language: str) -> GeneratedQuestion:
    field, name = rng.choice(fields), _of(entity.name, language)
    text = rng.choice(_WORDS[language][field].ask).format(name=name)
    return GeneratedQuestion(_sentence(text), _answer(entity, field, language, name), language, "easy")


def _two_fields(rng: random.Random, entity: Entity, fields: Sequence[str], language: str) -> GeneratedQuestion:
    (one, two), name = rng.sample(fields, 2), _of(entity.name, language)
    first = _WORDS[language][one].ask[0].format(name=name)
    answer = _answer(entity, one, language, name)
    if language == "zh":
        second = _WORDS["zh"][two].ask[0].format(name="它")
        return GeneratedQuestion(first[:-1] + "，" + second, answer + _answer(entity, two, "zh", "它"), "zh", "medium")
    second = _WORDS["en"][two].ask[0].format(name="it")
    text = f"{_sentence(first)[:-1]}, and {second[0].lower()}{second[1:]}"
    return GeneratedQuestion(text, f"{answer} {_answer(entity, two, 'en', 'it')}", "en", "medium")


def _may_take(rng: random.Random, drug: Entity, fields: Sequence[str], language: str) -> GeneratedQuestion:
    """Yes or no, with its reason."""
    against, name = drug.fields["contraindications"], _of(drug.name, language)
    barred = rng.random() < 0.5
    others = [each for each in lexicon.CONDITIONS if each not in against]
    condition = _of(rng.choice(against if barred else others), language)
    reason = _answer(drug, "contraindications", language, name)
    if language == "zh":
        verdict = "不可以" if barred else "可以，该情况不在禁忌之列"
        return GeneratedQuestion(f"{condition}的患者可以使用{name}吗？", f"{verdict}。{reason}", "zh", "medium")
    verdict = "No." if barred else f"Yes, {condition} is not among its contraindications."
    return GeneratedQuestion(f"Can {name} be taken in case of {condition}?", f"{verdict} {reason}", "en", "medium")


def _shared(drug: Entity, other: Entity, language: str) -> GeneratedQuestion:
    """What two rows have in common."""
    common = [each for each in drug.fields["adverse_reactions"] if each in other.fields["adverse_reactions"]]
    one, two, listed = _of(drug.name, language), _of(other.name, language), _list(common, language)
    if language == "zh":
        answer = f"{one}和{two}共同的不良反应有{listed}。" if common else f"{one}和{two}没有共同的不良反应。"
        return GeneratedQuestion(f"{one}和{two}有哪些共同的不良反应？", answer, "zh", "hard")
    answer = (
        f"{one} and {two} share these adverse reactions: {listed}."
        if common
        else f"{one} and {two} have no adverse reactions in common."
    )
    return GeneratedQuestion(f"Which adverse reactions do {one} and {two} share?", answer, "en", "hard")


def _either(drug: Entity, other: Entity, language: str) -> GeneratedQuestion:
    """The same field of two rows."""
    one, two = (_answer(each, "indications", language, _of(each.name, language)) for each in (drug, other))
    names = _of(drug.name, language), _of(other.name, language)
    if language == "zh":
        return GeneratedQuestion("{}和{}分别用于治疗什么？".format(*names), one + two, "zh", "hard")
    return GeneratedQuestion("What are {} and {} each used for?".format(*names), f"{one} {two}", "en", "hard")


def _drugs_for(disease: Entity, medicine: Medicine, language: str) -> GeneratedQuestion:
    """From one table to the other."""
    drugs = [drug.name for drug in medicine.drugs if disease.name in drug.fields["indications"]]
    name, listed = _of(disease.name, language), _list(sorted(drugs), language)
    if language == "zh":
        answer = f"适应症包括{name}的药物有{listed}。" if drugs else f"没有药物的适应症包括{name}。"
        return GeneratedQuestion(f"哪些药物的适应症包括{name}？", answer, "zh", "hard")
    verb = "is" if len(drugs) == 1 else "are"
    answer = f"{listed} {verb} indicated for {name}." if drugs else f"No drug is indicated for {name}."
    return GeneratedQuestion(f"Which drugs are indicated for {name}?", answer, "en", "hard")


def _answer(entity: Entity, field: str, language: str, name: str) -> str:
    return _sentence(_WORDS[language][field].say.format(name=name, list=_list(entity.fields[field], language)))


def _list(items: Sequence[Said], language: str) -> str:
    said = [_of(item, language) for item in items]
    if len(said) < 2:
        return "".join(said)
    if language == "zh":
        return "、".join(said[:-1]) + "和" + said[-1]
    return ", ".join(said[:-1]) + " and " + said[-1]


def _of(said: Said, language: str) -> str:
    return said.zh if language == "zh" else said.en


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
