"""A pipeline of Haystack: a component reads the tables, an agent writes the query."""

import sqlite3
from typing import Annotated

from haystack import Pipeline, component
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.tools import tool


@component
class SchemaReader:
    @component.output_types(tables=str, database=str)
    def run(self, db_path: str):
        with sqlite3.connect(f"file:{db_path}?mode=ro", uri=True) as db:
            tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
        return {"tables": "\n".join(ddl for (ddl,) in tables), "database": db_path}


@tool(inputs_from_state={"database": "database"})
def execute_query(query: Annotated[str, "The SQLite query"], database: str) -> str:
    """Execute a query on the database."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
            return "\n".join(str(row) for row in db.execute(query).fetchmany(10)) or "no rows"
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"Error: {error}"


agent = Agent(
    chat_generator=OpenAIChatGenerator(model="gpt-5-mini"),
    tools=[execute_query],
    system_prompt=(
        '{% message role="system" %}You write SQLite queries. Execute your query, then reply with it in a ```sql block.'
        "\n\nTables:\n{{ tables }}{% endmessage %}"
    ),
    user_prompt='{% message role="user" %}{{ question }}{% endmessage %}',
    state_schema={"database": {"type": str}},
    max_agent_steps=5,
)
pipeline = Pipeline()
pipeline.add_component("schema_reader", SchemaReader())
pipeline.add_component("sql_agent", agent)
pipeline.connect("schema_reader.tables", "sql_agent.tables")
pipeline.connect("schema_reader.database", "sql_agent.database")
