"""A triage agent that hands questions about data to a SQL analyst."""

import sqlite3

from agents import Agent, RunContextWrapper, function_tool


def schema(db_path: str) -> str:
    with sqlite3.connect(f"file:{db_path}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    return "\n".join(ddl for (ddl,) in tables)


@function_tool
def run_sql(context: RunContextWrapper[dict], query: str) -> str:
    """Run a SQLite query and return its first rows.

    Args:
        query: The SELECT statement to run.
    """
    try:
        with sqlite3.connect(f"file:{context.context['db_path']}?mode=ro", uri=True) as db:
            rows = db.execute(query).fetchmany(10)
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"Error: {error}"
    return "\n".join(str(row) for row in rows) or "no rows"


def analyst_instructions(context: RunContextWrapper[dict], agent: Agent[dict]) -> str:
    return (
        "You answer questions with SQL. Try your query with run_sql, and correct it if it fails. "
        "Your final reply is only the query, in a ```sql block.\n\n"
        f"Tables:\n{schema(context.context['db_path'])}"
    )


sql_analyst = Agent[dict](
    name="SQL analyst",
    handoff_description="Answers questions about the data in the database.",
    instructions=analyst_instructions,
    tools=[run_sql],
)

triage_agent = Agent[dict](
    name="Triage agent",
    instructions="Hand every question about data to the SQL analyst. Answer small talk yourself.",
    handoffs=[sql_analyst],
)
