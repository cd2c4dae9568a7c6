"""A ``.env`` file in the working directory: environment variables such as keys and folders of data."""

from __future__ import annotations

import os
from pathlib import Path

from groundwire.tools.errors import CommandError

__all__ = ["read_env_file"]


def read_env_file() -> None:
    """Set the variables of ``.env``, if there is one; a variable that the environment has stays as it is.

    Raises :class:`groundwire.tools.errors.CommandError` for a file that cannot be read.
    """
    file = Path(".env")
    if not file.is_file():
        return
    from dotenv import dotenv_values

    try:
        found = dotenv_values(file)
    except (OSError, ValueError) as error:
        raise CommandError(f"{file.absolute()} cannot be read ({error}): save it as UTF-8 text") from error
    for name, value in found.items():
        if value is not None and "\0" not in value:
            os.environ.setdefault(name, value)
