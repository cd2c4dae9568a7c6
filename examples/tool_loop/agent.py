"""A data analyst: a tool-calling loop in LangGraph."""

import sqlite3
from typing import Annotated

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, tools_condition


class State(MessagesState):
    """The conversation, and the database it is about."""

    db_path: str


@tool
def query_db(sql: str, db_path: Annotated[str, InjectedState("db_path")]) -> str:
    """Execute a SELECT statement on the company database and get its rows."""
    try:
        with sqlite3.connect(f"file:{db_path}?mode=ro", uri=True) as db:
            return str(db.execute(sql).fetchmany(10))
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"Error: {error}"


llm = ChatOpenAI(model="gpt-5-mini")
model = llm.bind_tools([query_db])


async def analyst(state: State):
    """One turn of the model."""
    with sqlite3.connect(f"file:{state['db_path']}?mode=ro", uri=True) as db:
        tables = "\n".join(sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"))
    system = (
        "You are a data analyst. Look the answer up with query_db, then tell the user.\n\n"
        f"The database schema is:\n{tables}"
    )
    return {"messages": [await model.ainvoke([("system", system), *state["messages"]])]}


builder = StateGraph(State)
builder.add_node("analyst", analyst)
builder.add_node("tools", ToolNode([query_db]))
builder.add_edge(START, "analyst")
builder.add_conditional_edges("analyst", tools_condition)
builder.add_edge("tools", "analyst")
graph = builder.compile()
