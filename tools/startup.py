"""How our commands and their child processes start: import path, fast imports, log output."""

from __future__ import annotations

import gc
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import groundwire
from groundwire.tools.errors import CommandError
from groundwire.tools.files import read_bytes
from groundwire.tools.secrets import SafeFormatter, format_unhandled_messages, say, say_traceback
from groundwire.tools.text import first_of

PACKAGE = Path(groundwire.__file__).parent
"""The folder of the package ``groundwire``."""
USERS_PYTHON_PATH = "GROUNDWIRE_USERS_PYTHONPATH"
"""The variable with the user's own ``PYTHONPATH``, in a process that was given another."""
_OWN_VARIABLES = re.compile(
    r"[A-Z0-9_]+_API_KEY|GROUNDWIRE_(TOKEN|MONGO_URI)|MCP_SQL_TOKEN|HF_TOKEN|(VERL_)?SPIDER_DATA_DIR"
    r"|WANDB_(PROJECT|ENTITY|MODE|NAME|TAGS|NOTES|GROUP)|SWANLAB_(PROJ_NAME|MODE|WORKSPACE)|CUDA_VISIBLE_DEVICES"
    r"|AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|REGION|DEFAULT_REGION|REGION_NAME)"
)
"""What a command takes from the file ``.env`` of its working folder; docs/security.md lists it."""
_KEY_OF_ADDRESS = {
    "OPENAI_BASE_URL": "OPENAI_API_KEY",
    "OPENAI_API_BASE": "OPENAI_API_KEY",
    "WANDB_BASE_URL": "WANDB_API_KEY",
}
"""Addresses that it also takes, unless a key of the environment would be sent there."""
_MAX_ENV_FILE = 1 << 20
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
    sys.excepthook = say_traceback
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter(logging.BASIC_FORMAT if debug else "%(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, handlers=[handler], force=True)
    if debug:
        return
    logging.getLogger("groundwire").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("AGENTOPS_LOG_LEVEL", "CRITICAL")
    silence_libraries()


def silence_libraries(names: Sequence[str] = ("agentlightning", "agentops", "LiteLLM", "httpx", "openai")) -> None:
    """Show only critical messages of the libraries that log non-errors as errors.

    Where nobody has set up logging, other messages get no character that steers a terminal.
    """
    format_unhandled_messages()
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


def read_env_file(file: Path = Path(".env"), *, names: Collection[str] = ()) -> None:
    """Set those of our own variables, and ``names``, that ``file`` has and the environment lacks.

    A working folder may be somebody else's, so any other has no effect on this process, which is said: it might load
    code, or send a key elsewhere. Raises ``CommandError`` if the file cannot be read.
    """
    variables, lacking = env_file_variables(file), []
    for name, value in variables.items():
        if os.environ.get(name) not in (None, "", "none"):  # a placeholder for a key is none
            continue
        key = _KEY_OF_ADDRESS.get(name)
        if (key and os.environ.get(key) not in (None, "", "none", variables.get(key))) or not (
            key or name in names or _OWN_VARIABLES.fullmatch(name)
        ):
            lacking.append(name)
        else:
            os.environ[name] = value
    if lacking:
        say(
            f"note: {file} sets keys and a few other variables for groundwire and rewards, not {first_of(lacking)} "
            "(docs/security.md); export what they need",
            err=True,
        )


def env_file_variables(file: Path) -> dict[str, str]:
    """The variables of a file as python-dotenv reads it; none without a file. Raises ``CommandError``."""
    if not file.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        text = read_bytes(file, max_bytes=_MAX_ENV_FILE).decode()
        variables = dotenv_values(stream=io.StringIO(text))
    except (OSError, ValueError) as error:
        raise CommandError(f"{file.absolute()} cannot be read ({error}): save it as UTF-8 text") from error
    return {name: value for name, value in variables.items() if value is not None and "\0" not in name + value}
