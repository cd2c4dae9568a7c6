"""The backends that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.tools.plugins import hookimpl


@hookimpl
def register_backends(register: Callable[[str, str], None]) -> None:
    """The reference SQL agents, ``custom`` for any agent object or function, and ``command`` for any program."""
    register("command", "groundwire.adapters.unmodified.command:CommandBackend")
    register("custom", "groundwire.adapters.unmodified.backend:agent_backend")
    register("langgraph", "groundwire.adapters.sql_agents.langgraph:LangGraphSQLBackend")
    register("mcp", "groundwire.adapters.sql_agents.mcp:McpSQLBackend")
    register("openai-agents", "groundwire.adapters.sql_agents.openai_agents:OpenAIAgentsSQLBackend")
