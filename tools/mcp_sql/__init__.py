"""The read-only SQL tool as an MCP server."""
