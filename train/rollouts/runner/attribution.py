"""Who caused the failure of an agent: the policy, or what it runs on.

It is decided here, once, from the exception and from the calls that the attempt has made. The proxy knows them,
whatever the agent's framework, language or machine.
"""

from __future__ import annotations

from groundwire.adapters import (
    AgentError,
    AgentSetupError,
    BackendError,
    Endpoint,
    EndpointError,
    PromptTooLongError,
    TimeLimitError,
    ToolError,
    TurnLimitError,
)
from groundwire.adapters.tracing.open_attempts import CallSummary, call_summary

_MANY_CALLS = 8
"""Fewer within the time limit may be slow ones of an agent that would have ended."""


async def attribute(error: BackendError, endpoint: Endpoint) -> BackendError:
    """The failure that ``error``, which a backend raised, stands for."""
    if isinstance(error, PromptTooLongError):
        return error
    attributed = _attributed(error, await call_summary(endpoint.base_url, error.resources))
    if attributed is not error:
        attributed.steps, attributed.input, attributed.__cause__ = error.steps, error.input, error
    return attributed


def _attributed(error: BackendError, made: CallSummary | None) -> BackendError:
    if made is not None and made.at_limit:
        limit = f"it had made {made.calls} LLM calls, as many as max_calls allows"
        return TurnLimitError(str(error) if "max_calls" in str(error) else f"{error}; {limit}")
    if not isinstance(error, AgentError | ToolError):
        return error
    if made is None:
        return EndpointError(f"{error}; the proxy does not say which calls it made")
    if made.failure:
        return EndpointError(f"{error}; its last call {made.failure}")
    if isinstance(error, ToolError):
        return AgentError(f"{error}; the policy made up {made.made_up[0]!r}") if made.made_up else error
    return error if made.calls else AgentSetupError(str(error))


async def attribute_time_limit(timeout_s: float, endpoint: Endpoint) -> BackendError:
    """The failure of an agent that has not answered within ``timeout_s`` seconds.

    It tells what the agent waits for: half of the time for one thing means that this does not answer.
    """
    made, text = await call_summary(endpoint.base_url), f"no answer within {timeout_s:g} s"
    if made is None:
        return TimeLimitError(f"{text}; nor does the proxy answer")
    if made.at_limit:
        return TurnLimitError(f"{text}, and all {made.calls} LLM calls that max_calls allows")
    if made.running_s > timeout_s / 2:
        return TimeLimitError(f"{text}: the endpoint has not answered a call for {made.running_s:.3g} s")
    if made.calls >= _MANY_CALLS and made.idle_s < timeout_s / 2:
        return TurnLimitError(f"{text}, and {made.calls} LLM calls: the agent went on calling")
    since = f"in the {made.idle_s:.3g} s since its last LLM call" if made.idle_s else f"with {made.calls} LLM calls"
    return TimeLimitError(f"{text}: the agent or a tool of it did not end {since}")
