"""What programs of the tests import, imported once in the process that they are forked from (see programs.py)."""

import gc
import importlib

gc.disable()
for _name in (
    "adapters.langgraph",
    "adapters.openai_agents",
    "train.local.trainer",
    "train.told",
    "train.curve",
    "agents.mcp",
    "tools._mcp_server",
    "typer.core",
    "pyarrow.dataset",  # with pandas
    "openai.resources.chat.completions",  # the client imports it at its first use
    "matplotlib.backends.backend_agg",
):
    importlib.import_module(_name)

# Each program would look through all of this for garbage, and to look at a page is to copy it.
gc.freeze()
gc.enable()
