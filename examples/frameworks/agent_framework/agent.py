"""A SQL agent of the Microsoft Agent Framework."""

import sqlite3
from typing import Annotated

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient

client = OpenAIChatClient(model="gpt-5-mini")


async def answer(task: dict) -> str:
    """The reply to the question, with the query."""
    with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()

    def query_database(query: Annotated[str, "The SQLite query to run"]) -> str:
        """Run a query on the database."""
        try:
            with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
                return "\n".join(str(row) for row in db.execute(query).fetchmany(10)) or "no rows"
        except (sqlite3.Error, sqlite3.Warning) as error:
            return f"Error: {error}"

    agent = Agent(
        client=client,
        name="DatabaseAgent",
        instructions=(
            "You translate questions into SQLite queries. Run your query with the tool before you answer. "
            "Answer with the query in a ```sql block.\n\nTables:\n" + "\n".join(ddl for (ddl,) in tables)
        ),
        tools=[query_database],
    )
    response = await agent.run(task["question"])
    return response.text
