"""How our commands and their child processes start: import path, fast imports, log output."""

from __future__ import annotations

import gc
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import translate
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
_PASSED = """
    PATH HOME USER LOGNAME SHELL PWD TERM COLORTERM COLUMNS LINES NO_COLOR FORCE_COLOR CI DISPLAY LANG LANGUAGE LC_* TZ
    TMPDIR TMP TEMP XDG_* HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS AWS_CA_BUNDLE GIT_SSL_CAINFO
    PYTHON* VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV LD_LIBRARY_PATH LD_PRELOAD DYLD_* NODE_PATH JAVA_HOME GOPATH
    PYENV_ROOT NVM_DIR CARGO_HOME RUSTUP_HOME DENO_DIR UV_CACHE_DIR UV_PYTHON_INSTALL_DIR PLAYWRIGHT_BROWSERS_PATH
    CUDA_* NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
    OMP_* MKL_* OPENBLAS_* NUMEXPR_* MALLOC_* TOKENIZERS_PARALLELISM DOCKER_HOST
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_* TRANSFORMERS_* TORCH_HOME NLTK_DATA TIKTOKEN_CACHE_DIR
    OPENAI_API_VERSION AZURE_API_VERSION AWS_PROFILE AWS_REGION AWS_DEFAULT_REGION AWS_REGION_NAME
    LITELLM_LOCAL_MODEL_COST_MAP OPENAI_AGENTS_DISABLE_TRACING DO_NOT_TRACK *_TELEMETRY *_DISABLE_TELEMETRY
    *_TELEMETRY_DISABLED *_TELEMETRY_OPT_OUT *_TELEMETRY_OPTOUT
    SYSTEMROOT SYSTEMDRIVE WINDIR COMSPEC PATHEXT APPDATA LOCALAPPDATA PROGRAMDATA PROGRAMFILES* USERPROFILE HOMEDRIVE
    HOMEPATH NUMBER_OF_PROCESSORS PROCESSOR_*
"""
"""What programs need to run: all that an agent's process gets of our environment."""
_IS_PASSED = re.compile("|".join(map(translate, _PASSED.split())))
KEY_NAME = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|DATABASE_URL|DSN|_PAT)", re.IGNORECASE)
_YOUNG_OBJECTS = 10_000  # new objects between two collections (Python's default is 700)


def is_usual(name: str) -> bool:
    """Whether any program may have an environment variable of this name: no key has one."""
    return _IS_PASSED.match(name) is not None and not KEY_NAME.fullmatch(name)


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
    usual = {name: value for name, value in os.environ.items() if is_usual(name)}
    variables, lacking = env_file_variables(file, usual), []
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


def env_file_variables(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a file as python-dotenv reads it, with those of ``environment`` for ``${NAME}``; none without a
    file. Raises ``CommandError``.
    """
    if not file.is_file():
        return {}
    from dotenv import dotenv_values
    from dotenv.variables import parse_variables

    try:
        text = read_bytes(file, max_bytes=_MAX_ENV_FILE).decode()
        written = dotenv_values(stream=io.StringIO(text), interpolate=False)
    except (OSError, ValueError) as error:
        raise CommandError(f"{file.absolute()} cannot be read ({error}): save it as UTF-8 text") from error
    variables: dict[str, str] = {}
    for name, value in written.items():
        if value is not None and "\0" not in name + value:
            known = {**environment, **variables}
            variables[name] = "".join(atom.resolve(known) for atom in parse_variables(value))
    return variables
