"""Renders chat templates. A template is a program of the model's author: it may loop, or write without end.

The project's own templates run here. Every other one runs in a process that the kernel ends after some seconds of CPU
time, with little memory: it runs :func:`serve`. The process starts at the first such template, takes a second to start,
and then serves all of this process.
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groundwire.tools.worker_process import WorkerEndedError, WorkerPool, answer_requests, time_limit
from groundwire.train.policy import STARTER

_MAX_CHARACTERS = 8_000_000
_MAX_CPU_S = 2.0
_MEMORY_BYTES = 512 << 20
"""Beyond what the process has when it starts."""
_workers = WorkerPool("groundwire.train.policy.chat.template")


class TemplateRefusedError(ValueError):
    """The template raised an error for these messages."""


class TemplateLimitError(ValueError):
    """The template took too much time or memory, or wrote too much."""


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
) -> str:
    """The prompt that the tokenizer's chat template makes of ``messages``, up to where the reply begins.

    Without ``add_generation_prompt`` it ends with the last message. ``options`` are further variables of the template,
    ``tools`` among them. Raises :class:`TemplateRefusedError` and :class:`TemplateLimitError`.
    """
    options["add_generation_prompt"] = add_generation_prompt
    if is_trusted(tokenizer):
        try:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:
            raise TemplateRefusedError(error) from error
    try:
        template = tokenizer.get_chat_template(None, options.get("tools"))
    except ValueError as error:
        raise TemplateRefusedError("the model has none: use an instruct model, or set its chat_template") from error
    return _render_apart(template, messages, {**_texts(tokenizer.special_tokens_map), **options})


def check_template(template: str, variables: Mapping[str, Any]) -> None:
    """Render one message of a user, or with a system message before it. Raises as :func:`render`."""
    if template in own_templates():
        return
    user = {"role": "user", "content": "a word"}
    variables = {"add_generation_prompt": True, **_texts(variables)}
    try:
        _render_apart(template, [user], variables)
    except TemplateRefusedError as error:
        try:
            system = {"role": "system", "content": "a word"}
            _render_apart(template, [system, user], variables)
        except TemplateRefusedError:
            raise error from None


def _render_apart(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    request = {"chat_template": template, "conversations": [list(messages)], **variables}
    try:
        answer = json.loads(_workers.ask(json.dumps(request).encode) or b"")
    except WorkerEndedError as error:
        raise TemplateLimitError("it runs for too long" if error.timed_out else str(error)) from error
    if "limit" in answer:
        raise TemplateLimitError(answer["limit"])
    if "error" in answer:
        raise TemplateRefusedError(str(answer["error"]).rstrip("."))  # more of the sentence follows
    return str(answer["text"])


def serve(descriptor: int, parent: int) -> None:
    """Render the templates that arrive, in a process of its own."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def answer(request: bytes) -> bytes:
        asked = json.loads(request)
        with time_limit(signal.ITIMER_PROF, _MAX_CPU_S):
            try:
                [text], _ = render_jinja_template(**asked)
                reply = {"text": text}
                if len(text) > _MAX_CHARACTERS:
                    reply = {"limit": f"it writes {len(text):,} characters"}
            except (MemoryError, RecursionError, OverflowError) as error:
                reply = {"limit": f"it needs too much memory ({type(error).__name__})"}
            except Exception as error:  # a template may raise anything
                reply = {"error": (str(error).splitlines() or [type(error).__name__])[0][:300]}
            return json.dumps(reply).encode()

    sizes = Path("/proc/self/statm")
    if sizes.is_file():  # on Linux; elsewhere only the time is limited
        import resource

        limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answer_requests(answer, descriptor, parent)


def is_trusted(tokenizer: Any) -> bool:
    """Whether the tokenizer has a template of this project, or renders with the code of an installed package."""
    from transformers import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return True
    return tokenizer.chat_template in own_templates()


def has_tools(tokenizer: Any) -> bool:
    """Whether the tools of a request reach the prompt; a template without them leaves them out silently."""
    return "tools" in str(tokenizer.chat_template or "tools") or is_trusted(tokenizer)


@functools.cache
def own_templates() -> tuple[str, str]:
    """The starter's chat template, and SmolLM2's with the starter's tools: the model's own has none.

    Without a system message the model's own has a default one.
    """
    starter = (STARTER / "chat_template.jinja").read_text(encoding="utf-8")
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return starter, (
        "{%- if messages and messages[0].role != 'system' and not tools %}\n"
        f"    {{{{- '<|im_start|>system\\n{default}<|im_end|>\\n' }}}}\n"
        "{%- endif %}\n"
    ) + starter


def _texts(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(map(str, value)) if isinstance(value, list) else str(value) for name, value in variables.items()}
