"""``groundwire``: all commands under one name, with shell completion.

The commands are the programs that ``python -m`` runs, with their own options. Each is imported when it is named and not
before: to list them takes no longer than to import this file.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from groundwire.tools.errors import exit_on_user_error, named_layer
from groundwire.tools.terminal import Version

COMMANDS = {
    "init": ("groundwire.train.init", "Begin: write the settings, tasks and reward for the agent in a folder"),
    "look": ("groundwire.train.run:look", "Run ten tasks without training, and say whether training can work"),
    "train": ("groundwire.train.run:train_app", "Train the model behind an agent, as groundwire.toml says"),
    "run": ("groundwire.train.run", "The same without groundwire.toml: every setting is an option"),
    "sft": ("groundwire.train.sft.__main__", "Fine-tune a model on gold answers, before reinforcement learning"),
    "evaluate": ("groundwire.train.evaluate", "Evaluate a model under an agent; tabulate and compare runs"),
    "serve": ("groundwire.train.serve", "Serve a trained model as an OpenAI-compatible endpoint"),
    "report": ("groundwire.train.report.__main__", "Show a run as one HTML page"),
    "runs": ("groundwire.train.runs", "List the runs of a folder"),
    "why": ("groundwire.train.why", "Explain why a rollout or a run gave nothing to train on"),
    "doctor": ("groundwire.train.doctor", "Check that this machine is ready"),
    "traces": ("groundwire.train.from_traces", "Show what is in exported traces; make tasks and a reward of them"),
    "learn": ("groundwire.train.learn.__main__", "Train on exported traces, and say whether the model is better"),
    "export": ("groundwire.train.export", "Write rollouts or traces as ATIF, OpenAI chats or OpenTelemetry's spans"),
    "audit": ("groundwire.train.audit", "Check whether a reward is fit to train on"),
    "conformance": ("groundwire.train.conformance", "Check that a gateway loses, masks or invents no token"),
    "replay": ("groundwire.train.replay", "Run rollouts again, with every call answered from the record"),
    "rescore": ("groundwire.train.rescore", "Score a run's rollouts with another reward"),
    "prepare": ("groundwire.domains.prepare", "Check the gold queries of a folder and write it as parquet"),
    "store": ("groundwire.train.store.__main__", "Run a Lightning store in its own process"),
    "runner": ("groundwire.train.runner", "Run agents for a trainer in another process"),
    "mcp-sql": ("groundwire.tools.mcp_sql.__main__", "Serve read-only SQL over MCP"),
}
"""The module of each command, with the name of its app if that is not ``app``, and its line in ``--help``."""


class _Commands(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, text) in COMMANDS.items():
            self.add_command(TyperCommand(name=name, help=text))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the named command."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _load(str(name)), rest


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name][0].partition(":")
    with exit_on_user_error(imports=True), named_layer("train"):
        command = getattr(import_module(module), attribute or "app")
    return typer.main.get_command(command)


app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False, rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def main(version: Version = False) -> None:
    """Train the model behind your own agent."""
    sys.path.insert(0, "")  # as python -m has it: --agent my_module:my_function is in this folder


if __name__ == "__main__":
    app(prog_name="groundwire")
