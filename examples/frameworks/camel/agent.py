"""A SQL agent of CAMEL."""

import sqlite3

from camel.agents import ChatAgent
from camel.messages import BaseMessage
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType, ModelType

model = ModelFactory.create(model_platform=ModelPlatformType.OPENAI, model_type=ModelType.GPT_4_1_MINI)


def answer(task: dict) -> str:
    """The reply to the question, with the query."""
    with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()

    def run_query(query: str) -> str:
        r"""Runs a query on the SQLite database.

        Args:
            query (str): The SELECT statement.

        Returns:
            str: The first rows, or an error.
        """
        try:
            with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
                return "\n".join(str(row) for row in db.execute(query).fetchmany(10)) or "no rows"
        except (sqlite3.Error, sqlite3.Warning) as error:
            return f"Error: {error}"

    agent = ChatAgent(
        system_message=BaseMessage.make_assistant_message(
            role_name="SQL expert",
            content="You are a SQL expert. Try your query with run_query, then reply with it in a ```sql block.\n\n"
            "Tables:\n" + "\n".join(ddl for (ddl,) in tables),
        ),
        model=model,
        tools=[FunctionTool(run_query)],
    )
    return agent.step(task["question"]).msgs[0].content
