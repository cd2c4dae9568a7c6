"""``python -m dev.commands_page``: writes the commands of ``docs/commands.md`` anew, from what ``--help`` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from groundwire.rewards import JudgeSettings
from groundwire.train.cli.app import COMMANDS, app
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.sft_settings import SFTSettings

_SETTINGS = {field.description for record in (RunConfig, SFTSettings) for field in record.model_fields.values()}
_OTHER_SETTINGS = {"temperature", "agent_option"} | {f"judge_{name}" for name in JudgeSettings.model_fields} | {"judge"}
"""Options of settings that say less in ``--help`` than on the settings' page."""
_EVERYWHERE = {"help", "version", "install_completion", "show_completion"}
_SHARED = "## Several commands"
_MOST_NAMED = 20


def commands() -> str:
    """The arguments and options that several commands have; for each command what it does, and its others."""
    group: Any = typer.main.get_command(app)
    described = {name: _described(group.resolve_command(None, [name])[1]) for name in COMMANDS}
    users: dict[str, list[str]] = {}
    for name, lines in described.items():
        for line in lines:
            users.setdefault(line, []).append(name)
    shared = {line: names for line, names in users.items() if len(names) > 1}
    sections = [_SHARED, "\n".join(f"- {line} ({', '.join(names)})" for line, names in shared.items())]
    for name, lines in described.items():
        own = "\n".join(f"- {line}" for line in lines if line not in shared)
        sections += [f"## groundwire {name}", f"{COMMANDS[name][1]}.", *[own] * bool(own)]
    return "\n\n".join(sections) + "\n"


def _described(command: Any) -> list[str]:
    """A line for each argument and option, and one for those that are settings."""
    lines, settings = [], []
    for parameter in command.params:
        text = " ".join((getattr(parameter, "help", "") or "").split())
        if text in _SETTINGS or parameter.name in _OTHER_SETTINGS:
            settings.append(f"`{parameter.opts[0]}`")
        elif text and parameter.name not in _EVERYWHERE:
            shown = ", ".join((*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                shown = parameter.metavar or parameter.name.upper()
            lines.append(f"`{shown}`: {text}")
    named = f": {', '.join(settings)}" if len(settings) <= _MOST_NAMED else ""
    return [*lines, *[f"[Settings](settings.md){named}"] * bool(settings)]


def main() -> None:
    """Write the page."""
    page = Path("docs/commands.md")
    text = page.read_text(encoding="utf-8")
    page.write_text(text[: text.index(_SHARED)] + commands(), encoding="utf-8")


if __name__ == "__main__":
    main()
