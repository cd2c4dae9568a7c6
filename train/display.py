"""What a person sees while a run goes on: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Display"]


class Display:
    """The trainer's watcher: a line for each step that ended, and on a terminal a bar for the one under way."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed}/{task.total} rollouts"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, text: str, total: int) -> None:
        """A batch of ``total`` rollouts begins."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=total)

    def tick(self) -> None:
        """One of them ended."""
        if self._task is not None:
            self._progress.advance(self._task)

    def step(self, line: dict[str, Any]) -> None:
        """A step ended: say what it did."""
        text = f"[bold]step {line['step']:>3}/{self._steps}[/bold]" if line["step"] else "[bold]before training[/bold]"
        if line.get("reward") is not None:
            text += f"  reward {line['reward']:.3f}  {line['tokens_per_s']:>5.0f} tokens/s"
        for name, label in (("validation", "greedy"), ("validation_sampled", "sampled")):
            if name in line:
                result = line[name]
                low, high = result["interval"]
                text += f"  [green]{label} accuracy {result['accuracy']:.3f}[/green]"
                text += f" \\[{low:.2f}, {high:.2f}] of {result['n']}"
        failures = line.get("failures") or {}
        if failures:
            text += (
                "  [red]failed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items())) + "[/red]"
            )
        self._console.print(text + f"  [dim]{line['wall_s']:.0f} s[/dim]", highlight=False, soft_wrap=True)
