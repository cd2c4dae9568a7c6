"""``python -m domains.spider.generate.neighbours``: the neighbours of the bundled databases, for ``spider_test_suite``.

They take a minute, so they are made apart from the data. Neighbours of data that has not changed are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groundwire.domains.spider.loader import BUNDLED, domain
from groundwire.domains.text_to_sql.neighbours import write_neighbours
from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.terminal import Version

_COUNT = 2


def main(
    folder: Annotated[Path, typer.Option(help="A folder that domains.spider.generate wrote")] = BUNDLED,
    version: Version = False,
) -> None:
    """Make the neighbours of generated databases."""
    with exit_on_user_error():
        data = domain.load(str(folder))
        tasks = [*data.train, *data.validation]
        placed = [(task, str(Path(task["db_path"]).relative_to(folder.resolve()))) for task in tasks]
        made = write_neighbours(folder, folder, placed, {}, _COUNT)
    typer.echo(f"{made['files']} neighbours; of {made['near_misses']} near misses they separate {made['separated']}")


if __name__ == "__main__":
    typer.run(main)
