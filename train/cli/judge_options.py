"""Options of the judge and of ``--json``, which several commands share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire import rewards
from groundwire.rewards import JudgeSettings, JudgeSettingsError
from groundwire.tools.errors import CommandError

__all__ = [
    "JsonFile",
    "JudgeBaseUrl",
    "JudgeModel",
    "JudgePairs",
    "get_reward",
    "parse_judge",
    "write_json",
]

_PANEL = "Judge"
JudgeModel = Annotated[
    str | None,
    typer.Option(help="For rewards with a judge: its model. Without it, the local grader", rich_help_panel=_PANEL),
]
JudgeBaseUrl = Annotated[
    str | None,
    typer.Option(help="The OpenAI-compatible endpoint of the judge's model", metavar="URL", rich_help_panel=_PANEL),
]
JudgePairs = Annotated[
    list[str] | None,
    typer.Option(
        help="A setting of the judge, e.g. max_usd=5; docs/settings.md lists them",
        metavar="NAME=VALUE",
        rich_help_panel=_PANEL,
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the whole result to this file")]


def parse_judge(
    *, judge_model: str | None = None, judge_base_url: str | None = None, judge: Iterable[str] | None = None
) -> dict[str, Any]:
    """The judge's settings that the three options give, by name, each checked alone.

    Raises :class:`rewards.JudgeSettingsError` for an unknown name or a wrong value.
    """
    given: dict[str, Any] = {"model": judge_model, "base_url": judge_base_url}
    given = {name: value for name, value in given.items() if value is not None}
    for pair in judge or ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise JudgeSettingsError(f"--judge {pair!r} is not a setting: write it as NAME=VALUE")
        name = JudgeSettings.names().get(name, name)
        if name in given:
            raise JudgeSettingsError(f"judge {name} is given twice: {given[name]!r} and {value!r}")
        given[name] = JudgeSettings.check_value(name, value)
    return given


def get_reward(
    name: str, *, judge_model: str | None, judge_base_url: str | None, judge: Sequence[str] | None
) -> tuple[rewards.Reward, list[str]]:
    """The reward, and notes about it for the user.

    Raises :class:`groundwire.tools.plugins.UnknownNameError` or :class:`rewards.JudgeSettingsError`.
    """
    given = parse_judge(judge_model=judge_model, judge_base_url=judge_base_url, judge=judge)
    settings = JudgeSettings(**given)
    notes = rewards.notes(name, judge=settings)
    return rewards.get(name, judge=settings), notes


def write_json(file: Path, value: Any) -> None:
    """Write ``value`` for ``--json``."""
    try:
        file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {file} cannot be written: {error.strerror}") from error
