"""A crew of one: a data analyst with a SQL tool."""

import sqlite3

from crewai import Agent, Crew, Task
from crewai.tools import BaseTool


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
        backstory="You test every query before you hand it over. These are the tables:\n\n{tables}",
        tools=[SQLTool(db_path=task["db_path"])],
        llm="gpt-5-mini",
        max_iter=5,
    )
    write = Task(description="{question}", expected_output="The SQL query in a ```sql block", agent=analyst)
    crew = Crew(agents=[analyst], tasks=[write])
    return crew.kickoff({"question": task["question"], "tables": "\n".join(ddl for (ddl,) in tables)}).raw
