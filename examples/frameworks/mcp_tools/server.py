"""An MCP server with two tools for SQLite databases."""

import sqlite3

from fastmcp import FastMCP

mcp = FastMCP("sqlite")


@mcp.tool
def describe_tables(database: str) -> str:
    """The CREATE TABLE statements of a database file."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    return "\n".join(ddl for (ddl,) in tables)


@mcp.tool
def read_query(database: str, query: str) -> str:
    """Run a SELECT query on a database file and return its first rows."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
            return "\n".join(str(row) for row in db.execute(query).fetchmany(10)) or "no rows"
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"Error: {error}"


if __name__ == "__main__":
    mcp.run(show_banner=False)
