"""Best of n: a teacher answers the training tasks under the agent, and its right answers are learned as chats.

For a teacher that gives no log-probabilities of the policy's tokens (:mod:`groundwire.train.algorithms.distillation`).
"""

from __future__ import annotations

import json
from pathlib import Path

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.evaluator import runtime_of
from groundwire.train.evaluation.validation import validation_deadline_s, validation_requests
from groundwire.train.job.job import Job
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.export import to_chats
from groundwire.train.traces.record import TracedCall, make_rollout

LEAST_REWARD = 0.5
_CALL = ("rollout_id", "attempt_id", "sequence", "agent", "model", "status", "error", "finish_reason")


def write_best(job: Job, file: Path, callback: ProgressCallback, *, samples: int) -> tuple[int, int]:
    """Ask each task of the job until it is answered with :data:`LEAST_REWARD`, at most ``samples`` times.

    Writes a chat for each conversation of these answers, as ``groundwire sft --chats`` reads them. Returns the numbers
    of answered tasks and of all.
    """
    if job.view.compares:
        raise ConfigError("best of n judges each answer alone, and the reward ranks several: give another --reward")
    config, tasks, best = job.config, job.data.validation, dict[str, Rollout]()
    with runtime_of(job, run=RunDir(file.parent), timer=StepTimer()) as runtime:
        for sample in range(samples):
            left = [task for task in tasks if str(task["id"]) not in best]
            requests = validation_requests(left, config, config.temperature, samples=[sample])
            callback.on_phase_start(f"the teacher, sample {sample + 1} of at most {samples}", len(requests))
            deadline_s = validation_deadline_s(config, len(requests))
            for rollout in runtime.run(requests, deadline_s=deadline_s, on_end=callback.on_rollout_end):
                if (rollout.outcome.reward or 0.0) >= LEAST_REWARD:
                    best[str(rollout.task["id"])] = rollout
    with file.open("w", encoding="utf-8") as out:
        for rollout in best.values():
            for chat in to_chats(_traced(rollout)):
                out.write(json.dumps(chat, ensure_ascii=False) + "\n")
    return len(best), len(tasks)


def _traced(rollout: Rollout) -> Rollout:
    """The rollout as a trace: its texts are learned, since the teacher's token ids are not the policy's."""
    calls = []
    for call in rollout.calls:
        traced = TracedCall(**{name: getattr(call, name) for name in _CALL}, tools_json=call.tools_json)
        traced.messages_json, traced.reply_json = call.messages_json, call.reply_json
        calls.append(traced)
    return make_rollout(calls, rollout_id=rollout.rollout_id, source="groundwire")
