"""CAMEL: chat agents."""

from __future__ import annotations

import copy
from typing import Any

from groundwire.adapters._types import AgentError
from groundwire.adapters.agents.drivers import AgentTask, Driver

_REMEMBERED = ("_memory", "_internal_tools", "_tool_output_history")


class FrameworkDriver(Driver):
    """A ``ChatAgent``, which remembers: each attempt has a copy that knows its system message and nothing else."""

    takes_context = False
    method = "step"
    threaded = True
    tool_fields = ("tool_dict",)

    def fresh(self) -> Any:
        own, clone = copy.copy(self.agent), self.agent.clone()  # which forgets the class and some settings
        vars(own).update({name: value for name, value in vars(clone).items() if name in _REMEMBERED})
        own.stream_accumulate = True  # so that the last piece of a stream is the whole message
        return own

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        config = await self.config(task)
        return await self.in_thread(lambda: _answer(agent.step(arguments, **config)), task)


def _answer(response: Any) -> Any:
    if not response.msgs:  # those of a stream are read here
        raise AgentError(f"the agent ended without a message: {response.info.get('termination_reasons')}")
    message = response.msgs[0]
    return message.content if message.parsed is None else message.parsed
