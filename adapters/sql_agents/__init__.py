"""The reference agents: text-to-SQL with LangGraph, the OpenAI Agents SDK and MCP tools."""
