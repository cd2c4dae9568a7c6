"""``groundwire``: every command under one name, so that a shell can complete it.

The commands are the programs that ``python -m`` runs, with their own options. Each is imported when it is named and not
before: to list them takes no longer than to import this file.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from groundwire.tools.terminal import Version

__all__ = ["COMMANDS", "app"]

COMMANDS = {
    "run": ("groundwire.train.run", "Train the model behind an agent"),
    "evaluate": ("groundwire.train.evaluate", "What a model can do under an agent; runs tabled and compared"),
    "report": ("groundwire.train.report.__main__", "A run as one HTML page"),
    "why": ("groundwire.train.why", "Why a rollout, or a run, taught nothing"),
    "doctor": ("groundwire.train.doctor", "Is this machine ready?"),
    "audit": ("groundwire.train.audit", "Is a reward fit to train on?"),
    "replay": ("groundwire.train.replay", "Score a run's rollouts with another reward"),
    "prepare": ("groundwire.domains.spider.prepare", "Check a Spider download and write it as parquet"),
    "store": ("groundwire.train.store.__main__", "A Lightning store as a process of its own"),
    "runner": ("groundwire.train.runner", "Run agents for a trainer elsewhere"),
    "mcp-sql": ("groundwire.tools.mcp_sql.__main__", "Read-only SQL over MCP"),
}
"""Command: the module that has it, and what the list of commands says of it."""


class _Commands(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, text) in COMMANDS.items():
            self.add_command(TyperCommand(name=name, help=text))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The one place where what was named is imported."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and _load(str(name)), rest


def _load(name: str) -> Any:
    return typer.main.get_command(import_module(COMMANDS[name][0]).app)


app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False, rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def main(version: Version = False) -> None:
    """Train the model behind your own agent."""
    sys.path.insert(0, "")  # as python -m has it: --agent my_module:my_function is in this folder


if __name__ == "__main__":
    app(prog_name="groundwire")
