"""What an exception of an agent says about its rollout: the policy's reply was unusable, or something broke."""

from __future__ import annotations

from traceback import walk_tb
from typing import TYPE_CHECKING

from groundwire.adapters._types import (
    AgentError,
    AgentSetupError,
    BackendError,
    EmittedRewardError,
    Endpoint,
    EndpointError,
    MalformedOutputError,
    PromptTooLongError,
    ToolError,
    TurnLimitError,
)
from groundwire.adapters.tracing.wire.paths import SERVED
from groundwire.tools.errors import BrokenResourceError
from groundwire.tools.infrastructure import causes, infrastructure_errors, named_resources

if TYPE_CHECKING:
    from groundwire.adapters.agents.redirection import AttemptCalls

CACHES = (
    "a cache of the agent may answer in place of the model: turn it off (LangChain: set_llm_cache(None), LiteLLM: "
    "litellm.cache = None, DSPy: dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False), or one of "
    "your own)"
)
"""Why an agent without any HTTP request may have an answer."""
_EMITTER = "agentlightning.emitter.reward"  # the module whose functions raise for what is no reward
_TURN_LIMITS = {
    "MaxTurnsExceeded",  # OpenAI Agents SDK
    "GraphRecursionError",  # LangGraph
    "UsageLimitExceeded",  # Pydantic AI
    "AgentMaxStepsError",  # smolagents
    "LlmCallsLimitExceededError",  # Google ADK
    "PipelineMaxComponentRuns",  # Haystack
    "WorkflowConvergenceException",  # Agent Framework
}
_MALFORMED = {
    "JSONDecodeError", "ValidationError",  # json, pydantic: a typed output
    "LengthFinishReasonError", "IncompleteOutputException",  # openai, instructor: one that was cut
    "ModelBehaviorError",  # OpenAI Agents SDK
    "OutputParserException", "StructuredOutputError",  # LangGraph, LangChain
    "UnexpectedModelBehavior",  # Pydantic AI
    "AgentParsingError",  # smolagents
    "AdapterParseError",  # DSPy
    "ConverterError",  # CrewAI
    "MaxTokensReachedException", "StructuredOutputException",  # Strands
}  # fmt: skip
"""Exceptions, by name, so that no framework need be imported."""


def agent_failure(error: BaseException) -> BackendError:
    """The failure of an agent that raised ``error``, whose calls did not fail as far as is known.

    A failure of the network, the operating system or a server among the causes is one of a tool.
    """
    message = f"{type(error).__name__}: {error}"
    frames = (frame for cause in causes(error) for frame, _ in walk_tb(cause.__traceback__))
    if any(frame.f_globals.get("__name__") == _EMITTER for frame in frames):
        return EmittedRewardError(f"the agent emitted no reward: {message}")
    if broken := infrastructure_errors(error):
        root = f"{type(broken[-1]).__name__}: {broken[-1]}"
        failure = ToolError(message if root == message else f"{message} ({root})")
        failure.resources = named_resources(broken)
        return failure
    names = {kind.__name__ for cause in causes(error) for kind in type(cause).__mro__}
    kind = TurnLimitError if names & _TURN_LIMITS else MalformedOutputError if names & _MALFORMED else AgentError
    return kind(message)


def rollout_failure(error: Exception, calls: AttemptCalls) -> BackendError:
    """The failure of a rollout whose agent raised ``error``, whatever it made of the failure of a call or a tool."""
    for cause in causes(error):
        if isinstance(cause, BackendError):
            return cause
        if isinstance(cause, BrokenResourceError):
            return ToolError(str(cause))
    broke_off = any(_is_sent_to(calls.endpoint, cause) for cause in causes(error))  # a stream, after its status
    if calls.error is not None or broke_off:
        return _endpoint_failure(*calls.error or (None, "", str(error)))
    if calls.refused and (not calls.traced or any(calls.refused in str(cause) for cause in causes(error))):
        return refused_failure(calls)
    failure = agent_failure(error)
    if calls.traced or not (calls.redirects or calls.elsewhere):
        return failure
    is_known = calls.models or calls.hosts or calls.elsewhere
    note = f"; {no_call('the agent', calls)}" if is_known else " (before any LLM call)"
    return type(failure)(f"{failure}{note}")


def _endpoint_failure(status: int | None, code: str, message: str) -> BackendError:
    if status is None:
        return EndpointError(f"the model's endpoint gave no answer: {message}")
    kind = PromptTooLongError if code == "context_length_exceeded" else EndpointError
    return kind(f"the model's endpoint answered {status}: {message}", status=status)


def refused_failure(calls: AttemptCalls) -> BackendError:
    """The failure of a rollout that asked a provider of models: of its setup, unless the policy may have named it."""
    if not calls.traced:
        return AgentSetupError(no_call("the agent", calls))
    failure = ToolError(calls.refused)
    failure.resources = [calls.refused_host]
    return failure


def _is_sent_to(endpoint: Endpoint, error: BaseException) -> bool:
    """Whether it is an error of httpx about a request to the endpoint."""
    try:
        return str(getattr(getattr(error, "request", None), "url", "")).startswith(endpoint.base_url)
    except RuntimeError:  # before the request is sent
        return False


def no_call(name: str, calls: AttemptCalls) -> str:
    """Why an agent made no LLM call that was traced, as far as it is known."""
    if calls.elsewhere:
        remedy = f"give it base_url=endpoint.base_url, which is {calls.endpoint.base_url} here"
        return f"the agent's client asked {calls.elsewhere}, not its endpoint: {remedy}"
    if calls.refused:
        return calls.refused
    message = f"{name} made no LLM call that can be traced"
    if calls.models:
        return f"{message}: none of its models ({', '.join(calls.models)}) matches --train-model"
    if calls.hosts:
        served = f"the policy serves {SERVED}, through httpx, aiohttp, requests or botocore"
        return f"{message}; it called {', '.join(calls.hosts)}: {served}"
    elsewhere = "or another process calls it: give the agent by its name, or as a command (--backend command)"
    return f"{message}, and no HTTP request at all: {CACHES}; {elsewhere}"
