"""Terminal output that all commands share: the version, progress bars, a spinner.

Bars and colours appear only on a terminal. In a pipe, a file or CI, and with ``NO_COLOR`` (https://no-color.org), the
output is plain lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groundwire.tools.secrets import say, terminal_text
from groundwire.tools.text import visible

if os.environ.get("NO_COLOR"):
    # rich leaves out colours by itself, but not bold and dim, with which typer prints --help.
    os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def installed_version(package: str) -> str | None:
    """The version of an installed package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_duration(seconds: float) -> str:
    """Seconds in words: ``2 min 10 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def in_notebook() -> bool:
    """Whether this is the process of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def version() -> str:
    """The version of this project, as installed."""
    return installed_version("groundwire") or "unknown (not installed; pip install -e . gives it a version)"


def _show(wanted: bool) -> None:
    if wanted:
        say(f"groundwire {version()}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Show the version, and stop", callback=_show, is_eager=True, show_default=False),
]
"""The option ``--version`` of a command."""

Debug = Annotated[bool, typer.Option("--debug", help="Log everything, and show tracebacks")]
Mask = Annotated[bool, typer.Option("--mask/--no-mask", help="Whether keys and personal data in traces are replaced")]

TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the store's token; default: GROUNDWIRE_TOKEN, else the user's own", metavar="FILE"),
]
"""The option ``--token-file`` of a command that serves the store or connects to it."""


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A rich console; a ``quiet`` one prints nothing. A notebook is no terminal, and with ``NO_COLOR`` nothing is.

    What is printed goes through :func:`show_line`.
    """
    from rich.console import Console

    force = False if os.environ.get("NO_COLOR") or in_notebook() else None
    return Console(
        stderr=stderr, quiet=quiet, highlight=False, soft_wrap=True, force_terminal=force, force_jupyter=False
    )


def as_text(text: str, style: str = "", *, markup: bool = False, one_line: bool = False) -> Text:
    """``text`` for a rich console as it is, without secrets and what steers a terminal.

    With ``markup`` that of rich is read: values in such a text need ``rich.markup.escape``.
    """
    from rich.text import Text

    shown = terminal_text(text, one_line=one_line)
    return Text.from_markup(shown, style=style, emoji=False) if markup else Text(shown, style)


def show_line(output: Console, text: str, style: str = "", *, markup: bool = False, end: str = "\n") -> None:
    """Print ``text`` on a rich console; see :func:`as_text`."""
    output.print(as_text(text, style, markup=markup), end=end, soft_wrap=True)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal. Yields a function that may set its description, and advances it (by one)."""
    output = console(stderr=True)
    if not output.is_terminal:  # a disabled bar still prints an empty line
        yield lambda *_, **__: None
        return
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=output, transient=True) as bar:
        task = bar.add_task(escape(terminal_text(description, one_line=True)), total=total)
        yield lambda text=None, by=1: bar.update(
            task, advance=by, description=text and escape(terminal_text(text, one_line=True))
        )


@contextmanager
def spinner(description: str) -> Iterator[None]:
    """Show a spinner on a terminal, for work whose length is unknown."""
    output = console(stderr=True)
    with output.status(as_text(description)) if output.is_terminal else nullcontext():
        yield


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], form: str) -> str:
    """A table as ``markdown`` or as ``text`` in columns; each cell is one line."""
    rows = [[visible(cell, one_line=True) for cell in row] for row in rows]
    if form == "markdown":
        escaped = ([cell.replace("|", "\\|") for cell in row] for row in [columns, ["---"] * len(columns), *rows])
        return "\n".join(f"| {' | '.join(row)} |" for row in escaped)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in [columns, *rows])
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
