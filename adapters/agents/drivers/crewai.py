"""CrewAI."""

from __future__ import annotations

import inspect
from typing import Any

from groundwire.adapters.agents.answers import field_names
from groundwire.adapters.agents.drivers import TEXT_NAMES, AgentTask, Driver, lacks


class FrameworkDriver(Driver):
    """A ``Crew``, a ``@CrewBase`` class or an object of it, a ``Flow``, or an ``Agent``.

    The inputs of a crew, and of a flow, are the task's columns; one that no column has is the question."""

    takes_context = False
    method = "kickoff"
    threaded = True
    tool_fields = ()  # a crew may write them into its prompts

    def inputs(self, task: AgentTask) -> Any:
        is_crew = hasattr(agent := self.fresh(), "fetch_inputs")
        if not is_crew and not hasattr(agent, "state"):
            return task["question"]  # of an agent
        names = agent.fetch_inputs() if is_crew else {*field_names(type(agent.state))} - {"id"}
        values = {name: value for name, value in task.items() if value is not None and (is_crew or name in names)}
        lacking = sorted(names - values.keys())
        asked = next((name for name in TEXT_NAMES if name in lacking), lacking[0] if is_crew and lacking else None)
        if asked is not None and "question" not in names:
            values[asked] = task["question"]
            lacking.remove(asked)
        if is_crew and lacking:
            raise lacks(lacking, "crew")
        return values if names or is_crew else dict(task)

    def fresh(self) -> Any:
        agent: Any = self.agent() if inspect.isclass(self.agent) else self.agent
        agent = agent.crew() if getattr(type(agent), "is_crew_class", False) else agent
        if hasattr(agent, "fetch_inputs"):
            return agent.copy()
        return type(agent)() if hasattr(agent, "state") else agent

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        def kickoff() -> Any:
            output = agent.kickoff(arguments, **config)
            if hasattr(output, "get_full_text"):  # a stream
                list(output)
                output = output.result
            texts = (getattr(output, name, None) for name in ("pydantic", "json_dict", "raw"))
            return next((text for text in texts if text), output)

        config = await self.config(task)
        return await self.in_thread(kickoff, task)
