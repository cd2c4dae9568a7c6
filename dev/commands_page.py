"""``python -m dev.commands_page``: writes the commands of ``docs/commands.md`` anew, from what ``--help`` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from groundwire.rewards import JudgeSettings
from groundwire.train.cli.app import COMMANDS, app
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.sft_settings import SFTSettings

_WITH_SETTINGS = {"look", "train", "run", "sft", "evaluate", "runner", "learn"}
_EVERYWHERE = {"help", "version", "install_completion", "show_completion"}


def commands() -> str:
    """A section for each command: what it does, its arguments, and its options that are no settings."""
    group: Any = typer.main.get_command(app)
    return "\n".join(_section(name, group.resolve_command(None, [name])[1]) for name in COMMANDS)


def _section(name: str, command: Any) -> str:
    settings = {*RunConfig.model_fields, *SFTSettings.model_fields, "temperature", "agent_option"} | {
        f"judge_{field}" for field in JudgeSettings.model_fields
    }
    rows, named = [], 0
    for parameter in command.params:
        if name in _WITH_SETTINGS and parameter.name in settings:
            named += 1
        elif parameter.name not in _EVERYWHERE and (text := getattr(parameter, "help", "")):
            shown = ", ".join((*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                shown = parameter.metavar or parameter.name.upper()
            rows.append("| `{}` | {} |".format(*(" ".join(each.replace("|", "\\|").split()) for each in (shown, text))))
    sentence = f"{COMMANDS[name][1]}." + (f" {named} options are [settings](settings.md)." if named else "")
    table = "\n".join(("", "| | |", "|---|---|", *rows, "")) if rows else ""
    return f"## groundwire {name}\n\n{sentence}\n{table}"


def main() -> None:
    """Write the page."""
    page = Path("docs/commands.md")
    text = page.read_text(encoding="utf-8")
    page.write_text(text[: text.index("## groundwire init")] + commands(), encoding="utf-8")


if __name__ == "__main__":
    main()
