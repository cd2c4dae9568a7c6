"""On-policy distillation: a teacher says how probable it finds each token that the policy has sampled.

The advantage of a token is ``(1 - w) * A + w * (d - mean)`` with the advantage ``A`` of the reward, ``w`` for
``teacher_weight``, the difference ``d = teacher - sampled`` of the log-probabilities, and its mean over the group's
tokens, which only makes the gradient less noisy. The expectation of ``d`` over the policy's own tokens is the negative
reverse KL divergence to the teacher (Agarwal et al. 2024, "On-Policy Distillation of Language Models",
arXiv:2306.13649, with the policy gradient of Gu et al. 2024, "MiniLLM", arXiv:2306.08543, for one token at a time). A
difference is cut at -10 and 10. Replies to a grammar have no such term: the policy's log-probabilities are those of the
constrained distribution, and the teacher's are not.

The teacher is an OpenAI-compatible server whose ``/completions`` takes token ids and answers ``prompt_logprobs``: vLLM,
or ``groundwire serve``. It must have the policy's tokenizer.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from groundwire.adapters.tracing import Trajectory, trajectories
from groundwire.tools.secrets import mask_secrets, say
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.rollout import Rollout

MAX_DIFFERENCE = 10.0
_PROBE = "SELECT name FROM singer WHERE age > 30 ORDER BY name LIMIT 5"
_PARALLEL, _TIMEOUT_S, _RETRIES = 32, 300.0, 4
_BUSY = {429, 500, 502, 503, 504}
_PAUSES_S = (1, 2, 4, 8, 16)
"""Before a teacher that answered one of :data:`_BUSY` is asked again."""


class TeacherError(ConfigError):
    """The teacher cannot be asked, or gives no log-probabilities of the policy's tokens."""


def add_teacher(items: Sequence[Any], config: RunConfig) -> None:
    """Change the advantages of a group's trained tokens, in place; ``items`` are :class:`.credit.TrainingItem`."""
    differences: list[tuple[list[float], int, float]] = []
    for item in items:
        item.advantages[:] = [(1 - config.teacher_weight) * advantage for advantage in item.advantages]
        for call in item.trajectory.calls:
            start = len(call.prompt_ids) - len(item.trajectory.prompt_ids)
            pairs = zip(call.teacher_logprobs, call.logprobs, strict=True) if call.teacher_logprobs else ()
            differences += [
                (item.advantages, place, min(max(teacher - sampled, -MAX_DIFFERENCE), MAX_DIFFERENCE))
                for place, (teacher, sampled) in enumerate(pairs, start)
                if item.mask[place]
            ]
    mean = sum(difference for _, _, difference in differences) / max(1, len(differences))
    for advantages, place, difference in differences:
        advantages[place] += config.teacher_weight * (difference - mean)


def teacher_counts(rollouts: Sequence[Rollout], agent_match: str | None) -> Counter[str]:
    """Sums over the trained calls of rollouts that a teacher has judged, for :func:`teacher_means`."""
    calls = [call for rollout in rollouts for call in rollout.trained_calls(agent_match)]
    judged = [call for call in calls if call.teacher_logprobs]
    counts: Any = Counter(teacher_calls=len(calls), teacher_judged=len(judged))
    counts["teacher_tokens"] = sum(len(call.logprobs) for call in judged)
    counts["teacher_nats"] = sum(sum(call.logprobs) - sum(call.teacher_logprobs) for call in judged)
    return counts


def teacher_means(counts: Mapping[str, float]) -> dict[str, float]:
    """``teacher_kl``, the reverse KL divergence to the teacher in nats a token, and ``teacher_share``, the part of the
    trained calls that it has judged; nothing without a teacher."""
    if not (tokens := counts.get("teacher_tokens", 0)):
        return {}
    share = counts["teacher_judged"] / counts["teacher_calls"]
    return {"teacher_kl": round(counts["teacher_nats"] / tokens, 6), "teacher_share": round(share, 4)}


class NoLogprobsError(TeacherError):
    """The teacher answers, but gives no log-probabilities of the policy's tokens."""


class Teacher:
    """The ``teacher_model`` at the URL ``teacher``. Raises :class:`TeacherError`, also if its tokenizer is another."""

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        self._agent_match, self._was_busy = config.agent_match, False
        self._model, self._url = config.teacher_model, str(config.teacher).rstrip("/")
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"},
            timeout=_TIMEOUT_S,
            transport=httpx.HTTPTransport(retries=_RETRIES, limits=httpx.Limits(max_connections=_PARALLEL)),
        )
        ids = tokenizer.encode(_PROBE, add_special_tokens=False)
        texts = [str(entry.get("decoded_token")).strip() for entry in self._entries(ids)[1:]]
        own = [tokenizer.decode([token]).strip() for token in ids[1:]]
        if texts != own:
            raise NoLogprobsError(
                f"the teacher {self._model} has another tokenizer than the model: it reads {own[:5]} as {texts[:5]}. "
                "Take a teacher of the same family, or learn its answers (groundwire learn)"
            )

    def judge(self, rollouts: Sequence[Rollout]) -> None:
        """Give the trained calls their :attr:`.LLMCall.teacher_logprobs`."""
        paths = [path for rollout in rollouts for path in trajectories(rollout.trained_calls(self._agent_match))]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(self._judge, paths))

    def _judge(self, path: Trajectory) -> None:
        calls = [call for call in path.calls if not call.grammar]
        if not calls:
            return
        entries = self._entries([*path.prompt_ids, *path.response_ids])
        logprobs = [math.nan, *(entry["logprob"] for entry in entries[1:])]
        for call in calls:
            start = len(call.prompt_ids)
            call.teacher_logprobs = logprobs[start : start + len(call.response_ids)]

    def _say_busy(self, text: str) -> None:
        if not self._was_busy:
            self._was_busy = True
            say(f"warning: {text}", err=True)

    def _entries(self, ids: Sequence[int]) -> list[Mapping[str, Any]]:
        """What the teacher says of each token: its ``logprob`` and ``decoded_token``."""
        request = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        name = f"the teacher {self._model} at {self._url}"
        try:
            for pause_s in (0, *_PAUSES_S):
                time.sleep(pause_s)
                reply = self._client.post(f"{self._url}/completions", json=request)
                if reply.status_code not in _BUSY:
                    break
                self._say_busy(f"{name} answers {reply.status_code}: it is asked again")
            reply.raise_for_status()
            listed = reply.json()["choices"][0].get("prompt_logprobs")
        except httpx.HTTPStatusError as error:
            text = mask_secrets(error.response.text)[:300]
            # OpenAI's chat models have no completions, and other servers refuse a field that they do not know.
            kind = NoLogprobsError if error.response.status_code in (400, 404, 405, 422, 501) else TeacherError
            raise kind(f"{name} answers {error.response.status_code}: {text}") from error
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise TeacherError(f"{name} gives no answer: {type(error).__name__} {mask_secrets(str(error))}") from error
        entries = [(entry or {}).get(str(token), {}) for token, entry in zip(ids, listed or (), strict=False)]
        if len(entries) != len(ids) or not all("logprob" in entry for entry in entries[1:]):
            raise NoLogprobsError(
                f"{name} gives no log-probabilities of a prompt's tokens (prompt_logprobs): serve it with vLLM or "
                "groundwire serve, or learn its answers (groundwire learn)"
            )
        return entries
