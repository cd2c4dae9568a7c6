"""What the documentation shows is what runs: its links lead somewhere, and its programs are tried."""

from __future__ import annotations

import ast
import inspect
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from benchmarks.frameworks._agents import Agent
from benchmarks.frameworks.conformance import check
from dev.commands_page import commands
from dev.settings_page import TYPES, lists, types
from programs import ROOT

from groundwire.adapters import agent_backend
from groundwire.adapters.conformance import play, sampled_ids
from groundwire.train import evaluate, fit, serve
from groundwire.train.config.run_config import RunConfig

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    *DOCS,
    *(
        ROOT / name
        for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "llms.txt")
    ),
]
AGENTS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "your-agent.md").read_text(), re.DOTALL)

TUTORIALS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorials.md").read_text(), re.DOTALL)
_QUOTED = re.compile(r"`([^`]+)`")


def _python(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", prose):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize(("index", "link"), [("docs/README.md", "({})"), ("mkdocs.yml", ": {}\n")])
def test_the_index_and_the_navigation_have_every_page(index: str, link: str) -> None:
    text = (ROOT / index).read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCS} - {"README.md"}
    assert not [page for page in pages if link.format(page) not in text]


@pytest.mark.parametrize(
    ("page", "place", "example"),
    [("your-domain.md", 0, "library/your_domain.py"), ("tutorials.md", 3, "own_task/own_task.py")],
)
def test_what_is_shown_is_the_example(page: str, place: int, example: str) -> None:
    shown = _python(ROOT / "docs" / page)[place]
    assert shown in (ROOT / "examples" / example).read_text()


@pytest.mark.parametrize(
    ("shown", "calls"),
    [(AGENTS[3], 1), ((ROOT / "examples" / "librarian.py").read_text(), 2)],
    ids=["function", "backend"],
)
async def test_the_agents_that_are_shown_lose_nothing(shown: str, calls: int, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": f"agents_page_{calls}"}
    exec(compile(shown, "docs/your-agent.md", "exec", dont_inherit=True), names)
    backend = agent_backend(names["answer"]) if "answer" in names else names["Librarian"]()
    with sqlite3.connect(tmp_path / "films.sqlite") as conn:
        conn.executescript("CREATE TABLE film (title TEXT, year INTEGER); INSERT INTO film VALUES ('Dusk', 1994);")
    conn.close()
    [recording] = await play(backend, str(tmp_path / "films.sqlite"))
    await backend.stop()
    assert recording.reward == 1.0
    assert recording.response_ids == [sampled_ids(n) for n in range(calls)]
    assert {call.agent for call in recording.calls} == set(backend.agents)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ("published.md", "CHANGELOG.md")], ids=str)
def test_commands_are_shown_by_their_name(page: Path) -> None:
    """``python -m train.run`` is for a clone: two pages say so, and the published workflows have it."""
    shown = re.findall(r"python\s+-m\s+(?:train\.|domains\.|tools\.).*", page.read_text(encoding="utf-8"))
    assert len(shown) <= (page.name in ("README.md", "CONTRIBUTING.md") and page.parent == ROOT), shown


def test_chinese_pages_have_the_commands_of_the_english_ones() -> None:
    chinese = {ROOT / "README.zh.md", *(ROOT / "docs" / "zh").glob("*.md")}
    english = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page not in chinese)
    text = "\n".join(page.read_text(encoding="utf-8") for page in chinese)
    shown = {line.strip() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()}
    assert len(shown) > 10
    assert not [command for command in shown if command not in english]


def test_the_commands_are_described_as_their_help_does() -> None:
    """After a change: ``python -m dev.commands_page``."""
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").endswith(commands())


def test_the_lists_of_settings_are_made_from_their_declarations() -> None:
    """After a change: ``python -m dev.settings_page``."""
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").endswith(f"\n\n{lists()}")
    assert (ROOT / TYPES).read_text(encoding="utf-8") == types()


@pytest.mark.parametrize(
    "page", ["python-api.md", "serve.md", "your-agent.md", "tutorials.md", "../README.md", "../README.zh.md"]
)
def test_the_calls_of_the_python_api_that_are_shown_have_its_arguments(page: str) -> None:
    functions = {"fit": fit, "evaluate": evaluate, "serve": serve}
    for code in _python(ROOT / "docs" / page):
        for call in ast.walk(ast.parse(code)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in functions:
                keywords = {each.arg for each in call.keywords if each.arg}
                bound = inspect.signature(functions[call.func.id]).bind(*call.args, **dict.fromkeys(keywords))
                assert not bound.arguments.get("settings", {}).keys() - RunConfig.names().keys()


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    sources = [path for folder in ("adapters", "rewards", "tools", "train") for path in (ROOT / folder).rglob("*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- ((?:`[^`]+`(?:,\s+)?)+)", page, re.MULTILINE)
    messages = [message for row in rows for message in _QUOTED.findall(row)]
    assert len(messages) > 15
    missing = [part for message in messages for part in map(str.strip, message.split("…")) if part not in code]
    assert missing == []


@pytest.mark.parametrize(
    ("place", "name", "agent"),
    [(0, "graph", "write"), (1, "analyst", "Analyst"), (3, "agent", "")],
)
async def test_the_agents_of_the_tutorials_lose_nothing(place: int, name: str, agent: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(TUTORIALS[place])
    result = await check(Agent(title=name, folder=str(tmp_path), packages=(), name=name, names=(agent,)))
    assert result["problems"] == []
    assert result["traced"] == result["served"] > 0
