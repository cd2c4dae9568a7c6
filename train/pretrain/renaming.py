"""Other names for a schema's words, the same in schema, question, query and result."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence

from groundwire.domains import Task
from groundwire.domains.spider.generate.lexicon import SYLLABLES
from groundwire.domains.spider.generate.phrasing import plural
from groundwire.tools.schema import RESERVED
from groundwire.train.pretrain.golds import FUNCTIONS, KEYWORDS
from groundwire.train.pretrain.schemas import schema_of

__all__ = ["KEPT", "WORD", "Renaming", "names"]

_WORDS = (1, 1, 1, 2, 2, 3)
"""How many words stand for one."""
_MADE_UP = 0.25
"""Share of the other names that are no words: what the vocabulary lacks has to be copied piece by piece."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_ASKING = frozenset(
    [
        *("above", "all", "average", "below", "different", "each", "equal", "ever", "fewest", "find", "give"),
        *("highest", "how", "largest", "least", "less", "list", "lowest", "maximum", "mean", "minimum", "most"),
        *("number", "return", "show", "smallest", "sorted", "than", "that", "the", "their", "there", "total"),
        *("what", "which", "whose", "with"),
    ]
)
KEPT = RESERVED | KEYWORDS | FUNCTIONS | _ASKING
KEPT |= {"blob", "column", "error", "int", "more", "no", "of", "real", "row", "such", "syntax", "text"}
KEPT |= {"id", "name", "t"}
"""Words that keep their meaning: those of SQL and its errors, those that say what is asked, and what stands in every
schema or numbers an alias."""


def names(tasks: Sequence[Task]) -> list[str]:
    """The words of the tasks' schemas, sorted, in lower case and without a plural's s."""
    schemas = {str(task["db_path"]): None for task in tasks}
    return sorted({_stem(word) for path in schemas for word in WORD.findall(schema_of(path))} - KEPT)


class Renaming:
    """Other words for some of the schema's words, the same everywhere, in the case and number that was there.

    Some are two or three: ``pet`` becomes ``river stone`` in a question and ``river_stone`` in a query. Copying names
    of several words is what goes wrong most in databases that were never read.
    """

    def __init__(self, rng: random.Random, schema: str, pool: Sequence[str], tasks: Sequence[Task]) -> None:
        kept = _meant(tasks)
        stems = sorted({_stem(word) for word in WORD.findall(schema)} - KEPT - kept)
        share = rng.choice((0.3, 0.6, 1.0))
        taken = {*stems, *kept, *KEPT}

        def another() -> str:
            while True:
                word = _made_up(rng) if not pool or rng.random() < _MADE_UP else rng.choice(pool)
                if word not in taken:
                    taken.add(word)
                    return word

        self._new = {stem: [another() for _ in range(rng.choice(_WORDS))] for stem in stems if rng.random() < share}

    def prose(self, text: str) -> str:
        """A question, or a value."""
        return WORD.sub(lambda found: self._put(found[0], " "), text)

    def sql(self, text: str) -> str:
        """A schema, a query, or what came of one."""
        parts = re.split(r"('[^']*')", text)
        return "".join(
            self.prose(part) if number % 2 else WORD.sub(lambda found: self._put(found[0], "_"), part)
            for number, part in enumerate(parts)
        )

    def _put(self, word: str, joint: str) -> str:
        words = self._new.get(_stem(word))
        if words is None:
            return word
        if word.lower() != _stem(word):
            words = [*words[:-1], plural(words[-1])]
        if word.isupper() and len(word) > 1:
            words = [each.upper() for each in words]
        elif word[0].isupper():
            words = [each.title() for each in words]
        return joint.join(words)


def _meant(tasks: Sequence[Task]) -> set[str]:
    """Words of the golds that their questions do not say: to know them takes their meaning, so they keep it."""
    meant = set[str]()
    for task in tasks:
        asked, answered = (set(map(_stem, WORD.findall(str(task[key])))) for key in ("question", "query"))
        meant |= answered - asked
    return meant


@functools.lru_cache(maxsize=50_000)
def _stem(word: str) -> str:
    """In lower case, and without the plural's s."""
    low = word.lower()
    if len(low) > 4 and low.endswith("ies"):
        return low[:-3] + "y"
    return low[:-1] if len(low) > 3 and low.endswith("s") and not low.endswith(("ss", "us", "is")) else low


def _made_up(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3))))
