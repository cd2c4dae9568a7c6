"""Shows a run in the terminal: a progress bar, a line per step, the results; and rollouts with every call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.text import Text

from groundwire import domains
from groundwire.adapters.tracing import LLMCall, calls_of_agents
from groundwire.tools.terminal import as_text, format_duration, in_notebook, show_line
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.metrics import format_accuracy, format_change, format_first_query
from groundwire.train.evaluation.validation import VALIDATIONS
from groundwire.train.evaluation.verdict import AgentVerdict
from groundwire.train.report.charts import curve_html
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.store.rollout import Rollout

_SHOWN_IDS = 8


_LINE_S, _DRAW_S = 30.0, 1.0
"""Seconds between two lines in a pipe, and between two pictures in a notebook."""


class _Where(ProgressColumn):
    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where

    def render(self, task: Task) -> Text:
        return Text(self._where())


class ProgressDisplay(ProgressCallback):
    """Prints a line per step. On a terminal a bar shows where the run is, in a notebook a bar and the curve so far, and
    elsewhere a line every 30 seconds.
    """

    def __init__(self, console: Console, steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._steps, self._clock = console, steps, clock
        self._phase, self._unit, self._done, self._total = "", "", 0, 0
        self._began, self._step, self._trained_s = clock(), 0, list[float]()
        self._lines: list[dict[str, Any]] = []
        self._picture: Any = None
        self._ended = threading.Event()
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=30),
            _Where(self.where),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", visible=False)

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        if in_notebook() and not self._console.quiet:
            from IPython.display import HTML, display

            self._picture = display(HTML(), display_id=True)
        if not self._console.is_terminal:
            threading.Thread(target=self._tell_often, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._progress.stop()

    def where(self) -> str:
        """The phase of the run, how much of it is done, and about how long the rest of the run takes."""
        rewards = " and score" if self.timer is not None and self.timer.current() == "reward" else ""
        text = f"{self._phase}{rewards}, {self._done} of {self._total} {self._unit}" if self._phase else "starting"
        if not self._trained_s or self._step >= self._steps:
            return text
        left_s = (self._steps - self._step) * fmean(self._trained_s) - (self._clock() - self._began)
        return f"{text}; about {format_duration(left_s)} left" if left_s > 0 else text

    def tell(self) -> None:
        """Say where the run is: in a notebook with a bar and the curve so far."""
        if self._picture is None:
            show_line(self._console, self.where())
            return
        from IPython.display import HTML

        bar = f'<progress max="{max(1, self._total)}" value="{self._done}"></progress> {self.where()}<br>'
        self._picture.update(HTML("" if self._ended.is_set() else bar + curve_html(self._lines)))

    def _tell_often(self) -> None:
        while not self._ended.wait(_LINE_S if self._picture is None else _DRAW_S):
            self.tell()
        if self._picture is not None:  # the result of the run shows the whole curve
            self.tell()

    def on_phase_start(self, name: str, total: int, unit: str = "rollouts") -> None:
        """Begin the bar anew."""
        self._phase, self._unit, self._done, self._total = name, unit, 0, total
        self._progress.reset(self._bar, total=total, visible=True)

    def on_rollout_end(self, count: int = 1) -> None:
        """Advance the bar."""
        self._done += count
        self._progress.advance(self._bar, count)

    def on_note(self, text: str) -> None:
        """Print the note."""
        show_line(self._console, f"note: {text}")

    def on_step_end(self, metrics: dict[str, Any]) -> None:
        """Print the step's metrics."""
        step, now = metrics["step"], self._clock()
        if step:
            self._trained_s.append(now - self._began)
        self._began, self._step = now, step
        self._lines.append(metrics)
        text = f"[bold]step {step:>3}/{self._steps}[/bold]" if step else "[bold]before training[/bold]"
        if metrics.get("reward") is not None:
            text += f"  reward {metrics['reward']:.3f}"
        if "tokens_per_s" in metrics:
            text += f"  {metrics['tokens_per_s']:>5.0f} tokens/s"
        for name, label in VALIDATIONS.items():
            if name in metrics:
                result = metrics[name]
                low, high = result["ci95"]
                metric_name = escape(str(result.get("metric_name", "accuracy")))
                accuracy = format_accuracy(result["accuracy"])
                text += f"  [green]{label} {metric_name} {accuracy}[/green] \\[{low:.2f}, {high:.2f}] of {result['n']}"
                text += format_first_query(result.get("first_query_accuracy"))
        if failures := metrics.get("failures"):
            counts = escape(", ".join(f"{count} {kind}" for kind, count in sorted(failures.items())))
            text += f"  [red]failed: {counts}[/red]"
        if silent := metrics.get("without_calls"):
            text += f"  [yellow]without an LLM call: {silent}[/yellow]"
        if attacks := metrics.get("known_attacks"):
            text += f"  [red]won with a known attack: {attacks}[/red]"
        if lost := metrics.get("runners_lost"):
            text += f"  [red]runners lost: {lost}[/red]"
        show_line(self._console, f"{text}  [dim]{metrics['wall_time_s']:.0f} s[/dim]", markup=True)


def show_summary(
    console: Console, summary: Mapping[str, Any], folder: str, domain: domains.Domain | None = None
) -> None:
    """Print a run's ``summary.json``; ``folder`` is the run's. Without ``domain``, it is the one of that name."""
    breakdowns = (domain or domains.get(summary["domain"])).breakdowns
    if "untrained" in summary:
        text = f"[bold]{escape(summary['untrained'])}[/bold]; groundwire why {escape(folder)} says more"
        show_line(console, text, markup=True)
    for name, way in VALIDATIONS.items():
        result = summary[name]
        if "after" not in result or "untrained" in summary:
            continue
        before, after = result["before"], result["after"]
        gain = "" if None in (before, after) else f" ({_change(result)})"
        text = _before_after(before, after, result.get("before_first_query"), gain)
        show_line(console, f"[bold]{way}[/bold]: {text} on {result['n']} validation questions", markup=True)
        for column, labels in breakdowns.items():
            after_by_value = result.get(f"after_by_{column}", {})
            for value, before in result.get(f"before_by_{column}", {}).items():
                text = f"    {labels.get(value, value)}: {_before_after(before, after_by_value.get(value))}"
                show_line(console, text)  # the value comes from the data
    lost = f"; runners lost: {summary['runners_lost']}" if summary.get("runners_lost") else ""
    lost += f"; {summary['known_attacks']} won with a known attack" if summary.get("known_attacks") else ""
    silent = f" ({summary['without_calls']} without an LLM call)" if summary.get("without_calls") else ""
    show_line(
        console,
        f"{summary['wall_time_s']:.0f} s, {summary['peak_memory_mb']:.0f} MB, {summary['rollouts']} rollouts{silent}"
        f"{lost}; everything is in {folder}",
    )
    for line in summary.get("resumed", ()):
        show_line(console, f"note: {line}")
    if "note" in summary:
        show_line(console, summary["note"], "dim")


def _change(result: Mapping[str, Any]) -> str:
    """The difference in points; paired by question, with its interval, if the summary has that."""
    if "difference" not in result:
        return f"[bold]{100 * (result['after'] - result['before']):+.1f} points[/bold]"
    return f"[bold]{escape(format_change(result))}[/bold]"


def _before_after(before: float | None, after: float | None, first: float | None = None, gain: str = "") -> str:
    return f"{format_accuracy(before)} before{format_first_query(first)}, {format_accuracy(after)} after{gain}"


def show_rollout(
    console: Console, result: Rollout, view: AgentView, *, agent_match: str | None, trained: bool = True
) -> None:
    """Print its input, every call with its tools, the answer beside the gold answer, and the reward.

    ``trained``: whether it is said which calls cannot be trained on.
    """
    task, outcome = result.task, result.outcome

    def show(label: str, text: object) -> None:
        show_line(console, f"{label:<12}{text}")

    console.rule(as_text(f"{task['id']}: {outcome.status}, reward {outcome.reward}", one_line=True))
    show("input", outcome.input or task["question"])
    printed: list[Mapping[str, Any]] = []
    for call in result.calls:
        reason = call.untrainable_reason
        problem = f" ({'' if call.failed else 'not trained: '}{reason})" if call.failed or trained else ""
        show_line(
            console,
            f"call {call.sequence}: {call.agent or 'agent'}, model {call.model}, "
            f"{f'{call.wire_api} API, ' if call.wire_api else ''}"
            f"{call.ended - call.started:.3f} s, {call.finish_reason}, weights {call.weights_version}"
            f"{problem if reason else ''}",
            style="bold",
        )
        _show_call(show, call, printed)
    for call in calls_of_agents(result.trainable_calls, agent_match):
        emitted = "" if call.reward is None else f", emitted for this call {call.reward}"
        show("triplet", f"{call.sequence}: {call.agent or 'agent'}, reward {outcome.reward}{emitted}")
        show("", f"prompt ids   {_shorten(call.prompt_ids)}")
        show("", f"response ids {_shorten(call.response_ids)}")
    _show_reward(show, result, view)


def verdict_lines(results: Sequence[Rollout], verdict: AgentVerdict) -> list[str]:
    """The figures of all rollouts, the notes, and the verdict."""
    rewards = [result.outcome.reward for result in results if result.outcome.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    calls = sum(len(result.calls) for result in results)
    figures = f"{len(results)} rollouts, {calls} calls, mean reward {format_accuracy(mean)}"
    end = "nothing is in the way of training"
    if verdict.problems or verdict.advice:
        end = "training cannot work" if verdict.problems else f"training can run, but {verdict.advice}"
    return [figures, *(f"note: {note}" for note in verdict.notes), f"verdict: {end}", *verdict.problems]


def _show_call(show: Any, call: LLMCall, printed: list[Mapping[str, Any]]) -> None:
    """The offered tools, the messages that no call before has shown, and the reply."""
    if call.tools:
        show("  tools", ", ".join(str((tool.get("function") or tool).get("name")) for tool in call.tools))
    for message in [*call.messages, call.reply]:
        if message in printed:
            continue
        printed.append(message)
        role = f"  {message.get('role', 'assistant')}"
        if message.get("content") or not message.get("tool_calls"):
            show(role, message.get("content"))
        for tool_call in message.get("tool_calls") or ():
            function = tool_call.get("function") or {}
            show(role, f"calls {function.get('name')}({function.get('arguments')})")


def _show_reward(show: Any, result: Rollout, view: AgentView) -> None:
    """The gold answer and the agent's, each with its details, such as the rows of a query, and the reward."""
    task, outcome = result.task, result.outcome
    if outcome.judged_field:
        show("judged", outcome.judged_field)
    for label, text in [("gold", view.gold(task)), ("answer", outcome.answer or outcome.message)]:
        show(label, text or "(empty)")
        is_answer = text and (label == "gold" or outcome.answer)
        if is_answer and (details := view.answers.details(text, view.domain.database(task))):
            show("", details)
    components = ", ".join(f"{name} {value:.4g}" for name, value in outcome.reward_components.items())
    show("reward", f"{outcome.reward}{f' ({components})' if components else ''}")


def _shorten(ids: Sequence[int]) -> str:
    if len(ids) <= 2 * _SHOWN_IDS:
        return str([*ids])
    first, last = str([*ids[:_SHOWN_IDS]]), str([*ids[-_SHOWN_IDS:]])
    return f"{first[:-1]}, ... {last[1:]} ({len(ids)})"
