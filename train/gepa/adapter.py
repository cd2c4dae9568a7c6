"""What GEPA is given: an adapter that scores prompts by rollouts, and the model that reads these and writes prompts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gepa import EvaluationBatch

from groundwire.domains import Task
from groundwire.tools.errors import UserError
from groundwire.tools.secrets import mask_secrets, masked_values
from groundwire.train.artifacts.checkpoints import append_line
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.store.rollout import Rollout

Prompts = dict[str, str]
Batch = EvaluationBatch[dict[str, Any], str]
_MAX_CHARS, _MAX_STEPS = 3000, 12
TEMPLATE = """You improve the prompt of an agent that a language model runs. The present prompt is:
```
<curr_param>
```

Words in braces, such as {question}, are fields: a program puts the data there. Keep every field, and add none.

The agent did these tasks with it. For each you see the agent's steps and its reward, from 0 (wrong) to 1 (right):

<side_info>

Find out what the tasks have in common, what the failed ones did wrong, and which rules the model did not know. Write a
prompt with which the same model does all of them right, and others of the same kind: general rules and facts, no
answers to single tasks. Write the whole new prompt in one block between ``` and ```, and nothing after it."""
"""GEPA puts the prompt and the rollouts in the places of its two markers."""

_TIMEOUT_S, _MAX_TOKENS = 300.0, 4096


class PromptAdapter:
    """Scores prompts. ``collect`` runs rollouts; what is in ``journal`` is not run again.

    Rollouts are sampled at the temperature of the validation, with one seed for each task.
    """

    propose_new_texts = None
    """GEPA's own: the reflection model writes the prompts."""

    def __init__(
        self, config: RunConfig, *, collect: Callable[[list[Rollout]], list[Rollout]], journal: Journal
    ) -> None:
        self._config, self._collect, self._journal = config, collect, journal

    def evaluate(self, batch: list[Task], candidate: Prompts, capture_traces: bool = False) -> Batch:
        """The rewards of a rollout of each task with the prompts ``candidate``.

        Raises :class:`RolloutsFailedError` if a rollout has no reward, twice, for no fault of the policy.
        """
        config, journal = self._config, self._journal.entries
        sampling = {"temperature": config.val_temperature, "max_tokens": config.max_tokens, "seed": config.seed}
        tasks = {digest(candidate, task["id"], config.seed): task for task in batch}
        for _ in range(2):
            if not (left := {key: task for key, task in tasks.items() if key not in journal}):
                break
            requests = [
                Rollout(task=task, group=str(task["id"]), step=1, sampling=sampling, prompts=candidate)
                for task in left.values()
            ]
            results = self._collect(requests)
            for key, result in zip(left, results, strict=True):
                if result.outcome.reward is not None:
                    self._journal.add(key, _entry(result))
        if failed := tasks.keys() - journal.keys():
            last = next(result.outcome for result in reversed(results) if result.outcome.reward is None)
            raise RolloutsFailedError(
                f"{len(failed)} of {len(batch)} rollouts have no reward ({last.status}: {last.message[:300]})"
            )
        entries = [journal[digest(candidate, task["id"], config.seed)] for task in batch]
        return EvaluationBatch(
            outputs=[entry["answer"] for entry in entries],
            scores=[float(entry["reward"]) for entry in entries],
            trajectories=entries if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: Prompts, eval_batch: Batch, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """What the reflection model reads of each rollout: without the gold answer, which no prompt may contain."""
        records = []
        for entry in eval_batch.trajectories or []:
            components = ", ".join(f"{name} {value:g}" for name, value in entry["components"].items())
            failure = f"the rollout failed as {entry['status']}: {entry['message']}"
            reward = (f"{entry['reward']:g} of 1", components, failure if entry["status"] != "succeeded" else "")
            record = {
                "Question": entry["question"],
                "Steps of the agent": "\n\n".join(entry["steps"]) or "(none)",
                "Answer": entry["answer"] or "(none)",
                "Reward": "; ".join(filter(None, reward)),
            }
            records.append(record)
        return {name: records for name in components_to_update}


def _entry(result: Rollout) -> dict[str, Any]:
    outcome = result.outcome
    return {
        "task": str(result.task["id"]),
        "question": str(result.task["question"])[:_MAX_CHARS],
        "reward": outcome.reward,
        "components": dict(outcome.reward_components),
        "status": outcome.status,
        "message": outcome.message[:_MAX_CHARS],
        "answer": outcome.answer[:_MAX_CHARS],
        "steps": _steps(result),
    }


def _steps(result: Rollout) -> list[str]:
    """The agent's steps as text; those of an agent that reports none are its calls."""
    texts = [
        f"{step['agent']} ({step['kind']}{'' if step['ok'] else ', failed'})\n{step['input']}\n=> {step['output']}"
        for step in result.outcome.steps
    ] or [
        f"{call.agent or 'agent'} (llm)\n{_text(call.messages[-1:])}\n=> {_text([call.reply])}"
        for call in result.trainable_calls
    ]
    return [text[:_MAX_CHARS] for text in texts[:_MAX_STEPS]]


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    contents = [message.get("content") or message.get("tool_calls") or "" for message in messages]
    return "\n".join(
        content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) for content in contents
    )


def digest(*parts: Any) -> str:
    """A short name for the JSON of ``parts``."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:24]


class Journal:
    """A file with one entry a line, ``{"key": ..., **entry}``. A line that is incomplete, after a kill, is ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, dict[str, Any]] = {}
        """By their keys."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for line in text.splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                entry = json.loads(line)
                self.entries[entry.pop("key")] = entry
        self._line_end = "" if text.endswith("\n") or not text else "\n"

    def add(self, key: str, entry: Mapping[str, Any]) -> None:
        """Write an entry, without secrets."""
        self.entries[key] = masked_values(entry)
        append_line(self._path, self._line_end + json.dumps({"key": key, **self.entries[key]}, ensure_ascii=False))
        self._line_end = ""


class ReflectionError(UserError):
    """The reflection model gives no reply."""

    exit_code = 1


class ReflectionModel:
    """A function from a prompt to a reply of the run's reflection model. Replies are in ``journal``, asked for once.

    Raises :class:`ReflectionError`.
    """

    def __init__(self, config: RunConfig, journal: Journal) -> None:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it downloads a list of prices
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own types
            import litellm
        litellm.suppress_debug_info = True
        self._complete, self._journal, self._asked = litellm.completion, journal, Counter[str]()
        model, at, address = str(config.reflection_model).partition("@http")
        self._name, self._place = f"the reflection model {model}", {"model": model}
        if at:
            self._name += f" at http{address}"
            key = os.environ.get("OPENAI_API_KEY") or "none"
            self._place = {"model": f"openai/{model}", "api_base": f"http{address}", "api_key": key}
        self.error: ReflectionError | None = None
        """Why there was no reply. GEPA logs an exception and goes on, so the caller looks here."""

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """The reply to a prompt, or to messages."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        name = digest(messages)
        self._asked[name] += 1  # the same question again is another sample
        key = f"{name}-{self._asked[name]}"
        if key not in self._journal.entries:
            limits = {"max_tokens": _MAX_TOKENS, "timeout": _TIMEOUT_S, "num_retries": 2}
            try:
                reply = self._complete(messages=messages, drop_params=True, **limits, **self._place)
            except Exception as error:  # each provider has its own exceptions
                self.error = ReflectionError(f"{self._name} gives no reply: {mask_secrets(str(error))[:500]}")
                raise self.error from error
            self._journal.add(key, {"messages": messages, "reply": str(reply.choices[0].message.content or "")})
        return str(self._journal.entries[key]["reply"])
