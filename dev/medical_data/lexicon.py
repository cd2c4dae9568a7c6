"""The vocabulary of the generated medicine, from ``lexicon.json``: each phrase in English and in Chinese.

Names are invented on purpose: no real drug, ingredient or disease. They are made of syllables that have one Chinese
character each, so a drug has the same name in both languages. Symptoms (``dizziness``) are ordinary words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LANGUAGES", "PHRASES", "QUESTIONS", "Phrase", "QuestionForm"]

LANGUAGES = ("en", "zh")


class Phrase(NamedTuple):
    """A phrase in both languages."""

    en: str
    zh: str

    def text(self, language: str) -> str:
        """The phrase in ``en`` or ``zh``."""
        return self.zh if language == "zh" else self.en


class QuestionForm(NamedTuple):
    """How one language asks for a field of ``{name}``, in several ways, and states its ``{list}``."""

    questions: list[str]
    answer: str


_JSON: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
QUESTIONS: dict[str, dict[str, QuestionForm]] = {
    language: {field: QuestionForm(*form) for field, form in _JSON.pop(f"questions_{language}").items()}
    for language in LANGUAGES
}
"""Language, then field of a drug or disease, to the form of its questions."""
PHRASES: dict[str, tuple[Phrase, ...]] = {name: tuple(Phrase(*pair) for pair in pairs) for name, pairs in _JSON.items()}
