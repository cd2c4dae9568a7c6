"""OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from groundwire.adapters.agents.drivers import AgentTask, Driver


class FrameworkDriver(Driver):
    """An ``Agent`` of the SDK."""

    @property
    def calls_tools(self) -> bool:
        return bool(self.agent.tools or self.agent.handoffs or self.agent.mcp_servers)

    def describe(self, task: AgentTask) -> str:
        if any(getattr(server, "session", self) is None for server in getattr(self.agent, "mcp_servers", ())):
            raise ValueError(
                f"agent {self.name!r} has mcp_servers that are not connected: give the name of a function without "
                "parameters, an asynccontextmanager that connects them with `async with` and yields the agent"
            )
        return f"Runner.run({self.name}, the question, context=the task)"

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        from agents import RunConfig, Runner

        # Traces would be sent to OpenAI.
        return await Runner.run(agent, arguments, context=task, run_config=RunConfig(tracing_disabled=True))

    def result_types(self) -> Iterator[Any]:
        for agent in (self.agent, *getattr(self.agent, "handoffs", ())):
            kind = getattr(agent, "output_type", None)
            yield getattr(kind, "output_type", kind)  # an AgentOutputSchema, or the class itself
