"""smolagents: agents that write code, and agents that call tools."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.agents.drivers import AgentTask, Driver


class FrameworkDriver(Driver):
    """A ``CodeAgent``, a ``ToolCallingAgent`` or another ``MultiStepAgent``."""

    takes_context = False
    threaded = True

    @property
    def calls_tools(self) -> bool:
        return any(kind.__name__ == "ToolCallingAgent" for kind in type(self.agent).__mro__)

    def fresh(self) -> Any:
        return _fresh(self.agent)

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        config = await self.config(task)
        result = await self.in_thread(lambda: agent.run(arguments, **config), task)
        output = getattr(result, "output", result)  # of a RunResult
        return output if isinstance(output, Mapping) or output is None else str(output)


def _fresh(agent: Any) -> Any:
    """A copy with its own memory and variables, as have the agents that it manages. Its model and tools are shared."""
    own = copy.copy(agent)
    own.memory, own.state = copy.deepcopy(agent.memory), dict(agent.state)
    own.managed_agents = {name: _fresh(managed) for name, managed in agent.managed_agents.items()}
    if type(getattr(agent, "python_executor", None)).__module__.startswith("smolagents."):
        own.python_executor = own.create_python_executor()  # keeps the variables of the code that it runs
    return own
