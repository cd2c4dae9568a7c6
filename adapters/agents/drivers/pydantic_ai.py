"""Pydantic AI."""

from __future__ import annotations

from typing import Any

from groundwire.adapters.agents.drivers import AgentTask, Driver


class FrameworkDriver(Driver):
    """An ``Agent`` of Pydantic AI."""

    result_field = "output_type"

    @property
    def calls_tools(self) -> bool:
        # Its own toolset, which is the first, may be empty.
        return any(getattr(toolset, "tools", True) for toolset in self.agent.toolsets)

    @property
    def context_class(self) -> Any:
        kind = self.agent.deps_type
        return None if kind is type(None) else kind

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        return await agent.run(arguments, deps=await self.context(task), **await self.config(task))
