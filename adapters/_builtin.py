"""The backends that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from tools.plugins import hookimpl


@hookimpl
def register_backends(register: Callable[[str, str], None]) -> None:
    """Each framework is one line here and one file beside."""
    register("custom", "adapters.custom:CustomBackend")
    register("langgraph", "adapters.langgraph:LangGraphBackend")
    register("mcp", "adapters.mcp:McpBackend")
    register("openai-agents", "adapters.openai_agents:OpenAIAgentsBackend")
