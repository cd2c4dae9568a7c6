"""Code that runs its agent where it should only make it: a script when it is imported, or a function ``main``.

The first call to a model is not sent, and ends that code: the agent is made by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from traceback import walk_tb
from typing import Any

from groundwire.adapters.agents.changes import skip, undo_later
from groundwire.adapters.agents.drivers import is_agent

_MOVE = "in no rollout: move a call that it needs into what runs for a question"
_MAKING = "groundwire-making"
"""The key of OpenTelemetry's context, which is imported at the first use: ``--help`` needs none of it."""


class EarlyCallError(BaseException):
    """A call to a model while an agent is made. It passes each ``except Exception`` of the author and the framework."""

    def __init__(self, host: object) -> None:
        super().__init__(f"the agent calls {host} when it is made, {_MOVE}")
        _raised.append(self)


_raised: list[EarlyCallError] = []


def was_ended(agent: Any) -> bool:
    """Whether a run of ``agent`` was ended by its first call: it may remember the question of the author."""
    frames = (frame for error in _raised for frame, _ in walk_tb(error.__traceback__))
    return any(value is agent for frame in frames for value in frame.f_locals.values())


@contextmanager
def making() -> Iterator[None]:
    """In this block an agent is made, in no rollout: a call to a model raises :class:`EarlyCallError`."""
    from opentelemetry import context

    from groundwire.adapters.agents.redirection import install

    install()
    _keep_open()
    token = context.attach(context.set_value(_MAKING, True))
    try:
        yield
    finally:
        context.detach(token)


_CLIENTS = (
    ("agent_framework._mcp", "MCPTool.__aexit__"),
    ("agno.tools.mcp.mcp", "MCPTools.__aexit__"),
    ("autogen_core.tools._workbench", "Workbench.__aexit__"),
    ("crewai_tools.adapters.mcp_adapter", "MCPServerAdapter.__exit__"),
    ("smolagents.mcp_client", "MCPClient.__exit__"),
    ("strands.tools.mcp.mcp_client", "MCPClient.__exit__"),
)
"""Module and method that closes a client of an MCP server, which has the tools of an agent."""


@cache
def _keep_open() -> None:
    """From now on, until the run ends, what an :class:`EarlyCallError` ends leaves the clients of its agent open."""
    skip(_CLIENTS, lambda values: EarlyCallError in values)
    undo_later(_keep_open.cache_clear)


def is_making() -> bool:
    """Whether it is called in a block of :func:`making`."""
    from opentelemetry import context

    return bool(context.get_value(_MAKING))


def agent_that_ran(error: EarlyCallError) -> Any:
    """The agent that a function was running: the first that the code of others, which it called, had.

    Raises ``ValueError`` if there is none.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    foreign = [frame for frame in frames if not frame.f_globals.get("__name__", "").startswith("groundwire.")]
    for frame in foreign:
        if frame.f_code.co_filename != foreign[0].f_code.co_filename:
            agent = next(filter(is_agent, frame.f_locals.values()), None)
            if agent is not None:
                return agent
    raise ValueError(f"it calls a model before it returns an agent, {_MOVE}") from error
