"""LangChain's SQL agent: the toolkit lists the tables, reads their schema, checks a query and runs it."""

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_community.agent_toolkits import SQLDatabaseToolkit
from langchain_community.utilities import SQLDatabase

model = init_chat_model("openai:gpt-5-mini")

SYSTEM_PROMPT = """
You are an agent designed to interact with a SQL database.
Given an input question, create a syntactically correct {dialect} query to run,
then look at the results of the query and return the answer. Unless the user
specifies a specific number of examples they wish to obtain, always limit your
query to at most {top_k} results.

You can order the results by a relevant column to return the most interesting
examples in the database. Never query for all the columns from a specific table,
only ask for the relevant columns given the question.

You MUST double check your query before executing it. If you get an error while
executing a query, rewrite the query and try again.

DO NOT make any DML statements (INSERT, UPDATE, DELETE, DROP etc.) to the
database.

To start you should ALWAYS look at the tables in the database to see what you
can query. Do NOT skip this step.

Then you should query the schema of the most relevant tables.
"""


async def answer(task: dict) -> str:
    """The last query that the agent ran for the question."""
    db = SQLDatabase.from_uri(f"sqlite:///file:{task['db_path']}?mode=ro&uri=true")
    agent = create_agent(
        model,
        SQLDatabaseToolkit(db=db, llm=model).get_tools(),
        system_prompt=SYSTEM_PROMPT.format(dialect=db.dialect, top_k=100),
        name="sql_agent",
    )
    result = await agent.ainvoke({"messages": [{"role": "user", "content": task["question"]}]}, {"recursion_limit": 16})
    calls = [call for message in result["messages"] for call in getattr(message, "tool_calls", [])]
    queries = [call["args"].get("query", "") for call in calls if call["name"] == "sql_db_query"]
    return queries[-1] if queries else ""
