"""The tables in README.md, docs/frameworks.md and docs/capabilities.md, made from the results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.frameworks._agents import AGENTS, ROOT, Agent

__all__ = ["tables", "write_pages"]

_DOCS = ROOT / "docs"
_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
_API_NAMES = {
    "chat": "chat completions",
    "responses": "Responses",
    "messages": "Messages",
    "generate_content": "Gemini",
    "converse": "Bedrock's Converse",
    "ollama": "Ollama's chat",
}
_HEAD = (
    "Framework", "Version", "Wire API", "Lines changed", "Calls traced", "Ids and masks", "Stream", "Tools",
    "Structured output", "Agent names", "Prefix breaks", "Rollouts", "Greedy accuracy", "Sampled accuracy",
)  # fmt: skip
_README_HEAD = ("Framework", "API", "Greedy accuracy", "Gain, 95 % interval")
_SHORT_HEAD = ("Framework", *_API_NAMES.values(), "Tools", "Structured output", "Stream", "Agent names", "Exact tokens")


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
        "capabilities.md": _table(_SHORT_HEAD, [_short_row(agent, result) for agent, result in agents]),
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _readme_row(agent: Agent, result: Mapping[str, Any]) -> list[str]:
    """Whether the agent gained by its training, in points."""
    check = result.get("check")
    apis = ", ".join(_API_NAMES[name] for name in check["wire_apis"]) if check else ""
    row = [f"[{agent.title}]({agent.path})", apis]
    trained = (result.get("training") or {}).get("validation", {})
    if "after" not in trained:
        return [*row, "", ""]
    low, high = trained["difference_ci95"]
    verdict = "gained" if low > 0 else "lost" if high < 0 else "no clear gain"
    points = f"{100 * trained['difference']:+.0f} points [{100 * low:+.0f}, {100 * high:+.0f}]"
    if trained.get("baseline") == "first query":  # it was right more often than the answers
        points += f" from its first queries' {trained['before_first_query']:.3f}"
    return [*row, f"{trained['before']:.3f} → {trained['after']:.3f} of {trained['n']}", f"{verdict}: {points}"]


def _short_row(agent: Agent, result: Mapping[str, Any]) -> list[str]:
    """Which parts of the APIs the agent used, and whether its tokens are those that were sampled."""
    check = result.get("check")
    if check is None:
        return [agent.title, *[""] * (len(_SHORT_HEAD) - 2), str(result.get("reason", ""))]
    used = (
        *(api in check["wire_apis"] for api in _API_NAMES),
        check["tools_offered"],
        check["structured"],
        check["stream"],
        any(check["agents"]),
    )
    return [agent.title, *("yes" if each else "" for each in used), "no" if check["problems"] else "yes"]


def _row(agent: Agent, result: Mapping[str, Any]) -> list[str]:
    packages = result.get("versions", {})
    version = ", ".join(f"{name} {packages[name]}" for name in packages)
    if result.get("overridden"):
        version += f"; with {', '.join(result['overridden'])}"
    link = f"[{agent.title}](../{agent.path})"
    check = result.get("check")
    if check is None:
        return [link, version, *[""] * (len(_HEAD) - 3), str(result.get("reason", ""))]
    same = "not the same: " + check["problems"][0] if check["problems"] else "identical"
    return [
        link,
        version,
        ", ".join(_API_NAMES.get(name, name) for name in check["wire_apis"]),
        "0",
        f"{check['traced']} of {check['served']}",
        same,
        "yes" if check["stream"] else "",
        _tools(check),
        ", ".join(check["structured"]),
        ", ".join(filter(None, check["agents"])) or "none",
        _breaks(result.get("training")),
        *_accuracies(agent, result),
    ]


def _tools(check: Mapping[str, Any]) -> str:
    called, offered = check["tools_called"], check["tools_offered"]
    more = f" (of {offered})" if offered > len(called) else ""
    return ", ".join(called) + more


def _breaks(training: Mapping[str, Any] | None) -> str:
    if training is None:
        return ""
    if not training["later_prompts"]:
        return "one call only"
    causes = ", ".join(f"{cause} {count}" for cause, count in sorted(training["mismatches"].items()))
    return f"{sum(training['mismatches'].values())} of {training['later_prompts']}" + (f": {causes}" if causes else "")


def _accuracies(agent: Agent, result: Mapping[str, Any]) -> list[str]:
    """On how many rollouts it was trained; its greedy accuracy, then its sampled one."""
    if (training := result.get("training")) is None:
        return ["", "", str(result.get("reason") or ("" if agent.trained else "not trained: prompts of 30,000 tokens"))]
    found = [training.get(name, {}) for name in ("validation", "validation_sampled")]
    shown = [f"{each['before']:.3f} → {each['after']:.3f} of {each['n']}" if "after" in each else "" for each in found]
    return [str(training["rollouts"]), *shown]
