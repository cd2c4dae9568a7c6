"""What the import of an agent has made that its forked processes do not have, or have in common."""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def fork_hazards(without: Collection[int] = ()) -> list[str]:
    """What does not work in a forked process: threads, and child processes besides those ``without``."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    hazards = [f"the thread {thread.name!r} ({_target(thread)})" for thread in others]
    with suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        hazards += [f"the process {_command(int(pid))}" for pid in children if int(pid) not in without]
    return hazards


def equal_generators() -> list[str]:
    """The names of random generators that are attributes of the app's own modules: all rollouts get equal numbers."""
    return sorted(_generators())


def _generators() -> Iterator[str]:
    kinds: tuple[type, ...] = (random.Random,)
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        kinds += (numpy_random.Generator, numpy_random.RandomState)
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file and not file.startswith(installed) and not module.__name__.startswith("groundwire."):
            for name, value in [*vars(module).items()]:
                if isinstance(value, kinds):
                    yield f"{module.__name__}.{name}"


def _target(thread: threading.Thread) -> str:
    target: Any = getattr(thread, "_target", None) or type(thread).run
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return repr(words[:200])
    return str(pid)
