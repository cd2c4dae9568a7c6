"""What an exception of an agent says about its rollout: the policy's reply was unusable, or something broke."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from groundwire.adapters._types import (
    AgentError,
    BackendError,
    Endpoint,
    EndpointError,
    MalformedOutputError,
    PromptTooLongError,
    ToolError,
    TurnLimitError,
)
from groundwire.tools.errors import BrokenResourceError
from groundwire.tools.infrastructure import causes, infrastructure_errors, named_resources

_TURN_LIMITS = {
    "MaxTurnsExceeded",  # OpenAI Agents SDK
    "GraphRecursionError",  # LangGraph
    "UsageLimitExceeded",  # Pydantic AI
    "AgentMaxStepsError",  # smolagents
}
_MALFORMED = {
    "JSONDecodeError", "ValidationError",  # json, pydantic: a typed output
    "LengthFinishReasonError", "IncompleteOutputException",  # openai, instructor: one that was cut
    "ModelBehaviorError",  # OpenAI Agents SDK
    "OutputParserException", "StructuredOutputError",  # LangGraph, LangChain
    "UnexpectedModelBehavior",  # Pydantic AI
    "AgentParsingError",  # smolagents
    "ConverterError",  # CrewAI
    "MaxTokensReachedException", "StructuredOutputException",  # Strands
}  # fmt: skip
"""Exceptions, by name, so that no framework need be imported."""


def agent_failure(error: BaseException) -> BackendError:
    """The failure of an agent that raised ``error``, whose calls did not fail as far as is known.

    A failure of the network, the operating system or a server among the causes is one of a tool.
    """
    message = f"{type(error).__name__}: {error}"
    if broken := infrastructure_errors(error):
        root = f"{type(broken[-1]).__name__}: {broken[-1]}"
        failure = ToolError(message if root == message else f"{message} ({root})")
        failure.resources = named_resources(broken)
        return failure
    names = {kind.__name__ for cause in causes(error) for kind in type(cause).__mro__}
    kind = TurnLimitError if names & _TURN_LIMITS else MalformedOutputError if names & _MALFORMED else AgentError
    return kind(message)


def known_failure(error: BaseException) -> BackendError | None:
    """The failure that ``error`` or one of its causes already is, whatever the agent made of it."""
    for each in causes(error):
        if isinstance(each, BackendError):
            return each
        if isinstance(each, BrokenResourceError):
            return ToolError(str(each))
    return None


def refused_call(status: int, code: object, message: str) -> EndpointError:
    """The failure of an LLM call that the model's endpoint answered with an error."""
    kind = PromptTooLongError if code == "context_length_exceeded" else EndpointError
    return kind(f"the model's endpoint answered {status}: {message}", status=status)


def failure_at(error: BaseException, endpoint: Endpoint) -> BackendError:
    """The failure of an agent that raised ``error`` and sends its calls to ``endpoint`` by itself."""
    calls = (_call_failure(each, endpoint) for each in causes(error))
    return known_failure(error) or next(filter(None, calls), None) or agent_failure(error)


@contextmanager
def typed_failures(endpoint: Endpoint) -> Iterator[None]:
    """Raise every error of an agent as its :func:`failure_at` ``endpoint``."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        raise failure_at(error, endpoint) from error


def _call_failure(error: BaseException, endpoint: Endpoint) -> BackendError | None:
    """The failure of an LLM call, if ``error`` is one of its client."""
    openai: Any = sys.modules.get("openai")  # an agent of another client need not have it
    if openai is not None and type(error) is openai.OpenAIError and "api_key" in str(error):
        return AgentError(
            f"the agent's client has no api_key: make it with base_url=endpoint.base_url ({endpoint.base_url} "
            "here) and api_key=endpoint.api_key"
        )
    of_openai = openai is not None and isinstance(error, openai.APIError)
    if not of_openai and "TransportError" not in {each.__name__ for each in type(error).__mro__}:
        return None  # a TransportError is httpx's own: a stream that broke off
    try:
        request = getattr(error, "request", None)
    except RuntimeError:  # of httpx's errors before the request is sent
        request = None
    status = getattr(error, "status_code", None) if of_openai else None
    if request is not None and not _is_sent_to(request, endpoint):
        if not of_openai:  # of a tool
            return None
        outcome = f"no answer: {error}" if status is None else f"it answered {status}: {error}"
        address = str(request.url.copy_with(query=None, fragment=None, userinfo=b""))
        return (ToolError if infrastructure_errors(error) else AgentError)(
            f"the agent's client asked {address}, not its endpoint ({outcome}): give it base_url=endpoint.base_url, "
            f"which is {endpoint.base_url} here"
        )
    if status is None:
        return EndpointError(f"no answer from {endpoint.base_url}: {error}")
    return refused_call(status, getattr(error, "code", None), str(error))


def _is_sent_to(request: Any, endpoint: Endpoint) -> bool:
    sent = request.url
    expected = type(sent)(endpoint.base_url)
    same = (sent.scheme, sent.host, sent.port) == (expected.scheme, expected.host, expected.port)
    return bool(same and sent.path.startswith(expected.path.rstrip("/")))
