"""How a command ends: a :class:`~groundwire.tools.errors.UserError` as one line on stderr, with its exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from groundwire.tools.errors import CommandError, UserError

__all__ = ["exit_now", "exit_on_user_error", "raise_keyboard_interrupt"]

_INTERRUPTED = 130
_USER_ERRNOS = {
    *(getattr(errno, name) for name in ("ENOSPC", "EACCES", "EROFS", "EDQUOT", "ENOENT", "ENOTDIR", "EISDIR")),
    None,
}


@contextmanager
def exit_on_user_error(debug: bool = False, exit_code: int | None = None) -> Iterator[None]:
    """Exit after an error that the user can fix, a disk's and Ctrl-C included.

    ``debug`` shows the traceback of a disk's error. ``exit_code`` replaces the errors' own exit codes.
    """
    try:
        yield
        return
    except UserError as caught:
        error = caught
    except KeyboardInterrupt:
        error = CommandError("stopped", _INTERRUPTED)
    except OSError as caught:
        if debug or caught.errno not in _USER_ERRNOS:
            raise
        error = CommandError(_os_error_message(caught), 1)
    interrupted = error.exit_code == _INTERRUPTED
    print(error if interrupted else f"error: {error}", file=sys.stderr)
    code = error.exit_code if interrupted or exit_code is None else exit_code
    if interrupted or error.exits_at_once:
        exit_now(code)
    sys.exit(code)


def _os_error_message(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    hint = "; free some space and continue with --resume" if error.errno == errno.ENOSPC else ""
    return f"{error.strerror or error}{where}{hint}"


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for its threads.

    A normal exit waits for some threads and stops others inside native code, which sometimes aborts (Ray's do).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def raise_keyboard_interrupt(_signal: int, _frame: object) -> NoReturn:
    """Signal handler: end cleanly on SIGTERM, as on Ctrl-C."""
    raise KeyboardInterrupt
