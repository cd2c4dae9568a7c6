"""The model that reads rollouts and writes better prompts: a name of LiteLLM, or a model at an endpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.tools.secrets import mask_secrets
from groundwire.train.config.run_config import RunConfig
from groundwire.train.gepa.adapter import Journal, digest

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

_TIMEOUT_S = 300.0
_MAX_TOKENS = 4096


class ReflectionError(UserError):
    """The reflection model gives no reply."""

    exit_code = 1


class ReflectionModel:
    """A function from a prompt to a reply. Replies are kept in ``journal``, and asked for once.

    ``ask`` gets the messages and returns the reply's text. Raises :class:`ReflectionError`.
    """

    def __init__(self, ask: Callable[[list[dict[str, Any]]], str], journal: Journal) -> None:
        self._ask, self._journal, self._asked = ask, journal, Counter[str]()
        self.error: ReflectionError | None = None
        """Why there was no reply. GEPA logs an exception and goes on, so the caller looks here."""

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """The reply to a prompt, or to messages."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        name = digest(messages)
        self._asked[name] += 1  # the same question again is another sample
        key = f"{name}-{self._asked[name]}"
        entry = self._journal.get(key)
        if entry is None:
            try:
                reply = self._ask(messages)
            except ReflectionError as error:
                self.error = error
                raise
            entry = self._journal.add(key, {"messages": messages, "reply": reply})
        return str(entry["reply"])


def ask_model(config: RunConfig) -> Callable[[list[dict[str, Any]]], str]:
    """The function that asks the run's reflection model."""
    model, at, address = str(config.reflection_model).partition("@http")
    return _endpoint(model, f"http{address}") if at else _litellm(config)


def _endpoint(model: str, base_url: str) -> Callable[[list[dict[str, Any]]], str]:
    import httpx

    url = f"{base_url.rstrip('/')}/chat/completions"
    name = f"the reflection model {model} at {base_url}"

    def ask(messages: list[dict[str, Any]]) -> str:
        body = {"model": model, "messages": messages, "max_tokens": _MAX_TOKENS}
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY') or 'none'}"}
        try:
            reply = httpx.post(url, json=body, headers=headers, timeout=_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise ReflectionError(f"{name} cannot be reached: {error or type(error).__name__}") from error
        if not reply.is_success:
            raise ReflectionError(f"{name} answered {reply.status_code}: {mask_secrets(reply.text)[:500]}")
        try:
            return str(reply.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError) as error:
            raise ReflectionError(f"{name} sent no chat completion: {mask_secrets(reply.text)[:200]}") from error

    return ask


def _litellm(config: RunConfig) -> Callable[[list[dict[str, Any]]], str]:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it downloads a list of prices
    import litellm

    litellm.suppress_debug_info = True

    def ask(messages: list[dict[str, Any]]) -> str:
        try:
            reply = litellm.completion(
                model=config.reflection_model,
                messages=messages,
                max_tokens=_MAX_TOKENS,
                timeout=_TIMEOUT_S,
                num_retries=2,
                drop_params=True,
            )
        except Exception as error:  # each provider has its own exceptions
            message = mask_secrets(str(error))[:500]
            raise ReflectionError(
                f"the reflection model {config.reflection_model} cannot be asked: {message}"
            ) from error
        return str(reply.choices[0].message.content or "")

    return ask
