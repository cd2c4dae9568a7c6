"""``groundwire evaluate``: evaluate a model under an agent, or tabulate and compare runs.

Without a run directory it evaluates a model and writes a run directory, as training does. With run directories it only
reads them. The tables have the columns that Agent Lightning publishes for its SQL agent; "Transitions" are LLM calls
per rollout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from groundwire.domains import Breakdowns
from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file, setup_logging
from groundwire.tools.terminal import Version, console, format_table, spinner
from groundwire.train.api.evaluation import DEFAULTS, make_evaluation_job, run_evaluation
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.cli.options import BaseUrl, SettingsCommand, given_settings, takes_settings
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.evaluation.metrics import compare as compare_scores
from groundwire.train.evaluation.metrics import few_questions, format_accuracy, format_change, scores_by_question
from groundwire.train.evaluation.run_reader import final_rollouts, table_entry
from groundwire.train.job.job import ModelEndpoint

_COLUMNS = (
    *("Model", "Context", "Max turns", "Agents", "Accuracy first", "Accuracy last"),
    *("Transitions", "Prompt length", "Response length"),
)
_SPEED_COLUMNS = {
    "GPUs": ("gpus", "{}"),
    "Steps": ("steps", "{}"),
    "Hours": ("hours", "{:.2f}"),
    "Seconds per step": ("seconds_per_step", "{:.1f}"),
    "Rollout": ("rollout_share", "{:.1%}"),
    "Update": ("update_share", "{:.1%}"),
}
"""The columns after the run's name, with their keys in :func:`.run_reader.read_speed`, and formats."""
_TOKEN_COUNT_NOTES = {
    "usage": "The endpoint sent no token ids: lengths are its own counts.",
    "both": "Some replies came without token ids: their lengths are the endpoint's own counts.",
    "unknown": "The endpoint sent neither token ids nor counts: lengths are not known.",
}
_MAX_IDS = 10

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_SAME_NAMES = (
    *(name for name in AgentSettings.model_fields if name != "judge"),
    *("config", "model", "data_dir", "output_dir", "device", "seed", "prompts", "otlp", "n_runners"),
    *("runner_processes", "runner_python", "max_tokens", "max_model_len", "retries", "val_tasks"),
)
_OPTIONS = {**{name: name for name in _SAME_NAMES}, "val_temperature": "temperature"}
"""The settings of an evaluation, and the names of their options."""


@app.command(cls=SettingsCommand)
@takes_settings(_OPTIONS, **DEFAULTS, config="fast, with --base-url hf")
def main(
    settings: dict[str, Any],
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Runs to show as a table, or settings of an evaluation", metavar="[RUN_DIR|KEY=VALUE]..."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With two runs: question by question, with McNemar's exact test")
    ] = False,
    base_url: BaseUrl = None,
    api_key_env: Annotated[
        str, typer.Option(help="With --base-url: the environment variable with its key", metavar="NAME")
    ] = "OPENAI_API_KEY",
    split: Annotated[str | None, typer.Option(help="Part of the data: train, or a domain's own, e.g. test")] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Rollouts per question", min=1)] = 1,
    form: Annotated[
        Literal["text", "markdown", "json"], typer.Option("--format", help="Format of the output")
    ] = "text",
    version: Version = False,
) -> None:
    """Evaluate a model under an agent, or read runs: a table, or two compared question by question."""
    pairs = [text for text in runs or [] if "=" in text and not Path(text).exists()]
    folders = [text for text in runs or [] if text not in pairs]
    if compare and len(folders) != 2:
        raise typer.BadParameter(f"--compare needs two runs, and {len(folders)} are given")
    with exit_on_user_error():
        read_env_file(names=[api_key_env])
        if folders:
            with spinner("reading the runs"):
                text = _show_runs(folders, compare=compare, form=form)
        else:
            given = given_settings(settings, pairs, names=_OPTIONS)
            endpoint = ModelEndpoint(base_url, os.environ.get(api_key_env)) if base_url else None
            job = make_evaluation_job(given, endpoint, split=split)
            setup_logging()
            run, entry = run_evaluation(job, split=split, samples=samples, output=console(stderr=True))
            texts = {"json": table([entry], "json")}
            for name, file in (("markdown", "table.md"), ("text", "table.txt")):
                texts[name] = f"{table([entry], name)}\n\n{details(entry['after'], name, job.domain.breakdowns)}"
                (run.path / file).write_text(f"{texts[name]}\n", encoding="utf-8")
            text = texts[form]
        say(text)


def _show_runs(paths: list[str], *, compare: bool, form: str) -> str:
    runs = [RunDir.open(path) for path in paths]
    if not compare:
        entries = [table_entry(run) for run in runs]
        parts = [table(entries, form)]
        parts += [] if form == "json" else [speed_table(entries, form), changes(entries, form)]
        return "\n\n".join(filter(None, parts))
    try:
        result = compare_scores(*(scores_by_question(final_rollouts(run)) for run in runs))
    except ValueError as error:
        raise RunDirError(f"{paths[0]} and {paths[1]} cannot be compared: {error}") from error
    return comparison(result, [run.path.name for run in runs], form)


def table(entries: Sequence[Mapping[str, Any]], form: str) -> str:
    """One row per entry of :func:`groundwire.train.evaluation.run_reader.table_entry`."""
    if form == "json":
        return json.dumps(list(entries), indent=2, ensure_ascii=False)
    return format_table(_COLUMNS, [_cells(entry) for entry in entries], form)


def speed_table(entries: Sequence[Mapping[str, Any]], form: str) -> str:
    """One row per training run: its GPUs, its time, and the shares of rollouts and updates; empty without one."""
    rows = []
    for run, speed in ((entry["run"], entry["speed"]) for entry in entries if entry["speed"]):
        figures = [(speed[key], text) for key, text in _SPEED_COLUMNS.values()]
        cells = ["-" if figure is None else text.format(figure) for figure, text in figures]
        rows.append([run, *(cell.replace("%", " %") for cell in cells)])
    return format_table(["Run", *_SPEED_COLUMNS], rows, form) if rows else ""


def details(metrics: Mapping[str, Any], form: str = "text", breakdowns: Breakdowns | None = None) -> str:
    """The metrics without a column in the table: intervals, breakdowns, turns, failures; a list in Markdown."""
    samples = metrics["n"] / metrics["questions"] if metrics["questions"] else 0
    sampled = f", {samples:.3g} samples each" if samples > 1 else ""
    lines = [f"{metrics['metric_name']} {_with_interval(metrics)} of {metrics['questions']} questions{sampled} (95 %)"]
    lines += filter(None, [few_questions(metrics["questions"])])
    if "mixed_groups" in metrics:
        lines.append(
            f"samples: unequal rewards on {metrics['mixed_groups']:.3f} of the questions (GRPO learns from these), "
            f"mean of each question's best {metrics['best_of_n']:.3f}"
        )
        passed = ", ".join(f"pass@{k} {value:.3f}" for k, value in metrics["pass_at_k"].items())
        lines.append(f"{passed} (the probability that one of k samples is right, unbiased)")
    for column, labels in (breakdowns or {}).items():
        for value, of_value in metrics.get(f"by_{column}", {}).items():
            lines.append(f"{labels.get(value, value)}: {_with_interval(of_value)} of {of_value['n']}")
    if metrics["by_turn"]:
        turns = ", ".join(f"{value:.3f} after {turn}" for turn, value in enumerate(metrics["by_turn"], 1))
        lines.append(f"by turn: {turns} (if the answer were the query of that turn)")
    failed = ", ".join(f"{count} {kind}" for kind, count in sorted(metrics["failures"].items()))
    lines.append(f"failures: {failed or 'none'} of {metrics['total']} rollouts")
    if silent := metrics.get("without_calls"):
        lines.append(f"without an LLM call: {silent} of {metrics['n']} rollouts, which are judged all the same")
    lines += [f"the first {kind}: {text}" for kind, text in sorted(metrics["failure_messages"].items()) if text]
    if "timeout" in metrics["failures"]:
        lines.append(
            "the accuracy is without those that timed out, so it may be too high: run fewer at once (--n-runners)"
        )
    if metrics["token_count_source"] in _TOKEN_COUNT_NOTES:
        lines.append(_TOKEN_COUNT_NOTES[metrics["token_count_source"]])
    return _join(lines, form)


def changes(entries: Sequence[Mapping[str, Any]], form: str) -> str:
    """A line for each training run among the ``entries`` of a table: after against before, question by question."""
    lines = [
        f"{entry['run']}: {format_change(change)} on {change['paired_questions']} questions, after - before (95 %)"
        for entry in entries
        if (change := entry["change"])
    ]
    return _join(lines, form)


def comparison(result: Mapping[str, Any], names: Sequence[str], form: str) -> str:
    """The result of :func:`groundwire.train.evaluation.metrics.compare` for two runs with these ``names``."""
    if form == "json":
        return json.dumps({"runs": list(names), **result}, indent=2, ensure_ascii=False)
    a, b = result["accuracy"]
    won, lost = len(result["won"]), len(result["lost"])
    lines = [
        f"A: {names[0]}: {a:.3f}",
        f"B: {names[1]}: {b:.3f}",
        f"B - A: {format_change(result)} on {result['questions']} questions that both judged",
        *filter(None, [few_questions(result["questions"])]),
        f"B won {won} and lost {lost}, equal on {result['questions'] - won - lost}; McNemar's exact test: "
        f"p = {result['p']:.3g}",
    ]
    for key in ("won", "lost"):
        if ids := result[key]:
            more = f", … ({len(ids)})" if len(ids) > _MAX_IDS else ""
            lines.append(f"{key}: {', '.join(ids[:_MAX_IDS])}{more}")
    for key, name in (("only_first", "A"), ("only_second", "B")):
        if result[key]:
            lines.append(f"{result[key]} questions were judged in {name} only, and are left out")
    return _join(lines, form)


def _join(lines: Sequence[str], form: str) -> str:
    return "\n".join(f"- {line}" for line in lines) if form == "markdown" else "\n".join(lines)


def _with_interval(metrics: Mapping[str, Any]) -> str:
    low, high = metrics["ci95"]
    return f"{format_accuracy(metrics['accuracy'])} [{low:.3f}, {high:.3f}]"


def _cells(entry: Mapping[str, Any]) -> list[str]:
    """A row under :data:`_COLUMNS`."""
    before, after = entry["before"], entry["after"]
    accuracies = [None if metrics is None else metrics["accuracy"] for metrics in (before, after)]
    return [
        *(str(entry[name] or "-") for name in ("model", "context", "max_turns", "agents")),
        *("-" if accuracy is None else f"{100 * accuracy:.1f}" for accuracy in accuracies),
        *(_change(before, after, name) for name in ("calls_per_rollout", "prompt_tokens", "response_tokens")),
    ]


def _change(before: Mapping[str, Any] | None, after: Mapping[str, Any], name: str) -> str:
    values = [metrics[name] for metrics in (before, after) if metrics is not None]
    texts = ["-" if value is None else f"{value:.4g}" for value in values]
    return " → ".join(dict.fromkeys(texts))


if __name__ == "__main__":
    app()
