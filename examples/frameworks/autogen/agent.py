"""A SQL assistant of AutoGen's AgentChat."""

import sqlite3

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

model_client = OpenAIChatCompletionClient(model="gpt-5-mini")


async def answer(task: dict) -> str:
    """The reply to the question, with the query."""
    db = sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True)
    tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()

    async def execute_sql(sql: str) -> str:
        """Execute a SQL query on the database and return the rows."""
        try:
            return "\n".join(str(row) for row in db.execute(sql).fetchmany(10)) or "no rows"
        except (sqlite3.Error, sqlite3.Warning) as error:
            return f"Error: {error}"

    assistant = AssistantAgent(
        "sql_assistant",
        model_client=model_client,
        tools=[execute_sql],
        max_tool_iterations=4,
        reflect_on_tool_use=True,
        system_message=(
            "You are a helpful data assistant. Use the tool execute_sql to try your query, then reply with the final "
            "query in a ```sql block.\n\nSchema:\n" + "\n".join(ddl for (ddl,) in tables)
        ),
    )
    result = await assistant.run(task=task["question"])
    db.close()
    return result.messages[-1].to_text()
