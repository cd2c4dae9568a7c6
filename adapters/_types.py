"""What a backend is: it is given a question and an endpoint, and answers.

The gold answer is not here on purpose. A backend sees a :class:`Question`, which has no field for it, so no agent can
read it, print it, or learn to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

from groundwire.tools.types import AgentStep, AnswerForm

__all__ = [
    "AGENT_HEADER",
    "AgentError",
    "Answer",
    "Backend",
    "BackendError",
    "Endpoint",
    "EndpointError",
    "PromptTooLongError",
    "Question",
    "Stoppable",
    "ToolError",
]

AGENT_HEADER = "x-agent-name"
"""The request header that names the agent or node behind a call; ``agent_match`` reads it."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What an agent may know of a task."""

    id: str
    text: str
    database: str
    """Path of the SQLite file (empty for a domain without one)."""
    form: AnswerForm = "sql"
    """What the answer should be: the query, or sentences."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the agent's model is: any OpenAI client works with it unchanged.

    ``base_url`` ends in ``/v1`` and carries the rollout and attempt, so calls are traced with no code change;
    ``agent_headers`` adds the one thing that a URL cannot carry, the name of the node that calls.
    """

    base_url: str
    model: str
    api_key: str = "none"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """OpenAI request parameters: ``temperature``, ``top_p``, ``max_tokens``, ``seed``, ``stop``."""

    def agent_headers(self, agent: str) -> dict[str, str]:
        """Headers that name the calling agent: ours, and W3C baggage for clients that propagate it."""
        return {AGENT_HEADER: agent, "baggage": f"agent={quote(agent)}"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the agent came back with, and what it did on the way."""

    text: str
    """The answer that is judged: the final query, or sentences, as the question's ``form`` says."""
    steps: list[AgentStep] = field(default_factory=list)


class BackendError(Exception):
    """The root of what a rollout may raise; each subclass is one boundary, and one type of failure in the metrics.

    BackendError
    ├── AgentError      the agent's own code or framework
    ├── ToolError       a tool that broke (not one that reported bad input to the model)
    └── EndpointError   the LLM call: refused, timed out, not reachable
        └── PromptTooLongError   the prompt does not fit the model; trying again cannot help
    """

    kind = "backend"


class AgentError(BackendError):
    """The agent's own code raised."""

    kind = "agent"


class ToolError(BackendError):
    """A tool broke: the database is gone or damaged."""

    kind = "tool"


class EndpointError(BackendError):
    """The model could not be reached or refused the request. ``status`` is the HTTP status, or None."""

    kind = "endpoint"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PromptTooLongError(EndpointError):
    """The prompt is longer than the model's context."""

    kind = "prompt_too_long"


@runtime_checkable
class Backend(Protocol):
    """An agent framework. ``agents`` are the names that ``agent_match`` can select; none where only the run tells."""

    agents: tuple[str, ...]

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`BackendError`; many calls run at once on one event loop."""
        ...


@runtime_checkable
class Stoppable(Protocol):
    """What a backend may be besides: one that holds connections or processes, and lets go of them."""

    async def stop(self) -> None:
        """Called once, after the last rollout and on the same event loop."""
        ...
