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
from groundwire.tools.infrastructure import causes, infrastructure_errors, named_resources
from groundwire.tools.sql import DatabaseError

__all__ = ["agent_failure", "typed_failures"]

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
    names = {kind.__name__ for each in causes(error) for kind in type(each).__mro__}
    if names & _TURN_LIMITS:
        return TurnLimitError(message)
    return MalformedOutputError(message) if names & _MALFORMED else AgentError(message)


@contextmanager
def typed_failures(endpoint: Endpoint) -> Iterator[None]:
    """Raise every error of an agent as the :class:`groundwire.adapters.BackendError` that says what failed."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        for each in causes(error):
            _raise_known(each, endpoint)
        raise agent_failure(error) from error


def _raise_known(error: BaseException, endpoint: Endpoint) -> None:
    """Raise the failure that ``error`` stands for, also behind an exception of the agent's own."""
    if isinstance(error, BackendError):
        raise error
    if isinstance(error, DatabaseError):
        raise ToolError(str(error)) from error
    openai: Any = sys.modules.get("openai")  # an agent of another client need not have it
    if openai is not None and isinstance(error, openai.APIStatusError):
        _check_address(error.response.request, endpoint, f"it answered {error.status_code}: {error.message}", error)
        failure = PromptTooLongError if error.code == "context_length_exceeded" else EndpointError
        message = f"the model's endpoint answered {error.status_code}: {error.message}"
        raise failure(message, status=error.status_code) from error
    kinds = {each.__name__ for each in type(error).__mro__}
    if "TransportError" in kinds or (openai is not None and isinstance(error, openai.APIError)):
        # An error of httpx or httpx2 themselves: a stream that broke off.
        try:
            request = getattr(error, "request", None)
        except RuntimeError:  # raised by httpx's errors before the request is sent
            request = None
        if request is not None and openai is not None and isinstance(error, openai.APIError):
            _check_address(request, endpoint, f"no answer: {error}", error)
        elif request is not None and not _is_sent_to(request, endpoint):  # of a tool
            return
        raise EndpointError(f"no answer from {endpoint.base_url}: {error}") from error
    if openai is not None and type(error) is openai.OpenAIError and "api_key" in str(error):
        raise AgentError(
            f"the agent's client has no api_key: make it with base_url=endpoint.base_url ({endpoint.base_url} "
            "here) and api_key=endpoint.api_key"
        ) from error


def _check_address(request: Any, endpoint: Endpoint, outcome: str, error: BaseException) -> None:
    """Raise the failure of an agent that sent ``request``, an LLM call, to another address than its endpoint."""
    if _is_sent_to(request, endpoint):
        return
    address = str(request.url.copy_with(query=None, fragment=None, userinfo=b""))
    raise (ToolError if infrastructure_errors(error) else AgentError)(
        f"the agent's client asked {address}, not its endpoint ({outcome}): give it base_url=endpoint.base_url, which "
        f"is {endpoint.base_url} here"
    ) from error


def _is_sent_to(request: Any, endpoint: Endpoint) -> bool:
    sent = request.url
    expected = type(sent)(endpoint.base_url)
    same = (sent.scheme, sent.host, sent.port) == (expected.scheme, expected.host, expected.port)
    return bool(same and sent.path.startswith(expected.path.rstrip("/")))
