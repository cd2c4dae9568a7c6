"""``groundwire traces``: what exported traces have in them, and tasks with a reward made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.terminal import Mask, Version, spinner
from groundwire.train.traces.read import read_traces
from groundwire.train.traces.summary import Summary

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    files: Annotated[list[str], typer.Argument(help="Files of exported traces, or folders of them", metavar="FILE...")],
    write: Annotated[
        Path | None,
        typer.Option(help="Write tasks.jsonl and reward.py into this folder, and audit them", metavar="DIR"),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write the report page, with some of the traces", metavar="FILE")
    ] = None,
    mask: Mask = True,
    version: Version = False,
) -> None:
    """Show what agents have done, from the traces of any tracer; make tasks and a reward of it."""
    with exit_on_user_error():
        traces = read_traces(*files, mask=mask)
        page = None
        if report is not None:
            from groundwire.train.report.pages import TracesPage

            page = TracesPage()
        with spinner("reading the traces"):
            summary = Summary(page.watch(traces) if page else traces)
        lines = list(summary.lines(traces))
        say("\n".join(lines))
        if report and page:
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(page.html(lines), encoding="utf-8")
            say(f"{report} ({report.stat().st_size / 1e6:.1f} MB)")
        if write is None:
            return
        from groundwire.train.traces.tasks import write_tasks

        with spinner("writing the tasks"):
            written = write_tasks(write, traces)
        say("\n".join(["", *written.lines, ""]))
        command = f"groundwire audit --domain {write / 'tasks.jsonl'} --reward {write / 'reward.py'}:reward"
        if written.is_draft:
            say(f"Edit the rubric, name a judge (JUDGE_BASE_URL, JUDGE_MODEL), then: {command}")
            return
        from groundwire.train.audit import examine

        result = examine(str(write / "tasks.jsonl"), f"{write / 'reward.py'}:reward")
        say("\n".join(result.lines))


if __name__ == "__main__":
    app()
