"""``groundwire report``: a run as one HTML page, and its charts as PNG files."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.terminal import Version, spinner
from groundwire.train.artifacts.run_dir import LAST_RUN, RunDir, run_dirs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run_dir: Annotated[
        str, typer.Argument(help="Run directory, e.g. runs/latest", metavar="RUN_DIR", autocompletion=run_dirs)
    ] = LAST_RUN,
    output: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run directory", metavar="FILE")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page, which reloads when the run has new results")
    ] = False,
    port: Annotated[int, typer.Option(help="With --watch: the port; 0 takes any free one", min=0, max=65535)] = 0,
    version: Version = False,
) -> None:
    """Write a run's report: one self-contained page, and a folder of PNG files beside it."""
    page = output or Path(run_dir) / "report.html"
    with exit_on_user_error():
        from groundwire.train.report.build import build
        from groundwire.train.report.charts import draw_pngs

        run = RunDir.open(run_dir)
        if watch:
            from groundwire.train.report.live import served

            with suppress(KeyboardInterrupt), served(run, port=port) as address:  # Ctrl-C is the usual end
                say(f"{address} (Ctrl-C stops it)")
                threading.Event().wait()
            return
        pngs = page.with_suffix("")
        for path, kind, fits in ((page, "regular file", page.is_file()), (pngs, "folder", pngs.is_dir())):
            if output is None and (path.is_symlink() or (path.exists() and not fits)):
                raise CommandError(f"{path} is not a {kind}: delete it, or give --output FILE")
        with spinner("reading the run"):
            report = build(run)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(report.html, encoding="utf-8")
        with spinner("drawing"):
            drawn = draw_pngs(report.charts, pngs)
        say(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
        if drawn:
            say(f"{pngs}/: {', '.join(png.name for png in drawn)}")


if __name__ == "__main__":
    app()
