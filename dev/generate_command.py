"""The command line of the programs that generate the bundled data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.terminal import Version, spinner

__all__ = ["Out", "Seed", "print_counts", "run_generator"]

Out = Annotated[Path, typer.Option(help="The folder to write")]
Seed = Annotated[int, typer.Option(help="Another seed, other data")]


def run_generator(generate: Callable[..., dict[str, int]]) -> None:
    """Run ``generate(out, seed=seed)`` with the options of the command line, and print the counts that it returns."""

    def main(out: Out, seed: Seed = 0, version: Version = False) -> None:
        """Generate the bundled data of this domain."""
        print_counts(out, lambda: generate(out, seed=seed))

    typer.run(main)


def print_counts(out: Path, make: Callable[[], dict[str, int]]) -> None:
    """Call ``make``, which writes ``out``, and print the counts that it returns."""
    with exit_on_user_error(), spinner("generating"):
        counts = make()
    typer.echo(f"{out}: {', '.join(f'{name} {count}' for name, count in counts.items())}")
