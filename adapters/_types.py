"""The contract of a backend: it gets a question and an endpoint, and answers.

A :class:`Question` has no field for the gold answer, so no agent can see it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from groundwire.tools.text import valid_texts
from groundwire.tools.types import TEXT, AgentStep, AnswerKind

AGENT_HEADER = "x-agent-name"
"""The request header that names the agent or node behind a call, percent-encoded; ``agent_match`` reads it."""
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


_MAX_NAME = 200


def quoted_name(agent: str, safe: str = _PRINTABLE) -> str:
    """The value of :data:`AGENT_HEADER`: headers hold ASCII only, have no space at an end, and are not long. Names in
    ASCII stay as they are.
    """
    return quote(valid_texts(agent).strip()[:_MAX_NAME].strip(), safe=safe)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The part of a task that an agent may see."""

    id: str
    text: str
    database: str
    """Path of the SQLite file (empty for a domain without one)."""
    answers: AnswerKind = TEXT
    """How the answer is read in what the agent returns, as the task's domain says."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The task's other columns, without those that hold its gold answer."""

    @property
    def form(self) -> str:
        """The form of the answer, ``sql`` or ``prose``."""
        return self.answers.name


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of the agent's model, for any OpenAI client.

    ``base_url`` ends in ``/v1`` and contains the rollout and attempt, so calls are traced without code changes.
    ``agent_headers`` adds the name of the calling agent or node.
    """

    base_url: str
    model: str
    api_key: str = "none"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """OpenAI request parameters: ``temperature``, ``top_p``, ``max_tokens``, ``seed``, ``stop``."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Named prompts that the run gives the agent: ``endpoint.prompts.get("instructions", MY_OWN)``."""

    def agent_headers(self, agent: str) -> dict[str, str]:
        """Headers with the agent's name: :data:`AGENT_HEADER`, and W3C baggage for clients that propagate it."""
        return {AGENT_HEADER: quoted_name(agent), "baggage": f"agent={quoted_name(agent, safe='')}"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The agent's answer and its steps, in valid Unicode."""

    text: str
    """The answer to be judged: the final query or prose, according to the question's ``form``."""
    steps: list[AgentStep] = field(default_factory=list)
    judged_field: str = ""
    """The field of the agent's result that holds the text, if it was found by its name."""
    input: str = ""
    """How the agent was called, in one line."""
    no_call: str = ""
    """What is known of an agent that made no LLM call that was traced."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, valid_texts(value))


class BackendError(Exception):
    """A failed rollout. Each subclass is one cause, and one type of failure in the metrics."""

    kind = "backend"
    steps: Sequence[AgentStep] = ()
    """The agent's steps before the failure, as far as they are known."""
    input: str = ""
    """How the agent was called, in one line."""
    resources: Collection[str] = ()
    """The hosts, files and commands that failed, as far as they are known: the policy may have made them up."""


class AgentError(BackendError):
    """The agent's own code raised."""

    kind = "agent"


class MalformedOutputError(AgentError):
    """The agent cannot use a reply: not the required JSON, type or format, or cut off."""

    kind = "malformed_output"


class TurnLimitError(AgentError):
    """The agent ended at its limit of turns, steps or recursions."""

    kind = "turn_limit"


class AgentSetupError(BackendError):
    """The agent raised before its first LLM call, or cannot be called or judged as the run is set up. Never a score."""

    kind = "setup"


class ToolError(BackendError):
    """A tool is broken, or what it runs on: a database, the network, the operating system, a server."""

    kind = "tool"


class EmittedRewardError(BackendError):
    """The agent emitted a reward that is none: text, not finite, or too large."""

    kind = "reward"


class TraceLimitError(BackendError):
    """The attempt has more spans than its run allows."""

    kind = "trace_limit"


class TimeLimitError(BackendError):
    """The agent did not end in time, and it was not the policy that kept it."""

    kind = "timeout"


class EndpointError(BackendError):
    """The model was unreachable or refused the request. ``status`` is the HTTP status, or None."""

    kind = "endpoint"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PromptTooLongError(EndpointError):
    """The prompt is longer than the model's context."""

    kind = "prompt_too_long"


class Backend:
    """What runs agents: a base class, whose attributes and methods a backend overrides as it needs.

    :meth:`run` is the least. An object with it, which derives from nothing, is a backend as well (:func:`as_backend`).
    """

    agents: tuple[str, ...] = ()
    """The names that ``agent_match`` can select; empty if unknown in advance."""
    reads_only = False
    """Whether its agents change nothing, and so get the task's database itself, in place of a private copy."""
    calls_tools = False
    """Whether its requests have tools. A model that cannot see tools is then refused at the start of a run."""
    threaded = False
    """Whether each rollout runs in a thread, which cannot be interrupted."""
    environment_note = ""
    """A line about the keys of our environment that its agents do not get, or that cannot be hidden from them."""
    first_prompt: Callable[[Question, Mapping[str, str]], str] | None = None
    """If it is known before a rollout: the text of the first request, with the run's prompts. A run is refused at its
    start if none fits into the model's context.
    """

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`BackendError`; many calls run at once on one event loop."""
        raise NotImplementedError(f"the backend {type(self).__name__!r} has no method run(question, endpoint)")

    def place(self) -> AbstractAsyncContextManager[None]:
        """What a rollout waits for before its time begins, and has until its end. May raise a :class:`BackendError`."""
        return nullcontext()

    def at_once(self, wanted: int) -> tuple[int, str]:
        """How many rollouts can run at once, at most ``wanted``, and why no more. Others stay in the queue."""
        return wanted, ""

    async def stop(self) -> None:
        """Close connections and processes: called once, after the last rollout and on the same event loop."""

    def describe_call(self, question: Question) -> str:
        """How the agent is called. Raises ``ValueError`` if it cannot be, or if its answer cannot be judged."""
        return ""

    def default_prompts(self, form: str) -> dict[str, str]:
        """The named prompts that a run can replace, for answers of the form ``sql`` or ``prose``."""
        return {}


_HOOKS = [name for name in (*vars(Backend), *Backend.__annotations__) if not name.startswith("_")]


def is_backend(value: Any) -> bool:
    """Whether ``value`` is a backend, if only by its attributes."""
    return isinstance(value, Backend) or (hasattr(value, "agents") and hasattr(value, "run"))


def as_backend(value: Any) -> Backend:
    """``value`` as a backend: an object that derives from nothing gets the defaults."""
    if isinstance(value, Backend):
        return value
    backend = Backend()
    for name in _HOOKS:
        if hasattr(value, name):
            setattr(backend, name, getattr(value, name))
    return backend
