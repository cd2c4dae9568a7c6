"""AutoGen's AgentChat."""

from __future__ import annotations

from typing import Any

from groundwire.adapters.agents.drivers import AgentTask, Driver, own_copy


class FrameworkDriver(Driver):
    """An agent or a team: they keep their conversations."""

    @property
    def calls_tools(self) -> bool:
        return any(getattr(self.agent, name, None) for name in ("_tools", "_handoffs"))

    def fresh(self) -> Any:
        return _fresh(self.agent, {})

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        return await agent.run(task=arguments, **await self.config(task))


def _fresh(agent: Any, memo: dict[int, Any]) -> Any:
    for participant in getattr(agent, "_participants", ()):  # of a team
        _fresh(participant, memo)
    return own_copy(agent, memo, ("_model_client",))
