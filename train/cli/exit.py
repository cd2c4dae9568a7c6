"""How a command ends: what a user can mend is one sentence, with 2 for what was typed and 1 for what broke."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from groundwire import domains, rewards
from groundwire.tools.plugins import PluginError, UnknownNameError
from groundwire.tools.terminal import leave
from groundwire.train.artifacts.run_dir import RunDirError
from groundwire.train.config.errors import ConfigError, EventLoopError, RolloutsFailedError
from groundwire.train.store.health import StoreAddressError

__all__ = ["Stop", "exit_on_user_error", "serving"]

_TYPED = (ConfigError, UnknownNameError, StoreAddressError, domains.DataError, rewards.JudgeSettingsError)
_USERS_ERRNOS = {
    *(getattr(errno, name) for name in ("ENOSPC", "EACCES", "EROFS", "EDQUOT", "ENOENT", "ENOTDIR", "EISDIR")),
    None,
}


class Stop(Exception):
    """Ends the program with one sentence."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def exit_on_user_error(debug: bool = False) -> Iterator[None]:
    """What a user can mend ends in one sentence and a non-zero exit."""
    blocked = False
    try:
        yield
    except Stop as stop:
        message, code = str(stop), stop.code
    except RunDirError as error:
        message, code = str(error), error.status
    except PluginError as error:
        message, code = str(error), 1
    except _TYPED as error:
        message, code = str(error), 2
    except RolloutsFailedError as error:
        message, code = str(error), 1
    except EventLoopError as error:
        message, code, blocked = str(error), 1, True
    except KeyboardInterrupt:
        message, code = "stopped", 130
    except OSError as error:
        if debug or error.errno not in _USERS_ERRNOS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        hint = {errno.ENOSPC: "; make room and go on with --resume"}.get(error.errno or 0, "")
        message, code = f"{error.strerror or error}{where}{hint}", 1
    else:
        return
    typer.echo(f"error: {message}" if code != 130 else message, err=True)
    if blocked or code == 130:  # there are threads at work: an agent's, or Ray's, which then aborts now and then
        leave(code)
    sys.exit(code)


@contextmanager
def serving() -> Iterator[None]:
    """What keeps a model or the proxy from being served here, as a :class:`Stop`. Imports both."""
    from groundwire.adapters.tracing.proxy import HostUnusableError, ProxyError
    from groundwire.train.policy.decoder import UnsupportedModelError

    try:
        yield
    except HostUnusableError as error:
        raise Stop(str(error)) from error
    except (ProxyError, UnsupportedModelError) as error:
        raise Stop(str(error), code=1) from error
