"""An MCP server with two tools for SQLite databases. The client names the database in the metadata of each call."""

import sqlite3

from fastmcp import Context, FastMCP

mcp = FastMCP("sqlite")


def connect(ctx: Context) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{ctx.request_context.meta['database']}?mode=ro", uri=True)


@mcp.tool
def describe_tables(ctx: Context) -> str:
    """The CREATE TABLE statements of the database."""
    with connect(ctx) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    return "\n".join(ddl for (ddl,) in tables)


@mcp.tool
def read_query(query: str, ctx: Context) -> str:
    """Run a SELECT query on the database and return its first rows."""
    try:
        with connect(ctx) as db:
            return "\n".join(str(row) for row in db.execute(query).fetchmany(10)) or "no rows"
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"Error: {error}"


if __name__ == "__main__":
    mcp.run(show_banner=False, log_level="ERROR")
