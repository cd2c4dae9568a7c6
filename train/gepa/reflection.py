"""The model that reads rollouts and writes better prompts: a name of LiteLLM, or a model at an endpoint."""

from __future__ import annotations

import os
import warnings
from collections import Counter
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
