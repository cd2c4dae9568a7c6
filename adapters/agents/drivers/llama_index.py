"""LlamaIndex: workflows, and the agents that are workflows."""

from __future__ import annotations

import inspect
from typing import Any

from groundwire.adapters._types import AgentSetupError, Endpoint, Question, TurnLimitError
from groundwire.adapters.agents.drivers import TEXT_NAMES, AgentTask, Driver

_ASKED = ("user_msg", "question", *TEXT_NAMES, "topic", "task")
"""The fields of a start event that get the question."""


class FrameworkDriver(Driver):
    """A ``Workflow``, such as an ``AgentWorkflow`` or a ``FunctionAgent``. Each run has a ``Context`` of its own."""

    takes_context = False

    def describe(self, task: AgentTask) -> str:
        names = [*self._fields(task)]
        return f"{self.name}.run({', '.join(names[:10])}{', …' if len(names) > 10 else ''})"

    def arguments(self, source: Any, question: Question, endpoint: Endpoint) -> Any:
        if isinstance(source, AgentTask):
            return self._fields(source)
        return source if isinstance(source, dict) else {"user_msg": source}

    def _fields(self, task: AgentTask) -> dict[str, Any]:
        """The fields of the start event. One that declares none takes any: then each usual name has the question."""
        if "user_msg" in inspect.signature(self.agent.run).parameters:  # an agent
            return {"user_msg": task["question"]}
        fields = self.agent.start_event_class.model_fields
        values = {name: task[name] for name in fields or task if name in task}
        values |= {name: task["question"] for name in _ASKED if name not in values and (not fields or name in fields)}
        lacks = [name for name, field in fields.items() if field.is_required() and name not in values]
        if lacks and (len(lacks) > 1 or task["question"] in values.values()):
            raise ValueError(
                f"the task has no {lacks[0]!r}, which the workflow needs: make its input with --agent-input"
            )
        return values | dict.fromkeys(lacks, task["question"])

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        handler = agent.run(**{**arguments, **await self.config(task)})
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
