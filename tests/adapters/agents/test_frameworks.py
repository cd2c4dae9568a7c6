"""Agents of other frameworks, as their authors wrote them. ``make frameworks`` runs those of other environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.frameworks import _table
from benchmarks.frameworks.__main__ import SETTINGS
from benchmarks.frameworks._agents import AGENTS
from benchmarks.frameworks.conformance import check
from programs import ROOT

from groundwire.train.config.overrides import merge_overrides, parse_overrides

INSTALLED = ("langgraph", "openai_agents", "mcp_tools", "openai_client", "anthropic_client")
# One event loop for all: the agents' clients are made once, as in their authors' modules.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("folder", INSTALLED)
async def test_all_that_the_policy_samples_reaches_the_trainer_unchanged(folder: str) -> None:
    [agent] = [each for each in AGENTS if each.folder == folder]
    result = await check(agent)
    assert result["problems"] == []
    assert result["traced"] == result["served"] == 9 * result["calls"]


async def test_the_agents_sdk_sends_no_traces_of_rollouts_to_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    from agents.tracing import get_trace_provider

    provider: Any = get_trace_provider()
    for name in ("_env_disabled", "_manual_disabled"):  # as in a process that has made no trace yet
        monkeypatch.setattr(provider, name, None)
    [agent] = [each for each in AGENTS if each.folder == "openai_agents"]
    await check(agent)
    assert provider._disabled


async def test_the_examples_have_no_line_about_training() -> None:
    files = [file for agent in AGENTS for file in (ROOT / agent.path).glob("*.*") if file.suffix in (".py", ".mjs")]
    assert len(files) >= 14
    assert not [file for file in files if "groundwire" in file.read_text() or "train" in file.read_text().lower()]


async def test_the_training_takes_its_settings() -> None:
    assert merge_overrides({}, parse_overrides(SETTINGS))["steps"] == 12


async def test_the_tables_are_made_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {name: (ROOT / "docs" / name).read_text() for name in ("frameworks.md", "../README.md")}
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in pages.items():
        (docs / name).write_text(text)
    monkeypatch.setattr(_table, "_DOCS", docs)
    results: dict[str, Any] = json.loads((ROOT / "docs" / "frameworks.json").read_text())
    _table.write_pages(results)
    assert {name: (docs / name).read_text() for name in pages} == pages
    _table.write_pages({"langgraph": {"reason": "no such package", "seconds": 1.0}})
    lines = (docs / "frameworks.md").read_text().splitlines()
    [row] = [line for line in lines if "examples/frameworks/langgraph)" in line]
    assert row.endswith(" no such package |")  # columns that are empty in all rows are left out
    after = {"n": 32, "before": 0.25, "after": 0.5, "difference": 0.25, "difference_ci95": [0.1, 0.4]}
    _table.write_pages({"smolagents": {**results["smolagents"], "gpu": {"card": "NVIDIA H100", "validation": after}}})
    rows = [line for page in pages for line in (docs / page).read_text().splitlines() if "smolagents)" in line]
    assert rows[0].endswith("| 0.250 → 0.500 (NVIDIA H100) |")
    assert rows[1].endswith("| gained: +25 [+10, +40] |")
