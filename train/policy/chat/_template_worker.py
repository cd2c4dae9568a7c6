"""The program of the process that :mod:`groundwire.train.policy.chat.template` starts."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from groundwire.tools.worker_process import answer_requests, time_limit

_MEMORY_BYTES = 512 << 20


def serve(descriptor: int, parent: int) -> None:
    """Answer the requests that arrive."""
    _limit_memory()
    answer_requests(_answer, descriptor, parent)


def _answer(request: bytes) -> bytes:
    asked = json.loads(request)
    with time_limit(signal.ITIMER_PROF, asked["cpu_s"]):
        return json.dumps(_render(asked)).encode()


def _render(asked: Any) -> dict[str, str]:
    try:
        [text], _ = render_jinja_template(**asked["request"])
    except (MemoryError, RecursionError, OverflowError) as error:
        return {"limit": f"it needs too much memory ({type(error).__name__})"}
    except Exception as error:  # a template may raise anything
        return {"error": (str(error).splitlines() or [type(error).__name__])[0][:300]}
    if len(text) > asked["characters"]:
        return {"limit": f"it writes {len(text):,} characters"}
    return {"text": text}


def _limit_memory() -> None:
    """Little more than the process has now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # no Linux: only the time is limited
        return
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
