"""Tools that agents use: the one way SQL is run, the table info for prompts, and the MCP server over them."""
