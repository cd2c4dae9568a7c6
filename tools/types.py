"""Types that every room shares: what an agent's trace is made of, and what its answer should be."""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = ["AgentStep", "AnswerForm"]

AnswerForm = Literal["sql", "prose"]
"""What answers a question: the query whose rows are the answer, or sentences that say it."""


class AgentStep(TypedDict):
    """One thing the agent did: an LLM turn or a tool run, in order."""

    agent: str
    """The node or agent that acted: ``write_query``."""
    kind: str
    """``llm`` or ``tool``."""
    input: str
    output: str
    ok: bool
    """False when the tool reported an error to the agent."""
