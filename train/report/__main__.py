"""``python -m train.report``: a run as one HTML page, and its curves as PNGs.

The page is made of the run's own files, at any moment of the run: nothing is kept for it beforehand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from groundwire.tools.terminal import Version, spinner
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.report.build import build
from groundwire.train.report.plots import draw_pngs

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run_dir: Annotated[str, typer.Argument(help="The run's folder, e.g. runs/latest")],
    output: Annotated[
        Path | None, typer.Option(help="The page. Default: report.html in the run's folder", metavar="FILE")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve it on this machine, and load it again as the run goes on")
    ] = False,
    port: Annotated[int, typer.Option(help="With --watch: the port; 0 is any that is free", min=0, max=65535)] = 0,
    version: Version = False,
) -> None:
    """Write a run's report: one page that needs nothing else, and a folder of PNGs beside it."""
    page = output or Path(run_dir) / "report.html"
    try:
        run = RunDir.open(run_dir)
        if watch:
            from groundwire.train.report.watch import serve

            serve(run, port=port, say=typer.echo)
            return
        with spinner("reading the run"):
            report = build(run)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(report.html, encoding="utf-8")
        with spinner("drawing"):
            pngs = draw_pngs(report.charts, page.with_suffix(""))
        typer.echo(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
        if pngs:
            typer.echo(f"{page.with_suffix('')}/: {', '.join(png.name for png in pngs)}")
    except RunDirError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        about = f"--port {port}" if watch else error.filename or page
        typer.echo(f"error: {error.strerror or error} ({about})", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("stopped")


if __name__ == "__main__":
    app()
