"""A process that waits for another one, and ends with it whatever that one has started.

Below a guard nothing gets away: as a subreaper it inherits what has left the group and the session of its child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_DEATH_SIGNAL, _SUBREAPER = 1, 36
"""Options of prctl."""


def end_with(parent: int, number: int) -> None:
    """Get the signal ``number`` when the process ``parent``, which forked this one, ends."""
    _prctl(_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(1)


def guard(
    *,
    lifeline: int | None = None,
    beside: Callable[[], None] | None = None,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Fork, and return in the child. This process waits for the child's end, SIGTERM, or the end of ``lifeline``, which
    another process holds open; kills what is left, and ends with the child's status. ``beside`` runs in a thread of it,
    ``at_end`` when nothing is left.
    """
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _prctl(_SUBREAPER, 1)
    parent = os.getpid()
    child = os.fork()
    if not child:
        end_with(parent, signal.SIGKILL)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in {*signals, signal.SIGINT}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return
    try:
        for work in (beside, None if lifeline is None else lambda: _end_at(lifeline)):
            if work is not None:
                threading.Thread(target=work, daemon=True).start()
        code = None
        while code is None and signal.sigwait(signals) == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
        _kill_descendants(child)
        at_end()
        os._exit(0 if code is None else 128 - code if code < 0 else code)
    finally:
        os._exit(70)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _end_at(lifeline: int) -> None:
    with suppress(OSError):
        os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_descendants(child: int) -> None:
    """Kill all processes below this one: those whose parent is killed become its children, and are next."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    if not listing.exists():  # not Linux
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        return
    while children := [int(pid) for pid in listing.read_text(encoding="ascii").split()]:
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
