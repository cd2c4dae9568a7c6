"""The tables in README.md and docs/frameworks.md, made from the results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.frameworks._agents import AGENTS, ROOT, Agent

__all__ = ["tables", "write_pages"]

_DOCS = ROOT / "docs"
_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
_API_NAMES = {
    "chat": "chat",
    "responses": "Responses",
    "messages": "Messages",
    "generate_content": "Gemini",
    "converse": "Bedrock's Converse",
    "ollama": "Ollama's chat",
}
_HEAD = (
    "Framework", "Version", "Wire API", "Exact calls", "Replays", "Tools; structured output", "Agent names",
    "Prefix breaks, %", "Accuracy, greedy; sampled", "Greedy accuracy, GPU",
)  # fmt: skip
_QUESTIONS = 32
"""Of most rows, whose number the page says once."""
_README_HEAD = ("Framework", "Gain", "Gain on a GPU")


def write_pages(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the tables of the pages."""
    for name, table in tables(results).items():
        page = _DOCS / name
        page.write_text(_TABLE.sub(lambda _, table=table: f"\n{table}\n\n", page.read_text()))


def tables(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The table of each page, by the page's name."""
    agents = [(agent, results[agent.folder]) for agent in AGENTS if agent.folder in results]
    return {
        "../README.md": _table(_README_HEAD, [_readme_row(agent, result) for agent, result in agents]),
        "frameworks.md": _table(_HEAD, [_row(agent, result) for agent, result in agents]),
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows under the head, without the columns that are empty in all of them."""
    shown = [place for place in range(len(head)) if any(row[place] for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line[place].replace('|', '/') for place in shown)} |" for line in lines)


def _readme_row(agent: Agent, result: Mapping[str, Any]) -> list[str]:
    """Whether the agent gained by its training, in points."""
    trained = (result.get("training") or {}).get("validation", {})
    on_gpu = (result.get("gpu") or {}).get("validation", {})
    return [f"[{agent.title}]({agent.path})", _gain(trained), _gain(on_gpu)]


def _gain(trained: Mapping[str, Any]) -> str:
    if "after" not in trained:
        return ""
    low, high = trained["difference_ci95"]
    verdict = "gained" if low > 0 else "lost" if high < 0 else "unclear"
    points = f"{100 * trained['difference']:+.0f} [{100 * low:+.0f}, {100 * high:+.0f}]"
    if trained.get("baseline") == "first query":  # it was right more often than the answers
        points += f" from {trained['before_first_query']:.3f}"
    return f"{verdict}: {points}"


def _row(agent: Agent, result: Mapping[str, Any]) -> list[str]:
    packages = result.get("versions", {})
    version = ", ".join(f"{name} {packages[name]}" for name in packages)
    if result.get("overridden"):
        version += f"; with {', '.join(result['overridden'])}"
    link = f"[{agent.title}](../{agent.path})"
    check = result.get("check")
    if check is None:
        return [link, version, *[""] * (len(_HEAD) - 4), str(result.get("reason", "")), ""]
    apis = ", ".join(_API_NAMES.get(name, name) for name in check["wire_apis"])
    differs = f" of {check['served']}: {check['problems'][0]}" if check["problems"] else ""
    return [
        link,
        version,
        apis + (", streamed" if check["stream"] else ""),
        f"{check['traced']}{differs}",
        _replays(result.get("replays") or []),
        "; ".join(filter(None, (_tools(check), ", ".join(check["structured"])))),
        ", ".join(filter(None, check["agents"])),
        _breaks(result.get("training")),
        *_accuracies(agent, result),
    ]


def _replays(ways: Sequence[Mapping[str, Any]]) -> str:
    """The calls that were answered from the record, those with whole replies first, and what differed."""
    shown = []
    for way in sorted(ways, key=lambda way: way["streamed"]):
        problems = [f"{way['diverged']} diverged"] * bool(way["diverged"])
        problems += [f"{way['other_bytes']} with other bytes"] * bool(way["other_bytes"])
        shown.append(", ".join([str(way["calls"]), *problems]))
    return "; ".join(shown)


def _tools(check: Mapping[str, Any]) -> str:
    called, offered = check["tools_called"], check["tools_offered"]
    more = f" (of {offered})" if offered > len(called) else ""
    return ", ".join(called) + more


def _breaks(training: Mapping[str, Any] | None) -> str:
    """Percent of the later prompts, and why, the most frequent cause first."""
    if training is None:
        return ""
    if not training["later_prompts"]:
        return "one call only"
    causes = sorted(training["mismatches"], key=training["mismatches"].get, reverse=True)
    share = sum(training["mismatches"].values()) / training["later_prompts"]
    return f"{100 * share:.1f} {', '.join(causes)}".rstrip()


def _accuracies(agent: Agent, result: Mapping[str, Any]) -> list[str]:
    """The greedy accuracy, and of how many questions, and the sampled one, of the same; the greedy one on a GPU."""
    gpu = result.get("gpu")
    on_gpu = f"{_accuracy(gpu, 'validation')} ({gpu['card']})" if gpu else ""
    if (training := result.get("training")) is None:
        return [str(result.get("reason") or ("" if agent.trained else "not trained")), on_gpu]
    sampled = _accuracy(training, "validation_sampled").partition(" of ")[0]
    return ["; ".join(filter(None, (_accuracy(training, "validation"), sampled))), on_gpu]


def _accuracy(training: Mapping[str, Any], name: str) -> str:
    found = training.get(name, {})
    if "after" not in found:
        return ""
    return f"{found['before']:.3f} → {found['after']:.3f}" + f" of {found['n']}" * (found["n"] != _QUESTIONS)
