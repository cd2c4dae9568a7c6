"""What all commands have in common on a terminal: their version, how they show that they are at work, and their end.

Bars and colours are for a person who looks at a terminal. Where nobody does (a pipe, a file, CI), or where ``NO_COLOR``
(https://no-color.org) says so, there are plain lines only: no escape code, and no line that a bar left behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if os.environ.get("NO_COLOR"):
    # rich leaves out colours by itself, but not bold and dim, with which typer prints --help.
    os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Version", "busy", "console", "interrupt", "leave", "progress", "version"]


def version() -> str:
    """The name and version of this project, as installed."""
    try:
        return f"groundwire {metadata.version('groundwire')}"
    except metadata.PackageNotFoundError:
        return "groundwire, not installed: pip install -e . knows its version"


def _show(wanted: bool) -> None:
    if wanted:
        typer.echo(version())
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Show the version, and stop", callback=_show, is_eager=True, show_default=False),
]
"""The option ``--version`` of a command."""


def console(*, stderr: bool = False) -> Console:
    """Where lines and bars go. It is no terminal where ``NO_COLOR`` is set."""
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(stderr=stderr, highlight=False, soft_wrap=True, force_terminal=False if plain else None)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, and what moves it on by one; given a text, it changes the description, too."""
    shown = console(stderr=True)
    if not shown.is_terminal:  # a bar that is disabled still prints an empty line
        yield lambda *_: None
        return
    from rich.progress import Progress

    with Progress(console=shown, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda text=None: bar.update(task, advance=1, description=text)


@contextmanager
def busy(description: str) -> Iterator[None]:
    """On a terminal, a sign of life while something takes its time that cannot be counted."""
    shown = console(stderr=True)
    if not shown.is_terminal:
        yield
        return
    with shown.status(description):
        yield


def interrupt(_signal: int, _frame: object) -> NoReturn:
    """A signal handler: what a scheduler's SIGTERM asks for is done as Ctrl-C's, cleanly."""
    raise KeyboardInterrupt


def leave(code: int) -> NoReturn:
    """End the process now, whatever its threads are at.

    Python's own end waits for some of them, and stops the others even in native code, which now and then aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
