"""A text-to-SQL graph: write a query, run it, repair it when it fails."""

import re
import sqlite3
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

llm = ChatOpenAI(model="gpt-5-mini")


class State(TypedDict, total=False):
    question: str
    db_path: str
    schema: str
    sql: str
    error: str
    tries: int


def read_schema(state: State) -> State:
    with sqlite3.connect(f"file:{state['db_path']}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    return {"schema": "\n".join(ddl for (ddl,) in tables), "tries": 0}


async def write_query(state: State) -> State:
    reply = await llm.ainvoke(
        [
            ("system", f"You are a SQLite expert. The database has these tables:\n\n{state['schema']}"),
            ("user", f"Write a query that answers: {state['question']}\nReply with the query in a ```sql block."),
        ]
    )
    return {"sql": sql_of(reply.text)}


def run_query(state: State) -> State:
    try:
        with sqlite3.connect(f"file:{state['db_path']}?mode=ro", uri=True) as db:
            db.execute(state["sql"]).fetchmany(10)
    except (sqlite3.Error, sqlite3.Warning) as error:
        return {"error": str(error), "tries": state["tries"] + 1}
    return {"error": ""}


async def fix_query(state: State) -> State:
    reply = await llm.ainvoke(
        [
            ("system", f"You are a SQLite expert. The database has these tables:\n\n{state['schema']}"),
            (
                "user",
                f"Question: {state['question']}\nThis query failed:\n```sql\n{state['sql']}\n```\n"
                f"Error: {state['error']}\nReply with the corrected query in a ```sql block.",
            ),
        ]
    )
    return {"sql": sql_of(reply.text)}


def sql_of(text: str) -> str:
    block = re.search(r"```(?:sql)?\s*(.*?)(?:```|$)", text, re.DOTALL)
    return (block[1] if block else text).strip()


def after_run(state: State) -> str:
    return "fix_query" if state["error"] and state["tries"] < 2 else END


builder = StateGraph(State)
builder.add_node("read_schema", read_schema)
builder.add_node("write_query", write_query)
builder.add_node("run_query", run_query)
builder.add_node("fix_query", fix_query)
builder.add_edge(START, "read_schema")
builder.add_edge("read_schema", "write_query")
builder.add_edge("write_query", "run_query")
builder.add_conditional_edges("run_query", after_run, ["fix_query", END])
builder.add_edge("fix_query", "run_query")
graph = builder.compile()
