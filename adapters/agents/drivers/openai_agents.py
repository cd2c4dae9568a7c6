"""OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from groundwire.adapters._types import AgentSetupError
from groundwire.adapters.agents.drivers import AgentTask, Driver
from groundwire.adapters.agents.drivers.contexts import declared_context, lacks_are_setup, made_of
from groundwire.adapters.agents.making import Kept


class FrameworkDriver(Driver):
    """An ``Agent`` of the SDK."""

    tool_fields = ("tools", "handoffs", "mcp_servers")
    _servers: Kept[None] | None = None

    def describe(self, task: AgentTask) -> str:
        made = getattr(self.context_class, "__name__", "the task's columns")
        context = "what agent_context returns" if "agent_context" in self.hooks else made
        return f"Runner.run({self.name}, the question, context={context})"

    @property
    def context_class(self) -> Any:
        return declared_context(self._declarations(), ("Agent", "SandboxAgent", "RunContextWrapper", "ToolContext"))

    def _declarations(self) -> Iterator[Any]:
        """The agents, then their functions."""
        yield from self._agents
        for agent in self._agents:
            yield getattr(agent, "instructions", None)
            yield from (getattr(tool, "__wrapped__", None) for tool in agent.tools)

    @cached_property
    def _agents(self) -> list[Any]:
        """The agent, those that it hands off to, and those that are its tools."""
        agents = [self.agent]
        for agent in agents:
            handoffs = getattr(agent, "handoffs", ())  # agents, or objects with a weak reference to one
            others = [ref() if (ref := getattr(handoff, "_agent_ref", None)) else handoff for handoff in handoffs]
            others += [getattr(tool, "_agent_instance", None) for tool in agent.tools]
            agents += [other for other in others if hasattr(other, "tools") and other not in agents]
        return agents

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        from agents import RunConfig, Runner

        await self._connected()
        context = await self.context(task)
        if context is None and "agent_context" not in self.hooks:
            context = made_of(dict, task)
        config = await self.config(task)
        own = config.pop("run_config", None) or RunConfig()
        format_error = getattr(own, "tool_error_formatter", None)
        with lacks_are_setup(context) as errors:

            def note_error(error: Any) -> Any:  # of a tool: the model is told only that there was one
                errors.append(getattr(error, "error", None))
                return format_error(error) if format_error else None

            noting = {"tool_error_formatter": note_error} if hasattr(own, "tool_error_formatter") else {}
            run_config = replace(own, tracing_disabled=True, **noting)  # traces would be sent to OpenAI
            return await Runner.run(agent, arguments, context=context, run_config=run_config, **config)

    async def _connected(self) -> None:
        """Connect the MCP servers of all agents that are not connected, once."""
        if self._servers is None:
            self._servers = Kept(_connected([server for agent in self._agents for server in agent.mcp_servers]))
        try:
            await self._servers.get()
        except Exception as error:
            self._servers = None  # another attempt tries again
            while isinstance(members := getattr(error, "exceptions", None), tuple):  # a group says nothing itself
                error = members[0]
            raise AgentSetupError(
                f"an MCP server of agent {self.name!r} cannot be connected: {type(error).__name__}: {error}"
            ) from error

    async def close(self) -> None:
        if self._servers is not None:
            await self._servers.close()

    def result_types(self) -> Iterator[Any]:
        for agent in self._agents:
            kind = getattr(agent, "output_type", None)
            yield getattr(kind, "output_type", kind)  # an AgentOutputSchema, or the class itself


@asynccontextmanager
async def _connected(servers: Iterable[Any]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for server in servers:
            if getattr(server, "session", server) is None:
                await stack.enter_async_context(server)
        yield
