"""What programs of the tests import, imported once in the process that they are forked from (see programs.py)."""

import gc
import importlib

gc.disable()
for _name in (
    "groundwire.adapters.sql_agents.langgraph",
    "groundwire.adapters.sql_agents.openai_agents",
    "groundwire.train.local.trainer",
    "groundwire.train.rollouts.agent",
    "groundwire.train.report.plots",
    "agents.mcp",
    "groundwire.tools.mcp_sql.server",
    "typer.core",
    "pyarrow.dataset",  # with pandas
    "openai.resources.chat.completions",  # the client imports it at its first use
    "matplotlib.backends.backend_agg",
):
    importlib.import_module(_name)

# Each program would look through all of this for garbage, and to look at a page is to copy it.
gc.freeze()
gc.enable()
