"""A crew of one: a data analyst with a SQL tool."""

import sqlite3

from crewai import Agent, Crew, Task
from crewai.tools import BaseTool
from pydantic import BaseModel


class Query(BaseModel):
    sql: str


class SQLTool(BaseTool):
    name: str = "run_sql"
    description: str = "Runs a SQL query on the SQLite database and returns the first rows."
    db_path: str

    def _run(self, query: str) -> str:
        try:
            with sqlite3.connect(f"file:{self.db_path}?mode=ro", uri=True) as db:
                return "\n".join(str(row) for row in db.execute(query).fetchmany(10)) or "no rows"
        except (sqlite3.Error, sqlite3.Warning) as error:
            return f"Error: {error}"


def answer(task: dict) -> str:
    """The query that answers the question."""
    with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    analyst = Agent(
        role="Data analyst",
        goal="Answer questions about a SQLite database with one SQL query",
        backstory="You have written SQL for twenty years and test every query before you hand it over.",
        tools=[SQLTool(db_path=task["db_path"])],
        llm="gpt-5-mini",
        max_iter=5,
    )
    write = Task(
        description="Question: {question}\n\nTables:\n{schema}",
        expected_output="The SQL query that answers the question",
        output_pydantic=Query,
        agent=analyst,
    )
    crew = Crew(agents=[analyst], tasks=[write])
    result = crew.kickoff({"question": task["question"], "schema": "\n".join(ddl for (ddl,) in tables)})
    return result.pydantic.sql if result.pydantic else result.raw
