"""The examples run as they stand."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from pathlib import Path

import pytest
from programs import ROOT, run

from adapters.tracing.testing import ScriptedPolicyServer


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


def test_a_graph_of_ones_own_is_traced(tmp_path: Path) -> None:
    done = run("examples/train_your_graph.py", "--dev", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("triplet") >= 10
    assert "answer" in done.stdout


NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def test_the_notebook_is_committed_without_what_it_printed() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=folder).execute()
    said = "".join(
        output.get("text", "") or str(output.get("data", {}).get("text/plain", ""))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )
    assert "write_query: " in said
    assert "step   2/2" in said
    assert "64 of them for training" in said
    [page] = tmp_path.glob("runs/*-langgraph-spider/report.html")
    assert "<script" in page.read_text()


def test_a_domain_of_ones_own_is_asked_and_judged(tmp_path: Path) -> None:
    done = run("examples/your_domain.py", "--dev", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "24 questions" in done.stdout
    assert "6 rollouts" in done.stdout
    assert done.stdout.count("succeeded, reward") == 6
    refused = run("examples/your_domain.py", "--data-dir", str(tmp_path))
    assert refused.returncode == 2
    assert refused.stderr == (
        f"error: {tmp_path} has no library.sqlite; name a folder with library.sqlite and questions.csv.\n"
    )
