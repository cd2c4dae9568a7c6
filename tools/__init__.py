"""SQL execution, schema text and the MCP server for agents; plugins, errors and terminal output for all packages."""
