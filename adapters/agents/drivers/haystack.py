"""Haystack: agents and pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groundwire.adapters.agents.drivers import TEXT_NAMES, AgentTask, Driver, lacks

_ANSWERS = {"last_message": None, "answers": 0, "replies": 0, "messages": -1}
"""The outputs of components that are answers, the likeliest first, and which item of a list is the answer."""


class FrameworkDriver(Driver):
    """An ``Agent`` or a ``Pipeline``. An input with the name of a column gets that, another gets the question."""

    takes_context = False
    threaded = True

    def inputs(self, task: AgentTask) -> dict[str, Any]:
        if hasattr(self.agent, "inputs"):  # a pipeline
            return {component: _values(inputs, task) for component, inputs in self.agent.inputs().items()}
        sockets = self.agent.__haystack_input__._sockets_dict
        return _values({name: {"type": s.type, "is_mandatory": s.is_mandatory} for name, s in sockets.items()}, task)

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        config = await self.config(task)
        if hasattr(agent, "inputs"):
            result = await self.in_thread(lambda: agent.run(arguments, **config), task)
            return _answer([outputs for outputs in result.values() if isinstance(outputs, Mapping)]) or result
        return _answer([await self.in_thread(lambda: agent.run(**arguments, **config), task)])


def _values(inputs: Mapping[str, Mapping[str, Any]], task: AgentTask) -> dict[str, Any]:
    """The inputs of a component. Raises ``ValueError`` if the task lacks one that has no default."""
    question = task["question"]
    values = {name: task.get(name, question) for name in inputs if name in task or name in TEXT_NAMES}
    for name in (name for name, socket in inputs.items() if socket["is_mandatory"] and name not in values):
        if "ChatMessage" not in str(inputs[name]["type"]):
            raise lacks([name], "agent")
        from haystack.dataclasses import ChatMessage

        values[name] = [] if question in values.values() else [ChatMessage.from_user(question)]
    return values


def _answer(components: list[Mapping[str, Any]]) -> Any:
    """The text of the one output that is an answer; None if there is no such output, or several."""
    for name, index in _ANSWERS.items():
        outputs = [component[name] for component in components if component.get(name)]
        if len(outputs) == 1:
            answer = outputs[0] if index is None else outputs[0][index]
            text = getattr(answer, "text", None) or getattr(answer, "data", None)  # of a message, of an answer
            return text or getattr(getattr(answer, "tool_call_result", None), "result", answer)
    return None
