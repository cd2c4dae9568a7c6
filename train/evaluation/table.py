"""Formats evaluations and comparisons as text, Markdown or JSON.

The tables have the columns that Agent Lightning publishes for its SQL agent; "Transitions" are LLM calls per rollout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.domains import Breakdowns
from groundwire.train.evaluation.metrics import few_questions, format_accuracy, format_change

_COLUMNS = (
    *("Model", "Context", "Max turns", "Agents", "Accuracy first", "Accuracy last"),
    *("Transitions", "Prompt length", "Response length"),
)
_SPEED_COLUMNS = ("Run", "GPUs", "Steps", "Hours", "Seconds per step", "Rollout", "Update")
_TOKEN_COUNT_NOTES = {
    "usage": "The endpoint sent no token ids: lengths are its own counts.",
    "both": "Some replies came without token ids: their lengths are the endpoint's own counts.",
    "unknown": "The endpoint sent neither token ids nor counts: lengths are not known.",
}
_MAX_IDS = 10


def table(entries: Sequence[Mapping[str, Any]], form: str) -> str:
    """One row per entry of :func:`groundwire.train.evaluation.run_reader.table_entry`."""
    if form == "json":
        return json.dumps(list(entries), indent=2, ensure_ascii=False)
    return _format_table(_COLUMNS, [_cells(entry) for entry in entries], form)


def speed_table(entries: Sequence[Mapping[str, Any]], form: str) -> str:
    """One row per training run: its GPUs, its time, and the shares of rollouts and updates; empty without one."""
    rows = [_speed_cells(entry["run"], entry["speed"]) for entry in entries if entry["speed"]]
    return _format_table(_SPEED_COLUMNS, rows, form) if rows else ""


def _format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], form: str) -> str:
    if form == "markdown":
        return "\n".join(map(_markdown_row, [columns, ["---"] * len(columns), *rows]))
    widths = [max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [columns, *rows]
    )


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
        for value, part in metrics.get(f"by_{column}", {}).items():
            lines.append(f"{labels.get(value, value)}: {_with_interval(part)} of {part['n']}")
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
    before, after = entry["before"], entry["after"]
    return [
        str(entry["model"]),
        str(entry["context"] or "-"),
        str(entry["max_turns"] or "-"),
        str(entry["agents"]),
        "-" if before is None else _percent(before),
        _percent(after),
        *(_change(before, after, name) for name in ("calls_per_rollout", "prompt_tokens", "response_tokens")),
    ]


def _speed_cells(run: str, speed: Mapping[str, Any]) -> list[str]:
    """A row under :data:`_SPEED_COLUMNS`."""
    shares = [speed[name] for name in ("rollout_share", "update_share")]
    return [
        run,
        "-" if speed["gpus"] is None else str(speed["gpus"]),
        str(speed["steps"]),
        f"{speed['hours']:.2f}",
        f"{speed['seconds_per_step']:.1f}",
        *("-" if share is None else f"{100 * share:.1f} %" for share in shares),
    ]


def _percent(metrics: Mapping[str, Any]) -> str:
    return "-" if metrics["accuracy"] is None else f"{100 * metrics['accuracy']:.1f}"


def _change(before: Mapping[str, Any] | None, after: Mapping[str, Any], name: str) -> str:
    values = [metrics[name] for metrics in (before, after) if metrics is not None]
    texts = ["-" if value is None else f"{value:.4g}" for value in values]
    return " → ".join(dict.fromkeys(texts))


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
