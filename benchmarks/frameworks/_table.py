"""The table in docs/frameworks.md, made from the results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.frameworks._agents import AGENTS, ROOT, Agent

__all__ = ["write_page"]

_PAGE = ROOT / "docs" / "frameworks.md"
_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
_API_NAMES = {"chat": "chat completions", "responses": "Responses", "messages": "Messages"}
_HEAD = (
    "Framework", "Version", "Wire API", "Lines changed", "Calls traced", "Ids and masks", "Stream", "Tools",
    "Structured output", "Agent names", "Prefix breaks", "Greedy accuracy",
)  # fmt: skip


def write_page(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the table of the page."""
    rows = [_row(agent, results[agent.folder]) for agent in AGENTS if agent.folder in results]
    lines = [_HEAD, ["---"] * len(_HEAD), *rows]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    _PAGE.write_text(_TABLE.sub(lambda _: f"\n{table}\n\n", _PAGE.read_text()))


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
        _accuracy(agent, result),
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


def _accuracy(agent: Agent, result: Mapping[str, Any]) -> str:
    training = result.get("training")
    if training is None:
        return str(result.get("reason") or ("" if agent.trained else "not trained: prompts of 30,000 tokens"))
    found = training["validation"]
    return f"{found['before']:.3f} → {found['after']:.3f}" if "after" in found else "stopped early"
