"""What an exception of an agent says about its rollout: the policy's reply was unusable, or something broke."""

from __future__ import annotations

from groundwire.adapters._types import AgentError, BackendError, EndpointError, MalformedOutputError, TurnLimitError

__all__ = ["agent_failure", "causes"]

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
_NO_CONNECTION = {"ConnectionError", "ClientConnectionError", "TransportError"}  # builtin and requests, aiohttp, httpx


def causes(error: BaseException | None) -> list[BaseException]:
    """``error`` and the exceptions that it was raised from or while handling."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def agent_failure(error: Exception) -> BackendError:
    """The failure of an agent that raised ``error``, whose calls did not fail as far as is known.

    A lost connection to whatever the agent asked is a failure of the infrastructure.
    """
    names = {kind.__name__ for each in causes(error) for kind in type(each).__mro__}
    message = f"{type(error).__name__}: {error}"
    if names & _NO_CONNECTION:
        return EndpointError(f"a connection of the agent failed: {message}")
    if names & _TURN_LIMITS:
        return TurnLimitError(message)
    return MalformedOutputError(message) if names & _MALFORMED else AgentError(message)
