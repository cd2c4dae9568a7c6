"""The command line of the programs that generate the bundled data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.terminal import Version, spinner

__all__ = ["run_generator"]


def run_generator(generate: Callable[..., dict[str, int]]) -> None:
    """Run ``generate(out, seed=seed)`` with the options of the command line, and print the counts that it returns."""

    def main(
        out: Annotated[Path, typer.Option(help="The folder to write")],
        seed: Annotated[int, typer.Option(help="Another seed, other data")] = 0,
        version: Version = False,
    ) -> None:
        """Generate the bundled data of this domain."""
        with exit_on_user_error(), spinner("generating"):
            counts = generate(out, seed=seed)
        typer.echo(f"{out}: {', '.join(f'{name} {count}' for name, count in counts.items())}")

    typer.run(main)
