"""Types that all packages share: the steps of an agent, and the form of its answer."""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = ["AgentStep", "AnswerForm"]

AnswerForm = Literal["sql", "prose"]
"""The form of an answer: a query whose rows are the answer, or sentences."""


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
