"""What a shell offers for the value of an option or argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from groundwire import adapters, domains, rewards
from groundwire.train.artifacts.run_dir import run_dirs
from groundwire.train.config.presets import PRESETS, VERL_PRESETS

RunDirectory = Annotated[
    str, typer.Argument(help="Run directory, e.g. runs/latest", metavar="RUN_DIR", autocompletion=run_dirs)
]


def _models(incomplete: str) -> list[str]:
    from groundwire.train.policy.pretrained.locate import NAMES

    return [*NAMES, *run_dirs(incomplete)]


_VALUES: dict[str, Callable[[str], Iterable[str]]] = {
    "backend": lambda _: adapters.names(),
    "config": lambda _: (*PRESETS, *VERL_PRESETS),
    "domain": lambda _: domains.names(),
    "model": _models,
    "reward": lambda _: rewards.names(),
}


def values_of(name: str) -> Callable[[str], list[str]] | None:
    """The function that offers values of the setting ``name``; None: the shell offers files."""
    offer = _VALUES.get(name)
    if offer is None:
        return None

    def offered(incomplete: str) -> list[str]:
        return [value for value in offer(incomplete) if value.startswith(incomplete)]

    return offered
