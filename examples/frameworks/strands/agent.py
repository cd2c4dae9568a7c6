"""A SQL agent of Strands Agents."""

import re
import sqlite3

from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(model_id="gpt-5-mini")


async def answer(task: dict) -> str:
    """The query that answers the question."""
    with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()

    @tool
    def sqlite_query(sql: str) -> str:
        """Run a SQL query on the SQLite database.

        Args:
            sql: The query to run.
        """
        with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
            return "\n".join(str(row) for row in db.execute(sql).fetchmany(10)) or "no rows"

    agent = Agent(
        name="SQL agent",
        model=model,
        tools=[sqlite_query],
        callback_handler=None,
        system_prompt=(
            "You write SQLite queries. Check each query with the tool sqlite_query. When the rows are right, reply "
            "with the query in a ```sql block.\n\nTables:\n" + "\n".join(ddl for (ddl,) in tables)
        ),
    )
    text = str(await agent.invoke_async(task["question"]))
    block = re.search(r"```(?:sql)?\s*(.*?)(?:```|$)", text, re.DOTALL)
    return (block[1] if block else text).strip()
