"""LlamaIndex: workflows, and the agents that are workflows."""

from __future__ import annotations

import inspect
from typing import Any

from groundwire.adapters._types import AgentSetupError, TurnLimitError
from groundwire.adapters.agents.drivers import TEXT_NAMES, AgentTask, Driver, lacks

_ASKED = ("user_msg", "question", *TEXT_NAMES, "topic", "task")  # the fields of a start event that get the question


class FrameworkDriver(Driver):
    """A ``Workflow``, such as an ``AgentWorkflow`` or a ``FunctionAgent``. Each run has a ``Context`` of its own."""

    takes_context = False

    def inputs(self, task: AgentTask) -> dict[str, Any]:
        """The fields of the start event. One that declares none takes any: then each usual name has the question."""
        if "user_msg" in inspect.signature(self.agent.run).parameters:  # an agent
            return {"user_msg": task["question"]}
        fields = self.agent.start_event_class.model_fields
        values = {name: task[name] for name in fields or task if name in task}
        values |= {name: task["question"] for name in _ASKED if name not in values and (not fields or name in fields)}
        lacking = [name for name, field in fields.items() if field.is_required() and name not in values]
        if lacking and (len(lacking) > 1 or task["question"] in values.values()):
            raise lacks(lacking, "workflow")
        return values | dict.fromkeys(lacking, task["question"])

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        own = arguments if isinstance(arguments, dict) else {"user_msg": arguments}
        handler = agent.run(**{**own, **await self.config(task)})
        async for event in handler.stream_events():
            if any(kind.__name__ == "InputRequiredEvent" for kind in type(event).__mro__):
                await handler.cancel_run()
                raise AgentSetupError(
                    f"the workflow asks a person ({event!r:.300}), and nobody answers in a rollout: give an agent "
                    "without approvals, or a function that runs it and answers them"
                )
        try:
            result = await handler
        except Exception as error:
            if str(error).startswith("Max iterations"):
                raise TurnLimitError(str(error)) from error
            raise
        structured = getattr(result, "structured_response", None)
        return result if structured is None else structured
