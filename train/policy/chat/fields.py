"""The fields of requests that the policy server does not apply: each is accepted, refused, or named in one warning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from groundwire.tools.files import shorten_repr
from groundwire.train.policy.errors import ChatRequestError

__all__ = ["NO_EFFECT", "REFUSED", "check_other_fields", "warn_once"]

_log = logging.getLogger(__name__)

NO_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "request_id", "priority", "cache_salt",
    }
)  # fmt: skip
"""Fields that do not change what is sampled."""
REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "this model writes text only",
    "web_search_options": "this server runs no tools of its own",
    "structured_outputs": "use response_format",
    "guided_json": "use response_format",
    "guided_regex": "use response_format with a schema that has a pattern",
    "guided_choice": "use response_format with a schema that has an enum",
    "guided_grammar": "use response_format",
    "prompt_logprobs": "only sampled tokens have log-probabilities here",
    "chat_template": "use chat_template_kwargs; the template is that of the model",
    "use_beam_search": "replies are sampled",
    "echo": "replies do not repeat the prompt",
}
"""Fields without which the reply would be another one than the agent expects, and what to do instead."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
"""Values that are the same as a missing field; so are false, empty lists and empty objects."""
_warned: set[str] = set()


def check_other_fields(fields: Mapping[str, Any]) -> None:
    """Check the fields of a request that :class:`ChatRequest` does not have.

    Raises:
        ChatRequestError: for one of :data:`REFUSED`.
    """
    for name, value in fields.items():
        if name in NO_EFFECT or value in (False, [], {}) or value in _NEUTRAL.get(name, ()):
            continue
        if name in REFUSED:
            raise ChatRequestError(f"{name} is not supported: {REFUSED[name]}", param=name)
        warn_once(name, f"requests have {name} = {shorten_repr(value)}, which the policy server does not apply")


def warn_once(name: str, message: str) -> None:
    """Log a warning about ``name``, the first time in this process."""
    if name not in _warned and len(_warned) < 100:  # agents choose the names
        _warned.add(name)
        _log.warning("%s", message)
