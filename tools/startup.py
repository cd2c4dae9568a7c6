"""How our commands and their child processes start: import path, fast imports, log output."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import groundwire
from groundwire.tools.errors import CommandError
from groundwire.tools.secrets import mask_secrets

PACKAGE = Path(groundwire.__file__).parent
"""The folder of the package ``groundwire``."""
USERS_PYTHON_PATH = "GROUNDWIRE_USERS_PYTHONPATH"
"""The variable with the user's own ``PYTHONPATH``, in a process that was given another."""
_YOUNG_OBJECTS = 10_000
"""New objects between two collections (Python's default is 700)."""


def child_python_path(*folders: Path) -> str:
    """``PYTHONPATH`` for a child process: this project, ``folders``, and the present value."""
    present = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *map(str, folders), *present]))


def activated(python: str) -> dict[str, str]:
    """The environment variables of a program of the interpreter ``python``: the commands beside it come first."""
    return {**os.environ, "PATH": os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])}


def setup_logging(debug: bool = False) -> None:
    """Show errors and our own warnings, without secrets; ``debug`` shows everything, also what libraries say."""
    sys.excepthook = lambda *error: sys.stderr.write(mask_secrets("".join(traceback.format_exception(*error))))
    handler = logging.StreamHandler()
    handler.setFormatter(_MaskingFormatter(logging.BASIC_FORMAT if debug else "%(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, handlers=[handler], force=True)
    if debug:
        return
    logging.getLogger("groundwire").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("AGENTOPS_LOG_LEVEL", "CRITICAL")
    silence_libraries()


class _MaskingFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        """One message is one line, whatever an id in it contains; only tracebacks have several."""
        line = super().formatMessage(record)
        return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)

    def format(self, record: logging.LogRecord) -> str:
        return mask_secrets(super().format(record))


def silence_libraries(names: Sequence[str] = ("agentlightning", "agentops", "LiteLLM", "httpx", "openai")) -> None:
    """Show only critical messages of the libraries that log non-errors as errors."""
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def fast_import() -> Iterator[None]:
    """Imports run faster with the garbage collector off; then :func:`freeze_objects`."""
    gc.disable()
    try:
        yield
    finally:
        freeze_objects()
        gc.enable()


def freeze_objects() -> None:
    """Exclude the objects that exist from garbage collection, and look for garbage less often.

    A collection of the million objects that a training run imports stops all rollouts, about once a step and again at
    exit. Hundreds of open requests are many young objects, and next to none of them is garbage.
    """
    gc.freeze()
    young, *others = gc.get_threshold()
    gc.set_threshold(max(young, _YOUNG_OBJECTS), *others)


def read_env_file(file: Path = Path(".env")) -> None:
    """Set the variables of ``file`` that the environment lacks. Raises ``CommandError`` if it cannot be read."""
    if not file.is_file():
        return
    from dotenv import dotenv_values

    try:
        variables = dotenv_values(file)
    except (OSError, ValueError) as error:
        raise CommandError(f"{file.absolute()} cannot be read ({error}): save it as UTF-8 text") from error
    set_variables(variables)


def set_variables(variables: Mapping[str, str | None]) -> None:
    """Set the variables that the environment lacks; a placeholder for a key is none."""
    for name, value in variables.items():
        if value is not None and "\0" not in value and os.environ.get(name) in (None, "", "none"):
            os.environ[name] = value
