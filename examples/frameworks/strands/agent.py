"""A SQL agent of Strands Agents, with its default model."""

import sqlite3

from strands import Agent, ToolContext, tool
from strands.hooks import BeforeInvocationEvent

INSTRUCTIONS = (
    "You write SQLite queries. Check each query with the tool sqlite_query. When the rows are right, reply with the "
    "query in a ```sql block."
)


@tool(context=True)
def sqlite_query(sql: str, tool_context: ToolContext) -> str:
    """Run a SQL query on the SQLite database.

    Args:
        sql: The query to run.
    """
    with sqlite3.connect(f"file:{tool_context.invocation_state['db_path']}?mode=ro", uri=True) as db:
        return "\n".join(str(row) for row in db.execute(sql).fetchmany(10)) or "no rows"


def add_tables(event: BeforeInvocationEvent) -> None:
    with sqlite3.connect(f"file:{event.invocation_state['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    event.agent.system_prompt = f"{INSTRUCTIONS}\n\nTables:\n" + "\n".join(ddl for (ddl,) in tables)


agent = Agent(name="SQL agent", tools=[sqlite_query], callback_handler=None)
agent.add_hook(add_tables, BeforeInvocationEvent)
