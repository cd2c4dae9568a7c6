"""Strands Agents."""

from __future__ import annotations

import copy
import threading
from typing import Any

from groundwire.adapters.agents.drivers import AgentTask, Driver, own_copy
from groundwire.adapters.agents.early_runs import was_ended

_SESSIONS = ("session_manager", "_session_manager")
_SHARED = ("model", "callback_handler", "tracer", *_SESSIONS)


class FrameworkDriver(Driver):
    """An ``Agent``, a ``Graph`` or a ``Swarm``. Agents keep their conversations, and refuse a second run at once."""

    method = "invoke_async"
    context_class = dict
    tool_fields = ("tool_names",)

    def fresh(self) -> Any:
        return _fresh(self.agent, {})

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        own = {"invocation_state": await self.context(task), **await self.config(task)}
        result = await agent.invoke_async(arguments, **own)
        if nodes := getattr(result, "execution_order", None) or getattr(result, "node_history", None):
            result = result.results[nodes[-1].node_id].result  # of a graph or a swarm
        return result if (output := getattr(result, "structured_output", None)) is None else output


def _fresh(agent: Any, memo: dict[int, Any]) -> Any:
    """A copy with conversations of its own."""
    for node in getattr(agent, "nodes", {}).values():
        _fresh(node.executor, memo)
    for tool in getattr(getattr(agent, "tool_registry", None), "registry", {}).values():
        memo[id(tool)] = tool
        if hasattr(tool, "_agent"):  # an agent as a tool
            own = memo[id(tool)] = copy.copy(tool)
            own._agent, own._lock = _fresh(tool._agent, memo), threading.Lock()
    other = own_copy(agent, memo, _SHARED)
    _leave_session(other)
    if was_ended(agent) and hasattr(other, "messages"):
        del other.messages[-1:]
    for name, make in _MADE.items():
        if hasattr(agent, name):
            setattr(other, name, make(other))
    if hasattr(agent, "_inject_swarm_tools"):  # the tool for handoffs knows its swarm
        for node in other.nodes.values():
            node.executor.tool_registry.registry.pop("handoff_to_agent", None)
        other._inject_swarm_tools()
    return other


def _leave_session(agent: Any) -> None:
    """Store nothing in the session of the agent's author: it may be in files that other rollouts have as well."""
    for name in _SESSIONS:
        if (manager := getattr(agent, name, None)) is not None:
            setattr(agent, name, None)
            agent.hooks = copy.copy(agent.hooks)
            agent.hooks._registered_callbacks = {
                event: [entry for entry in entries if manager not in _closed_over(entry)]
                for event, entries in agent.hooks._registered_callbacks.items()
            }


def _closed_over(entry: Any) -> list[Any]:
    """The objects that a callback of a registry of hooks has from where it was defined."""
    callback = getattr(entry, "callback", entry)
    return [cell.cell_contents for cell in getattr(callback, "__closure__", None) or ()]


_MADE = {
    "tool_caller": lambda agent: type(agent.tool_caller)(agent),
    "_concurrency": lambda agent: type(agent._concurrency)(agent._concurrency.mode),
    "_cancel_signal": lambda agent: threading.Event(),
    "_invocation_lock": lambda agent: threading.Lock(),
}
"""What cannot be copied, and must not be shared, as far as a version has it."""
