"""The backends that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.tools.plugins import hookimpl


@hookimpl
def register_backends(register: Callable[[str, str], None]) -> None:
    """Each framework is one line here and one file beside."""
    register("custom", "groundwire.adapters.custom:CustomBackend")
    register("langgraph", "groundwire.adapters.sql_agents.langgraph:LangGraphBackend")
    register("mcp", "groundwire.adapters.sql_agents.mcp:McpBackend")
    register("openai-agents", "groundwire.adapters.sql_agents.openai_agents:OpenAIAgentsBackend")
