"""Pydantic AI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from groundwire.adapters.agents.drivers import AgentTask, Driver


class FrameworkDriver(Driver):
    """An ``Agent`` of Pydantic AI."""

    @property
    def calls_tools(self) -> bool:
        # Its own toolset, which is the first, may be empty.
        return any(getattr(toolset, "tools", True) for toolset in self.agent.toolsets)

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        return await agent.run(arguments)

    def result_types(self) -> Iterator[Any]:
        yield self.agent.output_type
