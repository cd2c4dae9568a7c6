"""A SQL agent with nothing but the OpenAI client: a loop over tool calls."""

import json
import sqlite3

from openai import AsyncOpenAI

client = AsyncOpenAI()

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run_query",
            "description": "Run a SQLite query and see its first rows.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
]


async def answer(task: dict) -> str:
    """The reply to the question, with the query."""
    db = sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True)
    tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    messages = [
        {
            "role": "system",
            "content": "You are a SQL expert. Try queries with run_query. When you are sure, reply with the final "
            "query in a ```sql block.\n\n" + "\n".join(ddl for (ddl,) in tables),
        },
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(5):
        response = await client.chat.completions.create(
            model="gpt-5-mini", messages=messages, tools=TOOLS, temperature=0.7
        )
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            try:
                rows = db.execute(json.loads(call.function.arguments)["query"]).fetchmany(10)
                result = "\n".join(str(row) for row in rows) or "no rows"
            except (sqlite3.Error, sqlite3.Warning, ValueError, KeyError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    db.close()
    return message.content or ""
