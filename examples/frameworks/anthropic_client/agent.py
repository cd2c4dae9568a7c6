"""A SQL agent with nothing but the Anthropic client: a loop over tool use, streamed."""

import sqlite3

from anthropic import AsyncAnthropic

client = AsyncAnthropic()

TOOLS = [
    {
        "name": "run_query",
        "description": "Run a SQLite query and see its first rows.",
        "input_schema": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "The query"}},
            "required": ["query"],
        },
    }
]


async def answer(task: dict) -> str:
    """The reply to the question, with the query."""
    db = sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True)
    tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(5):
        async with client.messages.stream(
            model="claude-sonnet-5",
            max_tokens=1024,
            system="You are a SQL expert. Try queries with run_query. When you are sure, reply with the final query in "
            "a ```sql block.\n\n" + "\n".join(ddl for (ddl,) in tables),
            messages=messages,
            tools=TOOLS,
        ) as stream:
            message = await stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        results = []
        for block in message.content:
            if block.type == "tool_use":
                try:
                    rows = db.execute(str(block.input["query"])).fetchmany(10)
                    result = "\n".join(str(row) for row in rows) or "no rows"
                except (sqlite3.Error, sqlite3.Warning, KeyError) as error:
                    result = f"Error: {error}"
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        if not results:
            break
        messages.append({"role": "user", "content": results})
    db.close()
    return "".join(block.text for block in message.content if block.type == "text")
