"""Recorded runs of an agent whose policy chooses its replies at random, by the seed of each request."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripted_policy import scripted_policy

from groundwire.adapters.tracing.scripted_server import Reply
from groundwire.tools.terminal import console
from groundwire.train.api.evaluation import make_evaluation_job, run_evaluation
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.job.job import ModelEndpoint

CLIENT = """
import json, openai

async def ask(agent, text, **options):
    message = {"role": "user", "content": text}
    async with openai.AsyncOpenAI(max_retries=0) as client:
        reply = await client.chat.completions.create(
            model="gpt-5-mini", messages=[message], extra_headers={"x-agent-name": agent}, **options
        )
    return reply.choices[0].message

def reward(task, answer):
    return float(answer == "right")
"""
"""The beginning of an agent's module."""


@contextmanager
def recorded_run(
    folder: Path, code: str, choose: Callable[[str, random.Random], Any], *, tasks: int = 24, **given: Any
) -> Iterator[RunDir]:
    """An evaluation of an agent, whose policy still answers; with a ``model`` in this process, if one is given."""
    (folder / "agent.py").write_text(code)
    rows = [{"id": f"t{n}", "question": f"Where is city {n}?"} for n in range(tasks)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"agent": "agent.py:agent", "domain": "tasks.jsonl", "reward": "agent.py:reward"}
    settings: dict[str, Any] = {key: str(folder / value) for key, value in names.items()}
    settings |= {"model": "random", "val_temperature": 1.0, "output_dir": str(folder / "runs")}
    settings |= {"rollout_process": "off", "max_tokens": 8, **given}

    def reply(body: Mapping[str, Any]) -> Reply | str:
        return choose(body["messages"][-1]["content"], random.Random(body["seed"]))  # type: ignore[no-any-return]

    with scripted_policy(reply, model="random") as url:
        endpoint = None if "model" in given else ModelEndpoint(url)
        job = make_evaluation_job(settings, endpoint, split="train")
        yield run_evaluation(job, samples=1, output=console(quiet=True))[0]
