"""Bandits: agents whose calls choose a digit, trained by the real trainer and engine with a small random model."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from groundwire.adapters import Answer, EndpointError
from groundwire.domains import Domain, TaskData
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation import ProgressCallback, evaluator
from groundwire.train.job.job import Job
from groundwire.train.local.trainer import LocalTrainer
from groundwire.train.policy.pretrained.model_files import save_policy
from groundwire.train.store.rollout import Rollout

__all__ = ["Choose", "evaluate", "probability", "rollouts", "train"]

Choose = Callable[..., Awaitable[str]]
"""Sends a prompt with the digits to choose from, ``("who?", "01")``, as an ``agent``; returns the policy's digit."""


class _Backend:
    agents = ("bandit",)

    def __init__(self, agent: Callable[[Choose], Awaitable[str]]) -> None:
        self._agent = agent

    async def run(self, question: Any, endpoint: Any) -> Answer:
        async with aiohttp.ClientSession() as session:

            async def choose(prompt: str, digits: str, agent: str = "bandit") -> str:
                schema = {"enum": [int(digit) for digit in digits]}
                form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
                body = {"messages": [{"role": "user", "content": prompt}], "response_format": form}
                async with session.post(
                    f"{endpoint.base_url}/chat/completions", json=body, headers=endpoint.agent_headers(agent)
                ) as reply:
                    if reply.status != 200:
                        raise EndpointError(await reply.text(), status=reply.status)
                    return str((await reply.json())["choices"][0]["message"]["content"])

            return Answer(text=await self._agent(choose))


def train(
    folder: Path,
    tiny_policy: Any,
    agent: Callable[[Choose], Awaitable[str]],
    reward: Callable[[str], float] = lambda answer: 0.0,
    callback: ProgressCallback | None = None,
    **settings: Any,
) -> RunDir:
    """Train ``tiny_policy`` behind ``agent`` on one task; ``reward`` is that of its answer. Returns the run."""
    job, run = _job(folder, tiny_policy, agent, reward, settings)
    LocalTrainer(job, run=run, callback=callback or ProgressCallback()).train()
    return run


def evaluate(
    folder: Path,
    tiny_policy: Any,
    agent: Callable[[Choose], Awaitable[str]],
    reward: Callable[[str], float] = lambda answer: 0.0,
    *,
    samples: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate ``tiny_policy`` behind ``agent`` on equal tasks. Returns the metrics."""
    job, run = _job(folder, tiny_policy, agent, reward, settings)
    return evaluator.evaluate(job, run=run, callback=ProgressCallback(), samples=samples)


class _Bandit(Domain):
    name = "bandit"


def _job(folder: Path, tiny_policy: Any, agent: Any, reward: Any, settings: dict[str, Any]) -> tuple[Job, RunDir]:
    async def score(task: Any, answer: str, steps: Any) -> float:
        return reward(answer)

    run, model = RunDir(folder / "run"), folder / "model"
    run.path.mkdir(parents=True)
    save_policy(*tiny_policy, model)
    given: dict[str, Any] = {"steps": 1, "tasks_per_step": 1, "group_size": 32, "val_tasks": 1, "val_every": 0}
    given |= {"learning_rate": 3e-4, "checkpoint_every": 1000, "max_model_len": 512, **settings}
    tasks = [{"id": str(number), "question": "which digit?"} for number in range(given["val_tasks"])]
    job = Job(
        config=resolve("fast", model=str(model), **given),
        data=TaskData(train=tasks[:1], validation=tasks, source="a bandit"),
        domain=_Bandit(),
        backend=_Backend(agent),
        reward=score,
    )
    return job, run


def rollouts(run: RunDir) -> list[Rollout]:
    """The training rollouts of the run's last step."""
    trained = [rollout for rollout in run.rollouts()[0] if rollout.mode == "train"]
    return [rollout for rollout in trained if rollout.step == max(other.step for other in trained)]


def probability(run: RunDir, call: int, digit: str) -> float:
    """The probability of ``digit``, one of two, in the ``call``-th call (from 0) of the last step's rollouts, whose
    answers are all their digits.
    """
    last = rollouts(run)
    chosen = [(one.outcome.answer[call], math.exp(one.calls[call].logprobs[0])) for one in last]
    return sum(likely if each == digit else 1 - likely for each, likely in chosen) / len(chosen)
