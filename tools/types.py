"""Types that all packages share: the steps of an agent, its result, and how the answer is read in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12


class AgentStep(TypedDict):
    """An LLM turn or a tool call of an agent."""

    agent: str
    """The name of the agent or node, such as ``write_query``."""
    kind: str
    """``llm`` or ``tool``."""
    input: str
    output: str
    ok: bool
    """False if the tool reported an error to the agent."""


class Candidate(NamedTuple):
    """A text in an agent's result that may be its answer, and the field that holds it."""

    text: str
    field: str


@dataclass(frozen=True)
class AgentResult:
    """What an agent returned: the texts that may be its answer, the likeliest first, and its steps."""

    candidates: Sequence[Candidate]
    steps: Sequence[AgentStep] = ()


class AnswerKind:
    """How the answer that is judged is read in an agent's result: the text as it is. A domain may have a kind of its
    own (:attr:`groundwire.domains.Domain.answers`).
    """

    name = "prose"
    """The name by which agents choose their prompts."""
    fields: tuple[str, ...] = ()
    """Fields of a result that may be the answer, besides the usual ones such as ``answer`` and ``output``."""

    def read(self, result: AgentResult) -> Candidate | None:
        """The answer, and where it was; None if it is not known which part of the result is the answer."""
        texts = [Candidate(text.strip(), field) for text, field in result.candidates]
        return next((candidate for candidate in texts if candidate.text), texts[0] if texts else None)

    def tried(self, steps: Sequence[AgentStep]) -> list[int]:
        """The steps whose input would have been an answer, which validation scores for the accuracy by turn."""
        return []

    def details(self, answer: str, database: str) -> str:
        """A line for people about an answer, such as the rows of a query; empty if there is nothing to add."""
        return ""


TEXT = AnswerKind()
