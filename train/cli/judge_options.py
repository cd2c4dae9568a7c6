"""Options of the judge and of ``--json``, which several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire import rewards
from groundwire.rewards.judge.settings import parse_settings
from groundwire.tools.errors import CommandError

__all__ = ["JsonFile", "JudgeBaseUrl", "JudgeModel", "JudgePairs", "get_reward", "write_json"]

JudgeModel = Annotated[str | None, typer.Option(help="For rewards with a judge: its model. Default: the local grader")]
JudgeBaseUrl = Annotated[
    str | None, typer.Option(help="The OpenAI-compatible endpoint of the judge's model", metavar="URL")
]
JudgePairs = Annotated[
    list[str] | None, typer.Option(help="A setting of the judge, e.g. max_usd=5", metavar="NAME=VALUE")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the whole result to this file")]


def get_reward(
    name: str, *, judge_model: str | None, judge_base_url: str | None, judge: Sequence[str] | None
) -> tuple[rewards.Reward, list[str]]:
    """The reward, and notes about it for the user.

    Raises :class:`groundwire.tools.plugins.UnknownNameError` or :class:`rewards.JudgeSettingsError`.
    """
    given = parse_settings(judge or [], model=judge_model, base_url=judge_base_url)
    settings = rewards.JudgeSettings.of(given or {})
    notes = rewards.notes(name, judge=settings)
    if given and not notes:
        raise rewards.JudgeSettingsError(f"reward {name!r} uses no judge: leave out the judge's options")
    return rewards.get(name, judge=settings), notes


def write_json(file: Path, value: Any) -> None:
    """Write ``value`` for ``--json``."""
    try:
        file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {file} cannot be written: {error.strerror}") from error
