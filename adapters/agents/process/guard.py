"""A process that waits for another one, and ends with it whatever that one has started.

As a subreaper it inherits what has left the group and the session of its child, so nothing gets away. Run as a file
(:func:`guarded`) it starts a program in folders of its own (:mod:`.folders`): imported with its package it would make
each program wait.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # options of prctl


def end_with(parent: int, number: int) -> None:
    """Get the signal ``number`` when the process ``parent``, which forked this one, ends."""
    _prctl(_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of processes below this one whose parent ends."""
    _prctl(_SUBREAPER, 1)


def is_killed_first() -> None:
    """If memory runs out, let the kernel end this process and not the one that trains."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children() -> set[int]:
    """The children of this process; none where the system does not tell them."""
    with suppress(OSError):
        return {*map(int, _listing().read_text(encoding="ascii").split())}
    return set()


def _listing() -> Path:
    return Path(f"/proc/self/task/{os.getpid()}/children")


def kill(pid: int) -> None:
    """End a process."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """End the group of a process where the system does not tell its children."""
    if not _listing().exists():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def guard(*, lifeline: int | None = None, grace_s: float = 0.0, at_end: Callable[[], None] = lambda: None) -> None:
    """Fork, and return in the child. This process waits for the child's end, SIGTERM, SIGHUP, or the end of
    ``lifeline``, which another process holds open; kills what is left, after ``grace_s`` in which guards below it may
    do the same, and ends with the child's status. ``at_end`` runs when nothing is left.
    """
    signals = {signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    adopt_orphans()
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        sys.exit(f"no process can be started: {error.strerror}")
    if not child:
        end_with(parent, signal.SIGKILL)
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return
    try:
        if lifeline is not None:
            threading.Thread(target=_end_at, args=(lifeline,), daemon=True).start()
        code = None
        while code is None and signal.sigwait(signals) == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
        kill_group(child)
        if grace_s:
            _wait_for_guards(child if code is None else None, grace_s)
        while left := children():  # those whose parent is killed become this process's, and are next
            for pid in left:
                kill(pid)
            for pid in left:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        at_end()
        os._exit(0 if code is None else 128 - code if code < 0 else code)
    finally:
        os._exit(70)


def _wait_for_guards(child: int | None, seconds: float) -> None:
    if child is not None:
        kill(child)
    deadline = time.monotonic() + seconds
    while children() and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, seconds / 10)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def guarded(command: Sequence[str], *, place: str = ".", way: str = "shared", grace_s: float = 0.0) -> list[str]:
    """``command`` below a :func:`guard` that ends with the thread which starts it, where the system can fork; ``place``
    and ``way`` are those of :func:`.folders.own_working_folder`.
    """
    if not hasattr(os, "fork"):
        return [*command]
    return [sys.executable, "-S", "-E", __file__, str(grace_s), place, way, *command]


def how_ended(status: int) -> str:
    """An exit status in words. A guard passes on the number of a signal with 128 added, as a shell does."""
    number = -status if status < 0 else status - 128
    try:
        return f"signal {signal.Signals(number).name}" if number > 0 else f"status {status}"
    except ValueError:
        return f"status {status}"


def _end_at(lifeline: int) -> None:
    with suppress(OSError):
        os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Become the guard of the program in the arguments."""
    with suppress(OSError):  # a group of its own, which gets SIGHUP and SIGCONT if it is frozen when its starter ends
        os.setpgid(0, 0)
    folders = import_module("folders")  # beside this file
    grace_s, place, way, *command = sys.argv[1:]
    end_with(os.getppid(), signal.SIGTERM)
    guard(grace_s=float(grace_s))
    is_killed_first()
    folders.own_working_folder(Path(place), way)
    if way != "shared":
        os.environ.update(folders.own_folders(Path(place)))
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
