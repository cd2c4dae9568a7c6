"""AutoGen's AgentChat."""

from __future__ import annotations

import asyncio
from typing import Any

from groundwire.adapters.agents.drivers import AgentTask, Driver, own_copy
from groundwire.adapters.agents.early_runs import was_ended


class FrameworkDriver(Driver):
    """An agent or a team: they keep their conversations."""

    takes_context = False
    tool_fields = ("_tools", "_handoffs")

    def fresh(self) -> Any:
        return _fresh(self.agent, {})

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        return await agent.run(task=arguments, **await self.config(task))


def _fresh(agent: Any, memo: dict[int, Any]) -> Any:
    for participant in getattr(agent, "_participants", ()):  # of a team
        _fresh(participant, memo)
    own = own_copy(agent, memo, ("_model_client",))
    if getattr(own, "_initialized", False) and getattr(own, "_embedded_runtime", False):  # a team that has begun a run
        own._runtime = type(agent._runtime)(ignore_unhandled_exceptions=False)  # the other one has what it was asked
        own._output_message_queue, own._initialized = asyncio.Queue(), False
    elif was_ended(agent) and getattr(own, "_model_context", None) is not None:
        del own._model_context._messages[-1:]
    return own
