"""The examples run unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from programs import ROOT, run

from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer


async def test_the_graph_answers_without_training(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "concerts.sqlite") as conn:
        conn.executescript("CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'Ann');")
    conn.close()
    async with ScriptedPolicyServer(replies=["```sql\nSELECT count(*) FROM singer\n```", "CORRECT"]) as server:
        done = await asyncio.to_thread(
            run,
            "examples/langgraph_without_training.py",
            str(tmp_path / "concerts.sqlite"),
            "How many singers are there?",
            environment={
                **os.environ,
                "OPENAI_BASE_URL": server.base_url,
                "OPENAI_API_KEY": "none",
                "MODEL": server.model,
            },
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("SELECT count(*) FROM singer")


def test_your_graph_is_traced(tmp_path: Path) -> None:
    done = run("examples/train_your_graph.py", "--dev", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("triplet") >= 10
    assert "answer" in done.stdout


# The packages that make frameworks installs for Node have pages of their own.
RECIPES = sorted(page for page in (ROOT / "examples").rglob("README.md") if "node_modules" not in page.parts)
SMALL = ["--steps", "1", "--val-tasks", "1", "--tasks-per-step", "1", "--group-size", "2"]


def _folder(readme: Path) -> str:
    return readme.parent.relative_to(ROOT / "examples").as_posix()


@pytest.mark.parametrize("readme", RECIPES, ids=_folder)
def test_a_recipe_says_what_it_gives_and_stands_in_the_gallery(readme: Path) -> None:
    text = readme.read_text()
    rows = re.findall(
        r"^\| gives \| time \| memory \|\n\|---\|---\|---\|\n\| (.+) \| (.+) \| (.+) \|$", text, re.MULTILINE
    )
    assert rows
    assert all(re.search(r"CPU time", time) and re.search(r"\d [GM]B", memory) for _, time, memory in rows)
    assert f"../examples/{_folder(readme)}/README.md" in (ROOT / "docs" / "recipes.md").read_text()


@pytest.mark.parametrize("folder", ["tool_loop", "library", "frameworks/openai_agents", "frameworks/mcp_tools"])
def test_the_command_of_a_recipe_trains(folder: str, tmp_path: Path) -> None:
    [command] = re.findall(
        r"^groundwire run (.*)$", (ROOT / "examples" / folder / "README.md").read_text(), re.MULTILINE
    )
    done = run("-m", "groundwire.train.run", *command.split(), *SMALL, "--output-dir", str(tmp_path))
    assert done.returncode == int("nothing was trained" in done.stdout), done.stderr
    assert "step   1/1" in done.stdout


@pytest.mark.parametrize(
    ("program", "shown"), [("own_task.py", "step   2/2"), ("prompts.py", "the best prompts are in")]
)
def test_the_programs_of_the_own_task_run(program: str, shown: str, tmp_path: Path) -> None:
    """With the toy policy in place of SmolLM2, and fewer rollouts."""
    pytest.importorskip("gepa")
    for file in (ROOT / "examples" / "own_task").glob("*.py"):
        code = file.read_text().replace('"smollm2"', '"starter"').replace("max_tokens=8", "max_tokens=8, val_tasks=1")
        sizes = r"(steps|tasks_per_step|group_size|prompt_budget|[a-z]+_tasks)=(?!1\b)\d+"
        (tmp_path / file.name).write_text(re.sub(sizes, r"\1=2", code))
    done = run(program, folder=tmp_path, environment={**os.environ, "OPENAI_API_KEY": "none"})
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


NOTEBOOKS = {
    "first_run": ["write_query: ", "step   2/2", "8 of them for training", "error: unknown setting 'step'"],
    "your_task": ["hidden: expected", "step   1/1", "2 of them for training"],
}
"""Each with some of what it prints."""


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_with_outputs_and_begins_with_its_installation(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.ipynb").read_text()
    install, *cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert "%pip install" in "".join(install["source"])
    assert [cell["execution_count"] for cell in cells] == [*range(2, len(cells) + 2)]
    assert "= fit(" in text
    assert "data:image/png;base64," in text  # the curve of its training


# Runs the cells as a kernel does, without the imports of a second process, and with less to do.
RUN_CELLS = """
import json, re, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    code = "".join(cell["source"]).replace('"smollm2"', '"starter"').replace("steps=40", "steps=1, group_size=2")
    code = code.replace("val_tasks=4", "val_tasks=1, group_size=2").replace("tasks_per_step=8", "tasks_per_step=1")
    if cell["cell_type"] == "code" and "%pip" not in code:
        done = shell.run_cell(code)
        if "raises-exception" not in cell["metadata"].get("tags", ()):
            done.raise_error()
"""


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    (tmp_path / "cells.py").write_text(RUN_CELLS)
    shutil.copytree(ROOT / "examples" / "orders", tmp_path / "orders")
    done = run("cells.py", str(ROOT / "examples" / f"{name}.ipynb"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not [text for text in NOTEBOOKS[name] if text not in done.stdout]


def test_your_domain_is_asked_and_judged(tmp_path: Path) -> None:
    done = run("examples/library/your_domain.py", "--dev", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "24 questions" in done.stdout
    assert "6 rollouts" in done.stdout
    assert done.stdout.count("succeeded, reward") == 6
    refused = run("examples/library/your_domain.py", "--data-dir", str(tmp_path))
    assert refused.returncode == 2
    assert refused.stderr == (
        f"error: {tmp_path} has no library.sqlite; name a folder with library.sqlite and questions.csv.\n"
    )
