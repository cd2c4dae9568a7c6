"""What a person sees of a run: a live line on a terminal, plain lines anywhere else, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from groundwire.adapters.tracing import calls_of_agents, triplets
from groundwire.train.evaluation.validation import shown
from groundwire.train.rollouts.outcome import RolloutResult

__all__ = ["Display", "show_rollouts", "show_summary"]


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
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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
                low, high = result["ci95"]
                text += f"  [green]{label} {result.get('metric_name', 'accuracy')} {shown(result['accuracy'])}[/green]"
                text += f" \\[{low:.2f}, {high:.2f}] of {result['n']}"
        failures = line.get("failures") or {}
        if failures:
            text += (
                "  [red]failed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items())) + "[/red]"
            )
        self._console.print(text + f"  [dim]{line['wall_time_s']:.0f} s[/dim]", highlight=False, soft_wrap=True)


def show_rollouts(console: Console, outcomes: Sequence[RolloutResult], agent_match: str | None) -> None:
    """Every call and triplet of some rollouts."""
    for outcome in outcomes:
        task = outcome.request.task
        console.rule(f"{task['id']}: {outcome.status}, reward {outcome.reward}")
        for name, part in outcome.reward_components.items():
            console.print(f"part      {name} {part:.4g}", markup=False)
        console.print(f"question  {task['question']}", markup=False)
        for call in outcome.calls:
            console.print(
                f"span {call.sequence}: {call.agent}, {call.ended - call.started:.3f} s, "
                f"{call.finish_reason}, weights {call.weights_version}",
                style="bold",
                markup=False,
            )
            for message in [*call.messages, call.reply]:
                console.print(f"  {message.get('role', 'assistant'):>9}  {message.get('content')}", markup=False)
        for triplet in triplets(calls_of_agents(outcome.calls, agent_match), outcome.reward):
            console.print(
                f"triplet {triplet.sequence}: {triplet.agent}, reward {triplet.reward}, "
                f"emitted for this call {triplet.call_reward}\n"
                f"  prompt ids   {triplet.prompt_ids}\n  response ids {triplet.response_ids}",
                markup=False,
            )
        console.print(f"answer    {outcome.answer or outcome.message}", markup=False)
    scored = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    console.rule()
    mean = sum(scored) / len(scored) if scored else None
    console.print(
        f"{len(outcomes)} rollouts, {sum(len(outcome.calls) for outcome in outcomes)} calls, mean reward {shown(mean)}"
    )


def show_summary(console: Console, summary: dict[str, Any], where: str) -> None:
    """What a run came to; ``where`` its folder is."""
    for name, label in (("validation", "greedy"), ("validation_sampled", "sampled")):
        result = summary[name]
        if "after" in result:
            before, after = result["before"], result["after"]
            gain = "" if None in (before, after) else f" ([bold]{100 * (after - before):+.1f} points[/bold])"
            # The bundled Spider says so of its tasks; nothing is known of anybody else's.
            known = "before_by_subject_split" in result
            what = "questions over databases never trained on" if known else "validation questions"
            console.print(
                f"[bold]{label}[/bold]: {shown(before)} before, {shown(after)} after{gain} on {result['n']} {what}"
            )
            for split, first in result.get("before_by_subject_split", {}).items():
                last = result.get("after_by_subject_split", {}).get(split)
                console.print(f"    {split} subjects: {shown(first)} before, {shown(last)} after")
    console.print(
        f"{summary['wall_time_s']:.0f} s, {summary['peak_memory_mb']:.0f} MB, {summary['rollouts']} rollouts; "
        f"everything is in {where}"
    )
    if "note" in summary:
        console.print(f"[dim]{summary['note']}[/dim]")
