"""Microsoft Agent Framework: agents and workflows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from groundwire.adapters._types import AgentSetupError
from groundwire.adapters.agents.drivers import AgentTask, Driver


class FrameworkDriver(Driver):
    """An ``Agent``, which remembers nothing without a session, or a ``Workflow`` of executors or of a function."""

    takes_context = False

    @property
    def calls_tools(self) -> bool:
        return bool(getattr(self.agent, "default_options", {}).get("tools"))

    def fresh(self) -> Any:
        if hasattr(self.agent, "build"):  # a FunctionalWorkflowDefinition
            return self.agent.build()
        executors = getattr(self.agent, "executors", {}).values()  # they remember; their agents and clients do not
        agents = [executor._agent for executor in executors if hasattr(executor, "_agent")]
        try:
            return copy.deepcopy(self.agent, {id(agent): agent for agent in agents}) if executors else self.agent
        except Exception:  # an executor of the author's has a client, which cannot be copied
            return self.agent

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        result = await agent.run(arguments, **await self.config(task))
        if not hasattr(result, "get_outputs"):
            return result.value if getattr(result, "value", None) is not None else result
        if requests := result.get_request_info_events():
            raise AgentSetupError(
                f"the workflow asks a person ({requests[0].data!r:.300}), and nobody answers in a rollout"
            )
        outputs = result.get_outputs()
        return outputs[-1] if outputs else ""

    def result_types(self) -> Iterator[Any]:
        yield getattr(self.agent, "default_options", {}).get("response_format")
