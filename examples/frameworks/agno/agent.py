"""A SQL agent of Agno, with a model of Ollama."""

import sqlite3

from agno.agent import Agent
from agno.models.ollama import Ollama
from agno.run import RunContext


def run_sql(run_context: RunContext, query: str) -> str:
    """Run a query on the SQLite database and return its first rows.

    Args:
        query (str): The SELECT statement.
    """
    try:
        with sqlite3.connect(f"file:{run_context.dependencies['db_path']}?mode=ro", uri=True) as db:
            return "\n".join(str(row) for row in db.execute(query).fetchmany(10)) or "no rows"
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"Error: {error}"


def instructions(run_context: RunContext) -> str:
    with sqlite3.connect(f"file:{run_context.dependencies['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    return (
        "Answer questions with SQL. Try your query with run_sql, then reply with the query in a ```sql block.\n\n"
        "Tables:\n" + "\n".join(ddl for (ddl,) in tables)
    )


agent = Agent(name="SQL agent", model=Ollama(id="qwen3:8b"), instructions=instructions, tools=[run_sql])
