"""Renders chat templates. A template is a program of the model's author: it may loop, or write without end.

The project's own templates run here. Every other one runs in a process that the kernel ends after some seconds of CPU
time, with little memory: it runs :func:`serve`. The process starts at the first such template, takes a second to start,
and then serves all of this process.
"""

from __future__ import annotations

import functools
import json
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groundwire.tools.machine import shortage
from groundwire.tools.worker_process import WorkerEndedError, WorkerPool, answer_requests, limit_memory, time_limit
from groundwire.train.policy import STARTER
from groundwire.train.policy.errors import EngineError

_log = logging.getLogger(__name__)
_MAX_CHARACTERS = 8_000_000
_MAX_CPU_S = 2.0
_MEMORY_BYTES = 512 << 20  # beyond what the process has when it starts
_text_templates: set[str] = set()  # the templates that have refused calls whose arguments are objects, and take text
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
    ``tools`` among them. The arguments of calls are objects, or text for a template that refuses objects; arguments
    that are no object are text, or an empty object for a template that refuses that. Raises
    :class:`TemplateRefusedError` and :class:`TemplateLimitError`.
    """
    options["add_generation_prompt"] = add_generation_prompt
    forms: list[Callable[[Any], Any] | None] = [None]
    if any(map(_calls, messages)):
        forms += [_as_object, _as_text]
    template = str(tokenizer.chat_template)
    if template in _text_templates:
        forms.reverse()
    refused: list[TemplateRefusedError] = []
    for form in forms:
        try:
            written = [with_arguments(message, form) for message in messages] if form else messages
            text = _render(tokenizer, written, options)
        except TemplateRefusedError as error:
            refused.append(error)
            continue
        if refused and form is _as_object:
            _warn_hidden()
        elif refused:
            _text_templates.add(template)
        return text
    raise refused[0]


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return message.get("tool_calls") or []


def with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    """``message`` with ``form`` applied to the arguments of its calls."""
    functions = [{**call["function"], "arguments": form(call["function"]["arguments"])} for call in _calls(message)]
    calls = [{**call, "function": function} for call, function in zip(_calls(message), functions, strict=True)]
    return {**message, "tool_calls": calls} if calls else message


def _as_object(arguments: Any) -> Any:
    return {} if isinstance(arguments, str) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@functools.cache
def _warn_hidden() -> None:
    _log.warning(
        "a call in a conversation has arguments that are no JSON object: the model reads {}, as its chat template "
        "takes objects only"
    )


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    if is_trusted(tokenizer):
        try:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:
            if reason := shortage(error):
                raise EngineError(reason, 503) from error
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
    except OSError as error:
        raise EngineError(
            f"no process can be started for the chat template: {shortage(error) or error}", 503
        ) from error
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

    limit_memory(_MEMORY_BYTES)
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
