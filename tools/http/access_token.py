"""The token that protects our servers, and the rule that none listens to other machines without one.

A token is given by a file (``--token-file``) or the environment variable ``GROUNDWIRE_TOKEN``. Without either, all
processes of a user share a token in a file that only that user can read. It is made at its first use, and is sent to
servers of this machine only.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from groundwire.tools.errors import UserError
from groundwire.tools.secrets import register_secret

VARIABLE = "GROUNDWIRE_TOKEN"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}", re.ASCII)


class TokenError(UserError):
    """There is no token, or it cannot be used."""


def given_token(file: str | Path | None = None) -> str | None:
    """The token in ``file``, else that of the environment, else None. Raises :class:`TokenError`."""
    if file is not None:
        return _read(Path(file))
    if value := os.environ.get(VARIABLE):
        return _checked(value.strip(), VARIABLE)
    return None


def access_token(file: str | Path | None = None) -> str:
    """The given token, else that of the user. Raises :class:`TokenError`."""
    return given_token(file) or _user_token()


def token_for(address: str, file: str | Path | None = None) -> str | None:
    """The token for the server at ``address``: the given one, else on this machine the user's. Raises as above."""
    if (token := given_token(file)) is not None:
        return token
    with suppress(ValueError):  # no URL
        if is_loopback(urlsplit(address).hostname or ""):
            return _user_token()
    return None


def token_place(file: str | Path | None = None) -> str:
    """Where :func:`access_token` finds the token, for messages. The home folder is ``~``: clients may see it."""
    if file is not None:
        return str(file)
    if os.environ.get(VARIABLE):
        return f"the environment variable {VARIABLE}"
    path, home = _user_file(), os.path.expanduser("~")  # unlike Path.home() it raises nothing
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach servers at ``host``."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_listen(host: str, token: str | None, hint: str = f"set {VARIABLE} or give --token-file FILE") -> None:
    """Raise :class:`TokenError` if other machines could reach a server at ``host`` and no ``token`` was given."""
    if token is None and not is_loopback(host):
        raise TokenError(f"listening on {host or 'all addresses'} needs a token: {hint}")


def _user_file() -> Path:
    import platformdirs

    return platformdirs.user_state_path("groundwire") / "token"


def _user_token() -> str:
    path = _user_file()
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path)
        status = path.stat()
    except OSError as error:
        raise TokenError(f"cannot make the token file {path} ({error.strerror or error}): set {VARIABLE}") from error
    if os.name == "posix" and (status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077):
        raise TokenError(f"{path} can be read by other users, so it is no secret: delete it, and a new one is made")
    return _read(path)


def _create(path: Path) -> None:
    """Write a new token; if another process does so at the same time, the first one wins."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TokenError(f"cannot read the token file {path}: {error.strerror or error}") from error
    return _checked(text.strip(), f"the token in {path}")


def _checked(token: str, source: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise TokenError(
            f"{source} must be 16 to 512 letters, digits and characters of ._~+/=-, such as the output of "
            "openssl rand -hex 32"
        )
    register_secret(token)
    return token
