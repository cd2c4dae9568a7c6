"""An agent of LangChain with a SQL tool and a prompt that has the tables."""

import sqlite3
from dataclasses import dataclass

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain.tools import ToolRuntime, tool


@dataclass
class Context:
    db_path: str

    def execute(self, sql: str) -> list[tuple]:
        with sqlite3.connect(f"file:{self.db_path}?mode=ro", uri=True) as db:
            return db.execute(sql).fetchmany(50)


@tool
def run_query(query: str, runtime: ToolRuntime[Context]) -> str:
    """Run a SQLite query and return its rows."""
    try:
        return "\n".join(str(row) for row in runtime.context.execute(query)[:10]) or "no rows"
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"Error: {error}"


@dynamic_prompt
def with_tables(request: ModelRequest) -> str:
    tables = request.runtime.context.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL")
    return (
        "You are an agent designed to interact with a SQL database. Run a query, look at its rows, and correct it if "
        "it fails. Then reply with the query in a ```sql block.\n\nTables:\n" + "\n".join(ddl for (ddl,) in tables)
    )


agent = create_agent(
    "openai:gpt-5-mini", tools=[run_query], middleware=[with_tables], context_schema=Context, name="sql_agent"
)
