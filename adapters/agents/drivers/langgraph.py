"""LangGraph: compiled graphs, and other runnables of LangChain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

from groundwire.adapters._types import AgentSetupError, Endpoint, Question
from groundwire.adapters.agents.answers import field_names
from groundwire.adapters.agents.drivers import TEXT_NAMES, AgentTask, Driver

_ASKED = ("messages", *TEXT_NAMES)
"""The fields of a graph that get the question, if it has none of that name: the first that it has."""


class FrameworkDriver(Driver):
    """A compiled graph."""

    method = "ainvoke"

    def describe(self, task: AgentTask) -> str:
        return f"{self.name}.ainvoke({', '.join(self._input(task))})"

    def arguments(self, source: Any, question: Question, endpoint: Endpoint) -> Any:
        return self._input(source) if isinstance(source, AgentTask) else source

    def _input(self, task: AgentTask) -> Mapping[str, Any]:
        """The fields of the input schema that the task has. ``messages`` has the question if no other field has it."""
        names = field_names(getattr(getattr(self.agent, "builder", None), "input_schema", None))
        fields = {name: task[name] for name in names if name in task} if names else task
        asked = next((name for name in _ASKED if name in names), None)
        if asked is not None and not fields.keys() & {"question", "messages"}:
            question = task["question"]
            fields = {**fields, asked: [{"role": "user", "content": question}] if asked == "messages" else question}
        if not fields:
            raise ValueError(
                f"the graph's input has the fields {', '.join(sorted(names))}, and the task has {', '.join(task)}: "
                "make the input with --agent-input module:function"
            )
        return fields

    @property
    def calls_tools(self) -> bool:
        nodes = getattr(self.agent, "nodes", {}).values()
        return any(type(getattr(node, "bound", None)).__name__ == "ToolNode" for node in nodes)

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}  # of this rollout alone, for a graph with a checkpointer
        result = await agent.ainvoke(arguments, config)
        stops = [node for when in ("before", "after") for node in getattr(agent, f"interrupt_{when}_nodes", ())]
        if stops and hasattr(getattr(agent, "checkpointer", None), "aget_tuple"):
            stops = (await agent.aget_state(config)).next  # those at which it stands
        if stops:
            raise AgentSetupError(
                f"the graph was interrupted at {', '.join(stops)}, and nobody continues it in a rollout: compile "
                "it without interrupt_before and interrupt_after"
            )
        return result

    def result_types(self) -> Iterator[Any]:
        yield getattr(getattr(self.agent, "builder", None), "output_schema", None)
