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
from dev.settings_page import tables
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

TUTORIALS = [f"tutorials/{page.name}" for page in (ROOT / "docs" / "tutorials").glob("*.md")]
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
    ("page", "example"),
    [("your-domain.md", "library/your_domain.py"), ("tutorials/own-task.md", "own_task/own_task.py")],
)
def test_what_is_shown_first_is_the_example(page: str, example: str) -> None:
    [shown, *_] = _python(ROOT / "docs" / page)
    assert shown in (ROOT / "examples" / example).read_text()


@pytest.mark.parametrize(("place", "calls"), [(3, 1), (5, 2)])
async def test_the_agents_that_are_shown_lose_nothing(place: int, calls: int, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": f"agents_page_{place}"}
    exec(compile(AGENTS[place], "docs/your-agent.md", "exec", dont_inherit=True), names)
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


def test_the_tables_of_settings_are_made_from_their_declarations() -> None:
    """After a change: ``python -m dev.settings_page``."""
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").endswith(f"\n\n{tables()}")


@pytest.mark.parametrize(
    "page", ["python-api.md", "serve.md", "your-agent.md", "README.md", "../README.md", *TUTORIALS]
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
    messages = [message for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for message in _QUOTED.findall(row)]
    assert len(messages) > 30
    missing = [part for message in messages for part in map(str.strip, message.split("…")) if part not in code]
    assert missing == []


@pytest.mark.parametrize(
    ("page", "name", "agent"),
    [("langgraph", "graph", "write"), ("agents-sdk", "analyst", "Analyst"), ("own-task", "agent", "")],
)
async def test_the_agents_of_the_tutorials_lose_nothing(page: str, name: str, agent: str, tmp_path: Path) -> None:
    [code, *_] = _python(ROOT / "docs" / "tutorials" / f"{page}.md")
    (tmp_path / "agent.py").write_text(code)
    result = await check(Agent(title=page, folder=str(tmp_path), packages=(), name=name, names=(agent,)))
    assert result["problems"] == []
    assert result["traced"] == result["served"] > 0
