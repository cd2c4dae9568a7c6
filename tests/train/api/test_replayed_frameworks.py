"""The agents of examples/frameworks go as recorded with the same bytes, with whole and with streamed replies."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.frameworks._agents import AGENTS
from benchmarks.frameworks._streams import OTHER_WAY
from benchmarks.frameworks.replays import recorded_and_replayed

with suppress(ImportError):  # now: it keeps the stderr of its import, which has no file in a test that reads it
    import mcp.client.stdio  # noqa: F401

PACKAGES = {
    "langgraph": "langgraph",
    "openai_client": "openai",
    "openai_agents": "agents",
    "anthropic_client": "anthropic",
    "mcp_tools": "mcp",
}
"""What each needs of the environment of the tests; ``make frameworks`` does the same with the others."""


@pytest.mark.parametrize("other_way", [False, True])
@pytest.mark.parametrize("folder", PACKAGES)
def test_the_rollouts_of_an_example_go_as_recorded(folder: str, other_way: bool, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[folder]) is None:
        pytest.skip(f"{PACKAGES[folder]} is not installed")
    [agent] = [agent for agent in AGENTS if agent.folder == folder]
    result = recorded_and_replayed(agent, other_way=other_way, count=4, folder=tmp_path)
    assert (result["rollouts"], result["failed"]) == (4, 0)
    assert result["calls"] > 4
    assert (result["diverged"], result["difference"], result["other_bytes"]) == (0, "", 0)
    assert result["streamed"] == (other_way != (folder == "anthropic_client"))


def test_each_example_whose_replies_can_come_another_way_names_it() -> None:
    programs = {agent.folder for agent in AGENTS if agent.command}
    assert OTHER_WAY.keys() == {agent.folder for agent in AGENTS} - programs
