"""A SQL agent of Google's Agent Development Kit, with an OpenAI model through LiteLLM."""

import re
import sqlite3

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.tools import ToolContext
from google.genai import types


def run_sql(query: str, tool_context: ToolContext) -> dict:
    """Runs a SQL query on the SQLite database.

    Args:
        query: The SELECT statement.

    Returns:
        The status, and the rows or the error message.
    """
    try:
        with sqlite3.connect(f"file:{tool_context.state['db_path']}?mode=ro", uri=True) as db:
            return {"status": "success", "rows": [list(row) for row in db.execute(query).fetchmany(10)]}
    except (sqlite3.Error, sqlite3.Warning) as error:
        return {"status": "error", "error_message": str(error)}


root_agent = LlmAgent(
    name="sql_agent",
    model=LiteLlm(model="openai/gpt-5-mini"),
    instruction=(
        "Answer the user's question with a SQL query. Test it with run_sql, then reply with the query in a ```sql "
        "block.\n\nTables:\n{schema}"
    ),
    tools=[run_sql],
)
runner = InMemoryRunner(root_agent, app_name="sql")


async def answer(task: dict) -> str:
    """The query that answers the question."""
    with sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    state = {"db_path": task["db_path"], "schema": "\n".join(ddl for (ddl,) in tables)}
    session = await runner.session_service.create_session(app_name="sql", user_id="user", state=state)
    text = ""
    message = types.Content(role="user", parts=[types.Part(text=task["question"])])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
        if event.is_final_response() and event.content:
            text = "".join(part.text or "" for part in event.content.parts or [])
    block = re.search(r"```(?:sql)?\s*(.*?)(?:```|$)", text, re.DOTALL)
    return (block[1] if block else text).strip()
