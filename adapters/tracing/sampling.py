"""The sampling parameters of a rollout belong to the trainer, which computes log-probabilities with them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.open_attempts import OpenAttempt
from groundwire.adapters.tracing.wire.request import CONSTRAINTS, RAW_PROMPT

_log = logging.getLogger(__name__)
_LIMITS = ("max_tokens", "max_completion_tokens")
_SEED_BYTES = 6  # JSON's numbers are exact up to 53 bits
_PROMPT_BYTES, _OPTIONS_BYTES = 8, 4
_OPTIONS = (
    *("n", "tool_choice", "parallel_tool_calls", "response_format", "stop", "reasoning_effort", "chat_template_kwargs"),
    *_LIMITS,
    *CONSTRAINTS,
)
"""The fields of a request, beside its prompt, that change what is sampled and are the agent's own."""


def derive_seed(*parts: object) -> int:
    """The seed of ``parts``: always the same, and independent of the seeds of other parts."""
    key = "/".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=_SEED_BYTES).digest(), "big")


def attempt_sampling(sampling: Any, attempt: int) -> dict[str, Any]:
    """The sampling parameters of an attempt, from 1, of a rollout with ``sampling``: a retry has another seed."""
    own = dict(sampling) if isinstance(sampling, Mapping) else {}
    if attempt > 1 and isinstance(own.get("seed"), int):
        own["seed"] = derive_seed(own["seed"], attempt)
    return own


class SamplingRule:
    """Gives each call its own seed, replaces the sampling parameters of agents by the trainer's, and warns at the first
    one that differs.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def apply(self, chat: dict[str, Any], attempt: OpenAttempt) -> str:
        """Put the sampling parameters of its attempt into a chat request; returns the :func:`prompt_key` that it had.

        The seed is derived from the attempt's seed, the prompt, and the number of requests with this prompt before: the
        choices of a rollout's calls are independent, and an agent that asks several times gets several samples.
        ``max_tokens`` is the smaller of the two: only here is it capped, and a policy ends a reply at its context.
        ``top_p`` is 1 if the trainer names only a temperature. Parameters that the trainer does not name stay as they
        are.
        """
        sampling, prompt = attempt.sampling, _prompt(chat)
        key = prompt_key(chat, prompt)
        ours = {name: sampling[name] for name in ("temperature", "top_p") if sampling.get(name) is not None}
        if "temperature" in ours:
            ours.setdefault("top_p", 1.0)
        theirs = {name: chat[name] for name in ours if chat.get(name) not in (None, ours[name])}
        if theirs and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "an agent asks for %s; the run samples with %s, which training needs, whatever agents ask for",
                ", ".join(f"{name}={value!r:.40}" for name, value in theirs.items()),
                ", ".join(f"{name}={ours[name]!r:.40}" for name in theirs),
            )
        if isinstance(limit := sampling.get("max_tokens"), int):
            asked = [name for name in _LIMITS if chat.get(name) is not None] or _LIMITS[:1]
            ours |= {name: limit for name in asked if _is_above(chat.get(name), limit)}
        if isinstance(seed := sampling.get("seed"), int):
            ours["seed"] = derive_seed(seed, attempt.count_request(prompt), prompt)
        chat.update(ours)
        return key


def prompt_key(chat: Mapping[str, Any], prompt: str) -> str:
    """A digest of a chat request's ``prompt``, and one of what else the agent asks for: by both it is found in the
    record of a rollout.
    """
    messages = chat.get("messages")
    others = [_other_texts(message) for message in messages] if isinstance(messages, list) else []
    options = to_json([[chat.get(name) for name in _OPTIONS], others])
    return "".join(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
        for text, size in ((prompt, _PROMPT_BYTES), (options, _OPTIONS_BYTES))
    )


def same_prompt(key: str, other: str) -> bool:
    """Whether two requests with these :func:`prompt_key` differ at most in their options."""
    return key[: 2 * _PROMPT_BYTES] == other[: 2 * _PROMPT_BYTES]


def _prompt(chat: Mapping[str, Any]) -> str:
    """What the model reads, as JSON. The ids of tool calls are random, and chat templates leave them out."""
    messages = chat.get("messages")
    read = [_without_ids(message) for message in messages] if isinstance(messages, list) else messages
    return to_json([chat.get(RAW_PROMPT), read, chat.get("tools")])


def _without_ids(message: Any) -> Any:
    """The parts of a message that are in the prompt. What is no message stays as it is: the policy refuses it."""
    if not isinstance(message, dict):
        return message
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        calls = [call.get("function") if isinstance(call, dict) else call for call in calls]
    return [message.get("role"), message.get("content"), calls]


def _other_texts(message: Any) -> Any:
    """What chat templates may also read of a message."""
    names = ("name", "reasoning_content", "reasoning")
    return [message.get(name) for name in names] if isinstance(message, dict) else None


def _is_above(value: Any, limit: int) -> bool:
    """Whether a limit is missing or larger. Other values are left to the policy, which refuses them."""
    return value is None or (isinstance(value, int) and value > limit)
