"""Runs an agent in an installed base, apart from the trainer's environment: ``make wheel`` names its interpreter."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path

from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.domains.spider.loader import BUNDLED
from groundwire.train import evaluate

APP = """
import sqlite3
import threading
import httpx

client = httpx.Client(base_url="https://api.example.com/v1")


def answer(task):
    sqlite3.connect(task.database).execute("CREATE TABLE notes (text)")
    replies = []

    def ask():
        messages = [{"role": "user", "content": task.question}]
        reply = client.post("/chat/completions", json={"model": "gpt-5-mini", "messages": messages})
        replies.append(reply.json()["choices"][0]["message"]["content"])

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return replies[0]
"""


def packages(python: str) -> str:
    """The packages of an environment, with their versions."""
    command = [python, "-m", "pip", "freeze", "--all"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def databases() -> str:
    """A digest of the bundled databases."""
    digest = hashlib.sha256()
    for file in sorted(BUNDLED.glob("database/*/*.sqlite")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


async def main(python: str) -> None:
    """Evaluate the agent on four tasks, and check that nothing else has changed."""
    before = await asyncio.to_thread(lambda: (packages(python), databases()))
    async with ScriptedPolicyServer(replies=lambda _: "SELECT 1") as policy:
        result = await asyncio.to_thread(
            evaluate,
            "own_app:answer",
            "spider",
            model=policy.model,
            base_url=policy.base_url,
            runner_python=python,
            val_tasks=4,
            output_dir="evaluations",
            quiet=True,
        )
    assert list(result.rollouts["status"]) == ["succeeded"] * 4, result.rollouts[["status", "message"]]
    assert [len(calls) for calls in result.rollouts["calls"]] == [1] * 4
    assert await asyncio.to_thread(lambda: (packages(python), databases())) == before
    print("an agent ran in its own environment; no package and no database has changed")


if __name__ == "__main__":
    Path("own_app.py").write_text(APP)
    asyncio.run(main(sys.argv[1]))
