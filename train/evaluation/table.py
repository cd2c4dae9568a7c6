"""Evaluations as a table of the form that the field publishes, and in words; as text, Markdown or JSON.

The columns are those of Agent Lightning's SQL agent: model, context, turns, trained agents, accuracy before and after
training, calls a rollout (transitions), tokens of a prompt and of a reply, before and after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.train.evaluation.validation import shown

__all__ = ["FORMATS", "comparison", "details", "table"]

FORMATS = ("text", "markdown", "json")

_COLUMNS = (
    *("Model", "Context", "Max turns", "Agents", "Accuracy first", "Accuracy last"),
    *("Transitions", "Prompt length", "Response length"),
)
_SOURCES = {
    "usage": "The endpoint sent no token ids: lengths are its own counts.",
    "both": "Some replies came without token ids: of those, lengths are the endpoint's own counts.",
    "unknown": "The endpoint sent neither token ids nor counts: lengths are not known.",
}


def table(entries: Sequence[Mapping[str, Any]], form: str) -> str:
    """``entries`` have ``model``, ``context``, ``max_turns``, ``agents``, ``first`` and ``last``.

    The latter two are :func:`groundwire.train.evaluation.metrics.compute_metrics`'s figures; ``first`` is None for one
    evaluation alone.
    """
    if form == "json":
        return json.dumps(list(entries), indent=2, ensure_ascii=False)
    rows = [_cells(entry) for entry in entries]
    if form == "markdown":
        lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS)), *map(_line, rows)]
        return "\n".join(lines)
    widths = [max(len(row[place]) for row in [_COLUMNS, *rows]) for place in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [_COLUMNS, *rows]
    )


def details(figures: Mapping[str, Any], form: str = "text") -> str:
    """What the table has no column for: intervals, hardness, turns, failures; as lines, or a list in Markdown."""
    low, high = figures["ci95"]
    samples = figures["judged"] / figures["questions"] if figures["questions"] else 0
    each = f", {samples:.3g} samples each" if samples > 1 else ""
    lines = [
        f"accuracy {shown(figures['accuracy'])} [{low:.3f}, {high:.3f}] of {figures['questions']} questions{each} "
        "(95 %, bootstrap over questions)"
    ]
    if "mixed_groups" in figures:
        lines.append(
            f"samples: they differ on {figures['mixed_groups']:.3f} of the questions (what GRPO would learn from), "
            f"and the best of each question's makes {figures['best_of_n']:.3f}"
        )
    for level, part in figures["by_hardness"].items():
        low, high = part["ci95"]
        lines.append(f"{level}: {shown(part['accuracy'])} [{low:.3f}, {high:.3f}] of {part['questions']}")
    if figures["by_turn"]:
        turns = ", ".join(f"{value:.3f} after {turn}" for turn, value in enumerate(figures["by_turn"], 1))
        lines.append(f"by turn: {turns} (what the answer would have been after that many queries)")
    failed = ", ".join(f"{count} {kind}" for kind, count in sorted(figures["failures"].items()))
    lines.append(f"failures: {failed or 'none'} of {figures['rollouts']} rollouts")
    if "timeout" in figures["failures"]:  # long rollouts are seldom the right ones
        lines.append(
            "the accuracy is without those that timed out, so it may be too high: run fewer at once (--n-runners)"
        )
    if figures["token_count_source"] in _SOURCES:
        lines.append(_SOURCES[figures["token_count_source"]])
    return "\n".join(f"- {line}" for line in lines) if form == "markdown" else "\n".join(lines)


def comparison(result: Mapping[str, Any], names: Sequence[str], form: str) -> str:
    """A comparison of two runs (:func:`groundwire.train.evaluation.metrics.compare`)."""
    if form == "json":
        return json.dumps({"runs": list(names), **result}, indent=2, ensure_ascii=False)
    (a, b), (low, high) = result["accuracy"], result["difference_ci95"]
    won, lost = len(result["won"]), len(result["lost"])
    lines = [
        f"A: {names[0]}: {a:.3f}",
        f"B: {names[1]}: {b:.3f}",
        f"B - A: {100 * result['difference']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] on "
        f"{result['questions']} questions that both judged",
        f"B won {won} and lost {lost}, alike on {result['questions'] - won - lost}; McNemar's exact test: "
        f"p = {result['p']:.3g}",
    ]
    for word in ("won", "lost"):
        if result[word]:
            shown = ", ".join(result[word][:10])
            rest = f", … ({len(result[word])})" if len(result[word]) > 10 else ""
            lines.append(f"{word}: {shown}{rest}")
    for word, name in (("only_first", "A"), ("only_second", "B")):
        if result[word]:
            lines.append(f"{result[word]} questions were judged in {name} only, and are left out")
    return "\n".join(f"- {line}" for line in lines) if form == "markdown" else "\n".join(lines)


def _cells(entry: Mapping[str, Any]) -> list[str]:
    first, last = entry["before"], entry["after"]
    return [
        str(entry["model"]),
        str(entry["context"] or "-"),
        str(entry["max_turns"]),
        str(entry["agents"]),
        "-" if first is None else _percent(first),
        _percent(last),
        *(_change(first, last, name) for name in ("calls_per_rollout", "prompt_tokens", "response_tokens")),
    ]


def _percent(figures: Mapping[str, Any]) -> str:
    return "-" if figures["accuracy"] is None else f"{100 * figures['accuracy']:.1f}"


def _change(first: Mapping[str, Any] | None, last: Mapping[str, Any], name: str) -> str:
    values = [figures[name] for figures in (first, last) if figures is not None]
    texts = ["-" if value is None else f"{value:g}" for value in values]
    return " → ".join(dict.fromkeys(texts))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
