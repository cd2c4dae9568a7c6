"""Renders chat templates. A template is a program of the model's author: it may loop, or write without end.

The project's own templates run here. Every other one runs in a process that the kernel ends after some seconds of CPU
time, with little memory (:mod:`groundwire.train.policy.chat._template_worker`). The process starts at the first such
template, takes a second to start, and then serves all of this process.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.tools.worker_process import WorkerEndedError, WorkerPool
from groundwire.train.policy import STARTER

_MAX_CHARACTERS = 8_000_000
_MAX_CPU_S = 2.0
_workers = WorkerPool("groundwire.train.policy.chat._template_worker")


class TemplateRefusedError(ValueError):
    """The template raised an error for these messages."""


class TemplateLimitError(ValueError):
    """The template took too much time or memory, or wrote too much."""


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
) -> str:
    """The prompt that the tokenizer's chat template makes of ``messages``, up to where the reply begins.

    Without ``add_generation_prompt`` it ends with the last message. ``options`` are further variables of the template,
    ``tools`` among them. Raises :class:`TemplateRefusedError` and
    :class:`TemplateLimitError`.
    """
    if is_trusted(tokenizer):
        try:
            options["add_generation_prompt"] = add_generation_prompt
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:
            raise TemplateRefusedError(error) from error
    try:
        template = tokenizer.get_chat_template(None, options.get("tools"))
    except ValueError as error:
        raise TemplateRefusedError("the model has none: use an instruct model, or set its chat_template") from error
    variables = {name: _text(value) for name, value in tokenizer.special_tokens_map.items()}
    options["add_generation_prompt"] = add_generation_prompt
    return _render_apart(template, messages, {**variables, **options})


def check_template(template: str, variables: Mapping[str, Any]) -> None:
    """Render one message of a user, or with a system message before it. Raises as :func:`render`."""
    if template in _own_templates():
        return
    user = {"role": "user", "content": "a word"}
    variables = {"add_generation_prompt": True, **{name: _text(value) for name, value in variables.items()}}
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
    message = json.dumps({"characters": _MAX_CHARACTERS, "cpu_s": _MAX_CPU_S, "request": request}).encode()
    try:
        answer = json.loads(_workers.ask(lambda: message) or b"")
    except WorkerEndedError as error:
        raise TemplateLimitError("it runs for too long" if error.timed_out else str(error)) from error
    if "limit" in answer:
        raise TemplateLimitError(answer["limit"])
    if "error" in answer:
        raise TemplateRefusedError(str(answer["error"]).rstrip("."))  # more of the sentence follows
    return str(answer["text"])


def is_trusted(tokenizer: Any) -> bool:
    """Whether the tokenizer has a template of this project, or renders with the code of an installed package."""
    from transformers import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return True
    return tokenizer.chat_template in _own_templates()


def has_tools(tokenizer: Any) -> bool:
    """Whether the tools of a request reach the prompt; a template without them leaves them out silently."""
    return "tools" in str(tokenizer.chat_template or "tools") or is_trusted(tokenizer)


@functools.cache
def smollm2_template() -> str:
    """SmolLM2's chat template, and with tools the starter's: the model's own has none.

    Without a system message the model's own has this one.
    """
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return (
        "{%- if messages and messages[0].role != 'system' and not tools %}\n"
        f"    {{{{- '<|im_start|>system\\n{default}<|im_end|>\\n' }}}}\n"
        "{%- endif %}\n"
    ) + _starter_template()


@functools.cache
def _starter_template() -> str:
    return (STARTER / "chat_template.jinja").read_text(encoding="utf-8")


def _own_templates() -> tuple[str, str]:
    return _starter_template(), smollm2_template()


def _text(value: Any) -> Any:
    return [str(each) for each in value] if isinstance(value, list) else str(value)
