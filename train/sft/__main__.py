"""``groundwire sft``: fine-tune a causal model on gold queries, chats or accepted rollouts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.tools.errors import check_layer, exit_on_user_error
from groundwire.tools.startup import fast_import, read_env_file, setup_logging
from groundwire.tools.terminal import Debug, Version, spinner
from groundwire.train.cli.options import SettingsCommand, takes_settings
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.sft_settings import SFTSettings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=SettingsCommand)
@takes_settings(None, SFTSettings)
def main(
    settings: dict[str, Any],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, e.g. learning_rate=1e-4", metavar="[KEY=VALUE]...")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run of this folder", metavar="DIR")] = None,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Fine-tune a model on gold queries in the prompts that the agent sends, on chats, or on accepted rollouts.

    The result is a folder in Hugging Face's format: give its path, DIR/model, as --model to the other commands.
    """
    with exit_on_user_error(debug):
        read_env_file()
        given = {name: value for name, value in settings.items() if value is not None}
        for name, value in parse_overrides(overrides or []).items():
            table, _, option = name.partition(".")
            if table == "agent_options" and option:
                given[table] = {**given[table], option: value}
            else:
                given[name] = value
        check_layer("torch")
        checked = SFTSettings(**given)
        setup_logging(debug)
        # Before torch: threads that wait for each other busily take most of the CPU time if the cores are shared.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with spinner("starting"), fast_import():
            from groundwire.train.sft.run import train_and_print
        train_and_print(checked, resume=resume, given=given)


if __name__ == "__main__":
    app()
