"""Random wording for the agents of other people, from ``wording.json``: instructions, questions, names, descriptions.

A phrase is a pattern: ``[a|b]`` is one of its alternatives, and ``{name}`` a value. Most instructions of real agents
say nothing that a toy can follow, so a part of the text is noise: sentences of common words without a meaning.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from dev.spider_data.lexicon import SYLLABLES, words

__all__ = [
    "HELD_OUT",
    "WORDING",
    "argument_name",
    "choose",
    "noise",
    "paragraph",
    "phrase",
    "random_words",
    "tool_name",
    "vocabulary",
]

WORDING: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
HELD_OUT = frozenset(
    [
        *("run_sql", "sql_engine", "sql_db_query", "sql_db_schema", "sql_db_list_tables", "sql_db_query_checker"),
        *("execute_sql", "query_database", "query_db", "run_query", "read_query", "sqlite_query", "describe_tables"),
    ]
)
"""Names of tools that no dialogue has, because they measure whether the policy understands other agents' tools."""

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_NOISE: dict[str, list[str]] = {kind: words.split() for kind, words in WORDING["noise"].items()}
_WORDS = sorted({*words(), *(word for kind in ("verbs", "nouns", "adjectives") for word in _NOISE[kind])})
_ARTICLES = ("a", "an", "the", "your", "each", "every", "any", "all", "no", "some", "this", "that")
_PATTERNS = (
    "S v a n p a n", "S v a j n", "v a n p a n g a n", "S v a n g a n", "v a j n", "a n g j", "a j n g v a n",
    "v n g n p n", "S g v a n g a n g j", "g a n g j , v a n",
)  # fmt: skip


def choose(rng: random.Random, pattern: str) -> str:
    """``pattern`` with one of the alternatives at each choice."""
    while match := _CHOICE.search(pattern):
        pattern = pattern[: match.start()] + rng.choice(match[1].split("|")) + pattern[match.end() :]
    return re.sub(r" (?=[ .,:?])|^ ", "", pattern)


def phrase(rng: random.Random, kind: str, **values: str) -> str:
    """A phrase of a ``kind``, with ``values`` in it."""
    return _fill(choose(rng, rng.choice(WORDING[kind])), values)


def _fill(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def noise(rng: random.Random) -> str:
    """A sentence of common words."""
    kinds = {"S": "starts", "v": "verbs", "n": "nouns", "j": "adjectives", "p": "preps", "g": "glue"}
    words = []
    for kind in rng.choice(_PATTERNS).split():
        if kind == "a":
            if rng.random() < 0.7:
                words.append(rng.choice(_ARTICLES))
        else:
            words.append(rng.choice(_NOISE[kinds[kind]]) if kind in kinds else kind)
        if kind == "n" and rng.random() < 0.2:
            words[-1] += "s"
    if rng.random() < 0.1:
        words = [word.upper() if rng.random() < 0.4 else word for word in words]
    text = " ".join(words).replace(" ,", ",")
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", ":", "!", "?"))


def paragraph(rng: random.Random, sentences: list[str], n_noise: int) -> str:
    """``sentences`` in order with ``n_noise`` sentences of noise between them, as lines, a list or running text."""
    for _ in range(n_noise):
        sentences.insert(rng.randint(0, len(sentences)), noise(rng))
    sentences = [sentence for sentence in sentences if sentence]
    if rng.random() < 0.1:
        return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))
    if not sentences:
        return ""
    separator = rng.choice((" ", " ", "\n", "\n- ", "\n\n", " ", "\n* "))
    return separator.lstrip("\n ") + separator.join(sentences)


def random_words(rng: random.Random, most: int) -> list[str]:
    """One to ``most`` words."""
    return [rng.choice(_WORDS) for _ in range(rng.randint(1, most))]


def tool_name(rng: random.Random, pattern: str = "") -> str:
    """The name of a tool: of the ``pattern``, or else of one that runs queries."""
    while True:
        if pattern:
            name = choose(rng, pattern)
        elif rng.random() < 0.7:  # a name has to be copied, not remembered
            name = "_".join(random_words(rng, 3))
        elif rng.random() < 0.2:
            name = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3))))
            name += rng.choice(("", "_sql", "_query", "_db"))
        else:
            name = f"{rng.choice(WORDING['run_verbs'].split())}_{rng.choice(WORDING['run_objects'].split())}"
        chance = rng.random()
        if chance < 0.12:
            name = f"{rng.choice(('sql', 'db', 'mcp', 'data', 'my', 'sqlite'))}_{name}"
        elif chance < 0.24:
            name = re.sub(r"_(\w)", lambda match: match[1].upper(), name)
        elif chance < 0.28:
            name = name.replace("_", "-")
        elif chance < 0.32:
            name = "".join(part.capitalize() for part in name.split("_"))
        if name not in HELD_OUT:
            return name


def argument_name(rng: random.Random, kind: str = "run_arguments") -> str:
    """The name of an argument or a field."""
    return "_".join(random_words(rng, 2)) if rng.random() < 0.15 else rng.choice(WORDING[kind].split())


def vocabulary() -> list[str]:
    """Every word of the wording, and with a capital: a tokenizer should have a token for each."""
    words = set(re.findall(r"[A-Za-z]{2,}", json.dumps(WORDING)))
    return sorted(words | {word.capitalize() for word in words})
