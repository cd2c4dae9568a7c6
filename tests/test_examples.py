"""The examples run as they stand."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

from programs import run

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
