"""The examples run as they stand."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from adapters.tracing.testing import ScriptedPolicyServer

ROOT = Path(__file__).parent.parent


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": str(ROOT), **more}


async def test_the_graph_answers_without_training(tmp_path: Path) -> None:
    import asyncio

    with sqlite3.connect(tmp_path / "concerts.sqlite") as conn:
        conn.executescript("CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'Ann');")
    conn.close()
    async with ScriptedPolicyServer(replies=["```sql\nSELECT count(*) FROM singer\n```", "CORRECT"]) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "examples/langgraph_without_training.py",
            str(tmp_path / "concerts.sqlite"),
            "How many singers are there?",
            cwd=ROOT,
            env=_environment(OPENAI_BASE_URL=server.base_url, OPENAI_API_KEY="none", MODEL=server.model),
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert printed.decode().rstrip().endswith("SELECT count(*) FROM singer")


def test_a_graph_of_ones_own_is_traced(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/train_your_graph.py", "--dev", "--output-dir", str(tmp_path)],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("triplet") >= 10
    assert "answer" in done.stdout
