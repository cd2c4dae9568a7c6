"""A text-to-SQL workflow of LlamaIndex: write a query, run it, correct it when it fails."""

import re
import sqlite3

from llama_index.core.llms import ChatMessage
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai import OpenAI


class Asked(StartEvent):
    question: str
    db_path: str


class Written(Event):
    sql: str


class Failed(Event):
    error: str


class TextToSQL(Workflow):
    llm = OpenAI(model="gpt-5-mini")

    @step
    async def write(self, ctx: Context, event: Asked) -> Written:
        with sqlite3.connect(f"file:{event.db_path}?mode=ro", uri=True) as db:
            tables = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
        messages = [
            ChatMessage(
                role="system",
                content="Reply to each question with a SQLite query in a ```sql block.\n\nTables:\n"
                + "\n".join(ddl for (ddl,) in tables),
            ),
            ChatMessage(role="user", content=event.question),
        ]
        await ctx.store.set("db_path", event.db_path)
        return Written(sql=await self.ask(ctx, messages))

    @step
    async def run_query(self, ctx: Context, event: Written) -> Failed | StopEvent:
        try:
            with sqlite3.connect(f"file:{await ctx.store.get('db_path')}?mode=ro", uri=True) as db:
                db.execute(event.sql).fetchmany(10)
        except (sqlite3.Error, sqlite3.Warning) as error:
            if len(await ctx.store.get("messages")) < 6:
                return Failed(error=str(error))
        return StopEvent(result=event.sql)

    @step
    async def correct(self, ctx: Context, event: Failed) -> Written:
        complaint = ChatMessage(role="user", content=f"Error: {event.error}\nReply with the corrected query.")
        return Written(sql=await self.ask(ctx, [*await ctx.store.get("messages"), complaint]))

    async def ask(self, ctx: Context, messages: list[ChatMessage]) -> str:
        message = (await self.llm.achat(messages)).message
        await ctx.store.set("messages", [*messages, message])
        block = re.search(r"```(?:sql)?\s*(.*?)(?:```|$)", message.content or "", re.DOTALL)
        return (block[1] if block else message.content or "").strip()


workflow = TextToSQL(timeout=120)
