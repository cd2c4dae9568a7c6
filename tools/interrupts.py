"""A Ctrl-C while a program is imported. It ends the program at once: there is nothing to clean up yet.

A ``KeyboardInterrupt`` would come in the middle of any module, which may print it, or ignore it. A program's first
import is this module, which imports next to nothing; its command calls :func:`allow_interrupts`. In the milliseconds
before, while Python itself starts, a Ctrl-C shows Python's traceback.
"""

from __future__ import annotations

import _signal  # signal imports enum, which takes longer than all of this
import os
import sys

INTERRUPTED = 130
"""The exit code after Ctrl-C or SIGTERM."""
_PROGRAMS = ("adapters", "domains", "groundwire", "rewards", "tools", "train")


def end_at_interrupt() -> None:
    """From now on SIGINT ends this process with a word, unless it is ignored or handled already."""
    try:
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _end)
    except ValueError:  # not in the main thread
        return


def allow_interrupts() -> None:
    """From now on SIGINT is a ``KeyboardInterrupt`` again."""
    if _signal.getsignal(_signal.SIGINT) is _end:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def is_program() -> bool:
    """Whether this process is one of our modules that was started with ``python -m``."""
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    return bool(module) and module[0].split(".")[0] in _PROGRAMS


def _end(*_: object) -> None:
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)
