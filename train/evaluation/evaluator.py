"""One evaluation: the trainer's rollouts without the training.

The first sample of each question is drawn with the seed that the trainer's own validation uses, so a checkpoint's
greedy accuracy here is the one of its training run, question by question.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from groundwire import domains
from groundwire.domains import Domain, Task, TaskData
from groundwire.rewards import Reward, total
from groundwire.tools.step_timer import StepTimer
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.diagnosis import is_transient, nothing_judged
from groundwire.train.evaluation.metrics import compute_metrics
from groundwire.train.evaluation.spider_predictions import gold_lines, prediction_lines
from groundwire.train.evaluation.validation import accuracy, choose_tasks, validation_jobs, validation_name
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.factory import make_backend, make_reward
from groundwire.train.rollouts.outcome import RolloutResult
from groundwire.train.rollouts.runtime import RolloutRuntime, Upstream

__all__ = ["Watcher", "evaluate"]


class Watcher(Protocol):
    """What an evaluation tells its display."""

    def phase(self, text: str, total: int) -> None:
        """A batch of ``total`` rollouts begins."""

    def tick(self) -> None:
        """One of them ended."""


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """Scores the queries that an agent wrote on its way, with the reward that judged its answer."""

    reward: Reward
    wanted: bool

    async def turn_scores(self, outcome: RolloutResult) -> list[float]:
        """The score of each query that was run, had it been the answer; the last is the rollout's own."""
        queries = [place for place, step in enumerate(outcome.steps) if step["kind"] == "tool"]
        if not self.wanted or outcome.reward is None or not queries:
            return []
        scores = []
        for place in queries[:-1]:
            query, steps = outcome.steps[place]["input"], outcome.steps[: place + 1]
            try:
                scores.append(total(await self.reward(outcome.request.task, query, steps)))
            except Exception:  # a reward is somebody else's code, too
                return []
        return [*scores, outcome.reward]


def evaluate(
    config: RunConfig,
    *,
    data: TaskData,
    domain: Domain,
    run: RunDir,
    watcher: Watcher,
    samples: int = 1,
    upstream: Upstream | None = None,
) -> dict[str, Any]:
    """Run every task ``samples`` times at ``config.val_temperature``, write the run's files, return the figures.

    With an ``upstream`` the policy is there; else ``config.model`` is served here. Each sample of all tasks is written
    when it has ended, so what was measured outlives a kill.
    """
    tasks = choose_tasks(data.validation, config.val_tasks)
    timer = StepTimer()
    reward = make_reward(config, domain)
    judge = _Judge(reward=reward, wanted=domains.answer_form(domain) == "sql")
    stack = RolloutRuntime(
        engine=upstream or _engine(config, run, timer),
        backend=make_backend(config),
        domain=domain,
        reward=reward,
        timer=timer,
        config=config,
        run=run,
    )
    rows: list[dict[str, Any]] = []
    outcomes: list[RolloutResult] = []
    with stack:
        for sample in range(samples):
            watcher.phase(f"sample {sample + 1} of {samples}" if samples > 1 else "questions", len(tasks))
            seed = config.seed + sample
            jobs = validation_jobs(tasks, temperature=config.val_temperature, max_tokens=config.max_tokens, seed=seed)
            deadline_s = config.step_deadline_s * max(1.0, len(jobs) / max(1, config.n_runners))
            ended = stack.run(jobs, deadline_s=deadline_s, on_end=watcher.tick)
            turns = stack.wait(stack.submit(_turn_scores(judge, ended)))
            made = [
                outcome.to_row(0) | {"turn_scores": json.dumps(scores)}
                for outcome, scores in zip(ended, turns, strict=True)
            ]
            run.write_rollouts(0, made, kind=f"val-{config.val_temperature:g}-{sample + 1:03d}")
            _write_answers(run, tasks, ended, sample, sql=judge.wanted)
            rows += made
            outcomes += ended
            last = sample + 1 == samples
            if (why := nothing_judged(rows)) and (last or not is_transient(rows)):
                raise RolloutsFailedError(f"{why}. More: python -m train.why {run.path}")
    figures = compute_metrics(rows)
    seconds = round(sum(timer.split().values()), 2)
    name = validation_name(config.val_temperature)
    run.append_metrics({"step": 0, name: accuracy(outcomes), "wall_time_s": seconds})
    run.merge_rollouts()
    run.write_json("evaluation.json", {"model": config.model, "samples": samples, "seconds": seconds, **figures})
    return figures


def _turn_scores(
    judge: _Judge, outcomes: Sequence[RolloutResult]
) -> Callable[[RolloutCollector], Coroutine[Any, Any, list[list[float]]]]:
    """Work for the loop of the rollouts, where the reward has its connections."""

    async def scores(_: RolloutCollector) -> list[list[float]]:
        return await asyncio.gather(*map(judge.turn_scores, outcomes))

    return scores


def _write_answers(
    run: RunDir, tasks: Sequence[Task], outcomes: Sequence[RolloutResult], sample: int, *, sql: bool
) -> None:
    """The official evaluator's files, where the tasks are text-to-SQL with a database's name."""
    if not sql or not all("db_id" in task and "query" in task for task in tasks):
        return
    answers: Mapping[str, str] = {str(outcome.request.task["id"]): outcome.answer for outcome in outcomes}
    name = "predictions.sql" if sample == 0 else f"predictions-{sample + 1}.sql"
    (run.path / name).write_text("\n".join(prediction_lines(tasks, answers)) + "\n", encoding="utf-8")
    if sample == 0:
        (run.path / "gold.sql").write_text("\n".join(gold_lines(tasks)) + "\n", encoding="utf-8")


def _engine(config: RunConfig, run: RunDir, timer: StepTimer) -> Any:
    from groundwire.train.policy.checkpoint import load_initial_state
    from groundwire.train.policy.engine import LocalEngine
    from groundwire.train.policy.model import fitting_length

    start = load_initial_state(config, run)
    length = fitting_length(start.model, config.max_model_len)
    return LocalEngine(start.model, start.tokenizer, max_model_len=length, max_batch=128, timer=timer)
