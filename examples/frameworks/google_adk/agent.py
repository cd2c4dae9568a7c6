"""A SQL agent of Google's Agent Development Kit."""

import sqlite3

from google.adk.agents import LlmAgent
from google.adk.agents.readonly_context import ReadonlyContext
from google.adk.tools import ToolContext


def run_sql(query: str, tool_context: ToolContext) -> dict:
    """Runs a SQL query on the SQLite database.

    Args:
        query: The SELECT statement.

    Returns:
        The status, and the rows or the error message.
    """
    try:
        with sqlite3.connect(f"file:{tool_context.state['db_path']}?mode=ro", uri=True) as db:
            return {"status": "success", "rows": [list(row) for row in db.execute(query).fetchmany(10)]}
    except (sqlite3.Error, sqlite3.Warning) as error:
        return {"status": "error", "error_message": str(error)}


def instruction(context: ReadonlyContext) -> str:
    with sqlite3.connect(f"file:{context.state['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    return (
        "Answer the user's question with a SQL query. Test it with run_sql, then reply with the query in a ```sql "
        "block.\n\nTables:\n" + "\n".join(ddl for (ddl,) in tables)
    )


root_agent = LlmAgent(name="sql_agent", model="gemini-3-flash-preview", instruction=instruction, tools=[run_sql])
