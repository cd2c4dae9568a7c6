"""``groundwire runs``: all runs of a folder as one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.terminal import Version, format_table
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.evaluation.metrics import format_accuracy
from groundwire.train.evaluation.run_reader import before_after, model_name

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COLUMNS = ("Run", "Agent", "Tasks", "Model", "Step", "Reward", "Accuracy", "State")


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="Folder of run directories", metavar="DIR")] = Path("runs"),
    name: Annotated[str, typer.Option("--name", help="Only runs with this text in name, agent or model")] = "",
    form: Annotated[Literal["text", "markdown"], typer.Option("--format", help="Format of the table")] = "text",
    version: Version = False,
) -> None:
    """List the runs of a folder, the newest last; groundwire evaluate RUN RUN --compare compares two of them."""
    with exit_on_user_error():
        paths = sorted(path.parent for path in folder.glob("*/config.json") if not path.parent.is_symlink())
        rows = [_row(path) for path in paths]
        rows = [row for row in rows if any(name in cell for cell in (row[0], row[1], row[3]))]
        if not rows:
            which = f" whose name, agent or model contains {name!r}" if name else ""
            raise RunDirError(f"{folder} has no run{which}: groundwire train writes one into runs/")
        say(format_table(_COLUMNS, rows, form))


def _row(path: Path) -> list[str]:
    try:
        run = RunDir.open(path)
        config, lines = run.config(), run.metrics()
    except RunDirError as error:
        return [path.name, *["-"] * (len(_COLUMNS) - 2), str(error)]
    steps = [line for line in lines if line["step"] > 0]
    last: dict[str, Any] = steps[-1] if steps else {}
    accuracy = before_after(lines, "validation")
    return [
        path.name,
        str(config.get("agent") or config.get("backend")),
        str(config.get("domain")),
        model_name(str(config.get("model"))),
        f"{last.get('step', 0)} of {config.get('steps')}",
        format_accuracy(last.get("reward")),
        " → ".join(format_accuracy(accuracy[when]) for when in ("before", "after") if when in accuracy) or "-",
        "ended" if run.has_final_files() else "not ended",
    ]


if __name__ == "__main__":
    app()
