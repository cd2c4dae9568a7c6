"""What the commands of this room have in common: whose verdict it is, one sentence for what is wrong, a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from groundwire import rewards
from groundwire.rewards.judge.settings import parse_settings

__all__ = ["JsonFile", "JudgeBaseUrl", "JudgeModel", "JudgePairs", "chosen", "fail", "write_json"]

JudgeModel = Annotated[str | None, typer.Option(help="For rewards with a judge: its model. Default: the local grader")]
JudgeBaseUrl = Annotated[
    str | None, typer.Option(help="Where the judge's model is: any OpenAI-compatible endpoint", metavar="URL")
]
JudgePairs = Annotated[
    list[str] | None, typer.Option(help="A setting of the judge, e.g. max_usd=5", metavar="NAME=VALUE")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything that was found here")]


def chosen(
    name: str, *, judge_model: str | None, judge_base_url: str | None, judge: Sequence[str] | None
) -> tuple[rewards.Reward, list[str]]:
    """The reward, and what a user should be told of it.

    Raises :class:`groundwire.tools.plugins.UnknownNameError` or :class:`rewards.JudgeSettingsError`.
    """
    given = parse_settings(judge or [], model=judge_model, base_url=judge_base_url)
    settings = rewards.JudgeSettings.of(given or {})
    told = rewards.notes(name, judge=settings)
    if given and not told:
        raise rewards.JudgeSettingsError(f"a judge means nothing to reward {name!r}: leave out its options")
    return rewards.get(name, judge=settings), told


def fail(message: object, *, status: int = 2) -> NoReturn:
    """End with one sentence; what the user asked for cannot be done."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)


def write_json(file: Path, value: Any) -> None:
    """Write ``--json``, or end."""
    try:
        file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"--json {file} cannot be written: {error.strerror}")
