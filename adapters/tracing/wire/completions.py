"""OpenAI's legacy completions: the prompt is sampled as it is, without a chat template.

The chat request has the prompt beside its messages, which are for the trace only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.wire.call import Conversation, WireCall, encode_event
from groundwire.adapters.tracing.wire.request import RAW_PROMPT, RefusedError, refuse_fields, wants_usage
from groundwire.tools.files import shorten_repr

_MAX_TOKENS = 16  # the API's default
_REFUSED = {"echo": "replies do not repeat the prompt", "suffix": "replies are written from left to right"}
_OWN = {*_REFUSED, "prompt"}
_CHOICE_IDS = ("token_ids", "grammar")


class CompletionsCall(WireCall):
    """A completion of one prompt, text or token ids."""

    path = "completions"
    name = "completions"
    fields = ("prompt",)

    def __init__(self, request: dict[str, Any], conversation: Conversation) -> None:
        refuse_fields(request, _REFUSED)
        prompt = _one_prompt(request.get("prompt"))
        prompt_text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        self.chat = {
            **{name: value for name, value in request.items() if name not in _OWN and value is not None},
            RAW_PROMPT: prompt,
            "messages": [{"role": "user", "content": prompt_text}],
            "max_tokens": _MAX_TOKENS if request.get("max_tokens") is None else request["max_tokens"],
            "logprobs": request.get("logprobs") is not None,
        }

    def reply(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole completion."""
        return self._legacy(completion, "message")

    def events(self, chunk: Mapping[str, Any]) -> bytes:
        """The chunk as an event; none for a usage that only the proxy has asked for."""
        if chunk.get("usage") and not chunk.get("choices") and not wants_usage(self.chat):
            return b""
        return encode_event(self._legacy(chunk, "delta"))

    def _legacy(self, reply: Mapping[str, Any], message_field: str) -> dict[str, Any]:
        """A chat completion, or a chunk of one, in the legacy format."""
        choices = []
        prompt_ids = reply.get("prompt_token_ids") if self.chat.get("return_token_ids") else None
        for choice in reply.get("choices") or ():
            legacy = {
                "index": choice.get("index") or 0,
                "text": (choice.get(message_field) or {}).get("content") or "",
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.get("finish_reason"),
                **{name: choice[name] for name in _CHOICE_IDS if name in choice},
            }
            choices.append(legacy if prompt_ids is None else {**legacy, "prompt_token_ids": prompt_ids})
        rest = {name: value for name, value in reply.items() if name not in ("choices", "prompt_token_ids")}
        return {**rest, "object": "text_completion", "choices": choices}

    def _logprobs(self, choice: Mapping[str, Any]) -> dict[str, Any] | None:
        content = (choice.get("logprobs") or {}).get("content")
        if not content or not self.chat["logprobs"]:
            return None
        tokens = [entry.get("token") or "" for entry in content]
        offsets = [0, *itertools.accumulate(map(len, tokens))][:-1]
        return {
            "tokens": tokens,
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _one_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise RefusedError(
        400, f"prompt must be one text or one list of token ids, not {shorten_repr(prompt)}", param="prompt"
    )
