"""Renders chat templates. A template is a program of the model's author: it may loop, or write without end.

The starter's own template runs here. Every other one runs in a process that the kernel ends after some seconds of CPU
time, with little memory (:mod:`groundwire.train.policy.chat._template_worker`). The process starts at the first such
template, takes a second to start, and then serves all of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from typing import Any

from groundwire.train.policy import STARTER

__all__ = ["TemplateLimitError", "TemplateRefusedError", "is_trusted", "render"]

_MAX_CHARACTERS = 8_000_000


class TemplateRefusedError(ValueError):
    """The template raised an error for these messages."""


class TemplateLimitError(ValueError):
    """The template took too much time or memory, or wrote too much."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The prompt that the tokenizer's chat template makes of ``messages``, up to where the reply begins.

    ``options`` are further variables of the template, ``tools`` among them. Raises :class:`TemplateRefusedError` and
    :class:`TemplateLimitError`.
    """
    if is_trusted(tokenizer):
        try:
            return str(
                tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
            )
        except Exception as error:
            raise TemplateRefusedError(error) from error
    try:
        template = tokenizer.get_chat_template(None, options.get("tools"))
    except ValueError as error:  # it has none
        raise TemplateRefusedError(str(error).partition(".")[0]) from error
    variables = {name: _text(value) for name, value in tokenizer.special_tokens_map.items()}
    request = {"chat_template": template, "conversations": [list(messages)], **variables, **options}
    answer = _worker.ask(json.dumps({"limit": _MAX_CHARACTERS, "request": request}).encode())
    if "limit" in answer:
        raise TemplateLimitError(answer["limit"])
    if "error" in answer:
        raise TemplateRefusedError(answer["error"])
    return str(answer["text"])


def is_trusted(tokenizer: Any) -> bool:
    """Whether the tokenizer has the starter's own template, or renders with the code of an installed package."""
    from transformers import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return True
    return bool(tokenizer.chat_template == _starter_template())


@functools.cache
def _starter_template() -> str:
    return (STARTER / "chat_template.jinja").read_text(encoding="utf-8")


def _text(value: Any) -> Any:
    return [str(each) for each in value] if isinstance(value, list) else str(value)


class _Worker:
    """The process, started when it is needed; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None

    def ask(self, request: bytes) -> dict[str, Any]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                self._pipe.send_bytes(request)
                return dict(json.loads(self._pipe.recv_bytes()))
            except (EOFError, OSError):
                return {"limit": self._end()}

    def _start(self) -> None:
        self.close()
        self._pipe, theirs = Pipe()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}\n"
                f"from groundwire.train.policy.chat._template_worker import serve; serve({theirs.fileno()})"
            )
            # A session of its own: Ctrl-C in a terminal does not reach it. -S: sys.path is set already.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-S", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _end(self) -> str:
        status = self._process.wait() if self._process else 0
        self.close()
        if status == -signal.SIGPROF:
            return "it runs for too long"
        return f"its process ended with status {status}"

    def close(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()
            self._process = None


_worker = _Worker()


def _forget_worker() -> None:
    """In a forked child: the process belongs to the parent."""
    global _worker  # noqa: PLW0603
    if _worker._pipe is not None:
        with contextlib.suppress(OSError):
            _worker._pipe.close()
    if _worker._process is not None:
        _worker._process.returncode = 0
    _worker = _Worker()


def _close_worker() -> None:
    _worker.close()


os.register_at_fork(after_in_child=_forget_worker)
atexit.register(_close_worker)
