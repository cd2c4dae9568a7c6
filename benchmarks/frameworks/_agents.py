"""The agents that are run, and where they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["AGENTS", "ROOT", "Agent"]

ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = Path("examples/frameworks")


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent in ``folder``. ``name`` is the object in its agent.py; a ``command`` is a program instead."""

    title: str
    folder: str
    packages: tuple[str, ...]
    """The packages whose versions are shown, of PyPI or, for a command, of npm."""
    name: str = "answer"
    command: str = ""
    names: tuple[str, ...] = ("",)
    """The names of the agents whose calls are traced; empty where a client has none."""
    trained: bool = True
    """False for a program whose prompts are far longer than the starter's context."""

    @property
    def path(self) -> Path:
        """The folder, relative to the repository."""
        return _EXAMPLES / self.folder

    @property
    def options(self) -> list[str]:
        """The options of a command that say which agent to run."""
        if self.command:
            return ["--backend", "command", "--agent", self.command]
        return ["--agent", f"{self.path / 'agent.py'}:{self.name}"]


AGENTS = (
    Agent(
        title="LangGraph",
        folder="langgraph",
        names=("write_query",),
        name="graph",
        packages=("langgraph", "langchain-openai"),
    ),
    Agent(
        title="LangChain create_agent",
        folder="langchain",
        names=("sql_agent",),
        name="agent",
        packages=("langchain", "langchain-openai"),
    ),
    Agent(
        title="OpenAI Agents SDK",
        folder="openai_agents",
        names=("SQL analyst", "Triage agent"),
        name="triage_agent",
        packages=("openai-agents",),
    ),
    Agent(
        title="MCP tools",
        folder="mcp_tools",
        names=("Data assistant",),
        name="agent",
        packages=("mcp", "openai-agents"),
    ),
    Agent(
        title="AutoGen",
        folder="autogen",
        names=("sql_assistant",),
        packages=("autogen-agentchat",),
    ),
    Agent(
        title="CrewAI",
        folder="crewai",
        names=("Data analyst",),
        packages=("crewai",),
    ),
    Agent(
        title="Microsoft Agent Framework",
        folder="agent_framework",
        names=("DatabaseAgent",),
        packages=("agent-framework-core", "agent-framework-openai"),
    ),
    Agent(
        title="Pydantic AI",
        folder="pydantic_ai",
        names=("sql_gen",),
        name="agent",
        packages=("pydantic-ai-slim", "openai"),
    ),
    Agent(title="smolagents", folder="smolagents", names=("ToolCallingAgent",), packages=("smolagents",)),
    Agent(
        title="Google ADK",
        folder="google_adk",
        names=("sql_agent",),
        name="root_agent",
        packages=("google-adk",),
    ),
    Agent(
        title="Strands Agents",
        folder="strands",
        names=("SQL agent",),
        name="agent",
        packages=("strands-agents",),
    ),
    Agent(title="Agno", folder="agno", names=("SQL agent",), name="agent", packages=("agno", "ollama")),
    Agent(title="Haystack", folder="haystack", names=("sql_agent",), name="pipeline", packages=("haystack-ai",)),
    Agent(title="DSPy", folder="dspy", names=("write",), name="program", packages=("dspy", "litellm")),
    Agent(
        title="LlamaIndex workflow",
        folder="llama_index",
        names=("write",),
        name="workflow",
        packages=("llama-index-core", "llama-index-llms-openai"),
    ),
    Agent(title="CAMEL", folder="camel", names=("SQL expert",), packages=("camel-ai",)),
    Agent(title="OpenAI client", folder="openai_client", packages=("openai",)),
    Agent(title="Anthropic client", folder="anthropic_client", packages=("anthropic",)),
    Agent(
        title="OpenAI client for Node",
        folder="node_openai",
        packages=("openai",),
        command=f"node {_EXAMPLES}/node_openai/agent.mjs",
    ),
    Agent(
        title="Claude Code",
        folder="claude_code",
        packages=("@anthropic-ai/claude-code",),
        command=f"sh {_EXAMPLES}/claude_code/agent.sh",
        trained=False,
    ),
    Agent(
        title="Codex CLI",
        folder="codex",
        packages=("@openai/codex",),
        command=f"sh {_EXAMPLES}/codex/agent.sh",
        trained=False,
    ),
)
