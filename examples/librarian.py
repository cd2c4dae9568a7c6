"""A backend of your own: docs/your-agent.md says how it is registered."""

from agents import OpenAIChatCompletionsModel, RunContextWrapper, Runner, function_tool
from openai import AsyncOpenAI

from groundwire.adapters import Answer, Backend
from groundwire.adapters.sql_agents.openai_agents import SQLRun, build_sql_agent
from groundwire.adapters.sql_agents.prompts import write
from groundwire.adapters.sql_agents.toolkit import SQLToolkit
from groundwire.tools.plugins import hookimpl
from groundwire.tools.sql import run_query


@function_tool
async def count_rows(context: RunContextWrapper[SQLRun], table: str) -> str:
    """How many rows a table has."""
    query = f'SELECT count(*) FROM "{table}"'  # noqa: S608 - run_query only reads
    return str(run_query(context.context.database, query).rows[0][0])


class Librarian(Backend):
    """The project's SQL agent with one more tool."""

    agents = ("librarian",)
    reads_only = True

    async def run(self, question, endpoint):
        """The last query that the agent ran."""
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            headers = endpoint.agent_headers("librarian")
            model = OpenAIChatCompletionsModel(endpoint.model, client.with_options(default_headers=headers))
            agent = build_sql_agent(model, SQLToolkit(), lambda schema: write("tool_system", schema))
            mine = agent.clone(name="librarian", tools=[*agent.tools, count_rows])
            run = SQLRun(database=question.database)
            await Runner.run(mine, write("write", question.text), context=run)
        return Answer(text=run.last_query(), steps=run.steps)


@hookimpl
def register_backends(register):
    """Called by the entry point: ``--backend librarian``."""
    register("librarian", Librarian)
