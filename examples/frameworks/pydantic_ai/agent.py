"""A SQL agent with a typed answer, in Pydantic AI."""

import sqlite3
from dataclasses import dataclass

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, RunContext


@dataclass
class Deps:
    db_path: str

    def execute(self, sql: str) -> list[tuple]:
        with sqlite3.connect(f"file:{self.db_path}?mode=ro", uri=True) as db:
            return db.execute(sql).fetchall()


class SQLAnswer(BaseModel):
    """The query that answers the user's question."""

    sql_query: str = Field(description="One SQLite SELECT statement")


agent = Agent("openai:gpt-5-mini", deps_type=Deps, output_type=SQLAnswer, name="sql_gen", retries=2)


@agent.instructions
def instructions(ctx: RunContext[Deps]) -> str:
    tables = ctx.deps.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL")
    return "Write a SQL query that answers the user's question.\n\nDatabase schema:\n" + "\n".join(t for (t,) in tables)


@agent.output_validator
async def validate(ctx: RunContext[Deps], output: SQLAnswer) -> SQLAnswer:
    try:
        ctx.deps.execute(f"EXPLAIN {output.sql_query}")
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ModelRetry(f"Invalid query: {error}") from error
    return output
