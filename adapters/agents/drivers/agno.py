"""Agno."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from groundwire.adapters.agents.drivers import AgentTask, Driver


class FrameworkDriver(Driver):
    """An ``Agent``, a ``Team`` or a ``Workflow``: each attempt is a session, and a user, of its own."""

    method = "arun"
    result_field = "output_schema"

    @property
    def context_class(self) -> Any:
        return None if getattr(self.agent, "dependencies", None) else dict

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        own = {"session_id": uuid4().hex, "user_id": uuid4().hex, "dependencies": await self.context(task)}
        result = await agent.arun(arguments, **{**own, **await self.config(task)})
        if str(getattr(result.status, "value", result.status)).lower() == "error":
            raise RuntimeError(result.content)  # of the exception, which it caught
        return result if getattr(result, "is_paused", False) else result.content
