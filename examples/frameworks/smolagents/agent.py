"""A ToolCallingAgent of smolagents with a SQL tool."""

import sqlite3

from smolagents import OpenAIModel, Tool, ToolCallingAgent

model = OpenAIModel("gpt-5-mini")


class SQLEngine(Tool):
    name = "sql_engine"
    description = "Runs a SQL query on the database and returns the rows as text."
    inputs = {"query": {"type": "string", "description": "The query to perform. This should be correct SQL."}}
    output_type = "string"

    def __init__(self, db_path: str):
        super().__init__()
        self.db_path = db_path

    def forward(self, query: str) -> str:
        with sqlite3.connect(f"file:{self.db_path}?mode=ro", uri=True) as db:
            return "\n".join(str(row) for row in db.execute(query).fetchmany(10)) or "no rows"


def answer(task: dict) -> str:
    """The query that answers the question."""
    with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    agent = ToolCallingAgent(tools=[SQLEngine(task["db_path"])], model=model, max_steps=4, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = (
        "You answer questions with SQL. Try a query with sql_engine, then call final_answer with the query itself.\n\n"
        "Tables:\n" + "\n".join(ddl for (ddl,) in tables)
    )
    return str(agent.run(task["question"]))
