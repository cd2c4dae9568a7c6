"""``groundwire prepare``: check the gold queries of a download or a folder once, and write it as parquet.

A domain takes part with a method ``prepare(source, out)``, which returns the report of
:mod:`groundwire.domains.text_to_sql.prepared_folder`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from groundwire.domains._registry import get
from groundwire.domains.text_to_sql.prepared_folder import summary
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.terminal import Version

app = typer.Typer(add_completion=False)


@app.command()
def main(
    source: Annotated[Path, typer.Option(help="Folder with the data; for Spider also its zip")],
    out: Annotated[Path, typer.Option(help="Folder to write; replaced only if this command wrote it")],
    domain: Annotated[str, typer.Option(help="Domain of the data: spider, sqlite, bird or a plugin's")] = "spider",
    version: Version = False,
) -> None:
    """Check every gold query of a folder, and write parquet files, a report, and copies of its databases or links."""
    with exit_on_user_error(exit_code=1):
        try:
            report = get(domain).prepare(source, out)
        except OSError as error:
            cause = os.strerror(error.errno) if error.errno else str(error)
            file = error.filename2 or error.filename or out  # filename2: the target of a copy
            raise CommandError(f"preparing {out} failed: {cause} ({file}); it is unchanged.") from error
    say(summary(report, out))


if __name__ == "__main__":
    app()
