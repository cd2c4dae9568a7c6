"""LangGraph: compiled graphs, and other runnables of LangChain."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

from groundwire.adapters._types import AgentSetupError
from groundwire.adapters.agents.answers import field_names
from groundwire.adapters.agents.drivers import NO_HOOKS, TEXT_NAMES, AgentTask, Driver, Hooks
from groundwire.adapters.agents.drivers.contexts import lacks_are_setup, required_fields

_ASKED = ("messages", *TEXT_NAMES)
"""The fields of a graph that get the question, if it has none of that name: the first that it has."""


class FrameworkDriver(Driver):
    """A graph, which is compiled if it is not yet, or another runnable."""

    method = "ainvoke"

    def __init__(self, agent: Any, name: str, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(agent.compile() if hasattr(agent, "compile") else agent, name, hooks)

    def inputs(self, task: AgentTask) -> Mapping[str, Any] | str:
        """The fields of the input schema that the task has. ``messages`` has the question if no other field has it.

        Where the input is a text, as an ``@entrypoint`` may declare, it is the question.
        """
        schema: Any = None
        with suppress(TypeError):  # of a runnable that does not tell it
            if getattr(self.agent, "InputType", None) in (str, "str"):  # as written, with future annotations
                return str(task["question"])
            schema = getattr(getattr(self.agent, "builder", self.agent), "input_schema", None)
        if hasattr(schema, "__pydantic_root_model__") and schema.__pydantic_root_model__:
            schema = None  # any value
        names = field_names(schema)
        fields = {name: task[name] for name in names if name in task} if names else task
        asked = next((name for name in _ASKED if name in names), None)
        if asked is not None and not fields.keys() & {"question", "messages"}:
            question = task["question"]
            fields = {**fields, asked: [{"role": "user", "content": question}] if asked == "messages" else question}
        lacking = [name for name in required_fields(schema) if name not in fields]
        if lacking or not fields:
            raise ValueError(
                f"the graph's input has the fields {', '.join(lacking or sorted(names))}, and the task has "
                f"{', '.join(task)}: make the input with --agent-input module:function"
            )
        return fields

    @property
    def calls_tools(self) -> bool:
        nodes = getattr(self.agent, "nodes", {}).values()
        return any(type(getattr(node, "bound", None)).__name__ == "ToolNode" for node in nodes)

    @property
    def context_class(self) -> Any:
        return getattr(self.agent, "context_schema", None)

    def fresh(self) -> Any:
        """A graph with a memory of its own: checkpoints, store and cache are of this attempt alone.

        A checkpointer of a database may belong to another event loop, or may be for ``invoke`` only.
        """
        if not hasattr(self.agent, "checkpointer"):
            return self.agent
        from langgraph.cache.memory import InMemoryCache
        from langgraph.checkpoint.memory import InMemorySaver
        from langgraph.store.memory import InMemoryStore

        graph = copy.copy(self.agent)
        if hasattr(graph.checkpointer, "aget_tuple"):
            graph.checkpointer = InMemorySaver(serde=graph.checkpointer.serde)
        if graph.store is None:
            graph.store = InMemoryStore()
        elif isinstance(graph.store, InMemoryStore):
            graph.store = copy.deepcopy(graph.store)
        if graph.cache is not None:
            graph.cache = InMemoryCache()
        return graph

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        context, config = await self.context(task), await self.config(task)
        context = config.pop("context", context)
        columns = {name: task[name] for name in field_names(self.context_class) if name in task}
        own = {"thread_id": uuid4().hex, **columns, **config.get("configurable", {})}
        config = {**config, "configurable": own}
        with lacks_are_setup(context):
            result = await agent.ainvoke(arguments, config, **({} if context is None else {"context": context}))
        stops = [node for when in ("before", "after") for node in getattr(agent, f"interrupt_{when}_nodes", ())]
        if stops and hasattr(agent.checkpointer, "aget_tuple"):
            stops = (await agent.aget_state(config)).next  # those at which it stands
        if stops:
            raise AgentSetupError(
                f"the graph was interrupted at {', '.join(stops)}, and nobody continues it in a rollout: compile "
                "it without interrupt_before and interrupt_after"
            )
        return result

    def result_types(self) -> Iterator[Any]:
        yield getattr(getattr(self.agent, "builder", None), "output_schema", None)
