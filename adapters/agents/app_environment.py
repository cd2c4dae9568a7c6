"""The environment variables that an agent needs besides its own: its ``.env`` file, keys of the right form, no proxy.

``process/environment.py`` has the tables for all ways of running agents. What is set here is given back when a run of
``fit`` or ``evaluate`` ends.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from groundwire.adapters.agents.changes import set_variable, undo_later, wrap
from groundwire.adapters.agents.process.environment import QUIET, placeholder_keys, provider_urls, without_proxy

_URLS = provider_urls("").keys()


def set_environment(agent: str | None = None) -> None:
    """Set what is missing for ``agent``, a name, before it is imported; None: for an object."""
    _keep_urls()
    values = {} if agent is None else {name: value for name, value in _dotenv(agent).items() if name not in os.environ}
    keys = placeholder_keys({**os.environ, **values})
    keys.pop("HF_TOKEN", None)  # this process may load models, and the Hub refuses a token that it does not know
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ}
    for name, value in {**keys, **quiet, **without_proxy("127.0.0.1", os.environ), **values}.items():
        set_variable(name, value)
    _read_tracing_again()
    undo_later(_read_tracing_again)


def _dotenv(agent: str) -> Mapping[str, str]:
    """The nearest ``.env`` file from the folder of the agent's file upwards, if the app has python-dotenv."""
    with suppress(ImportError, OSError, ValueError):
        from dotenv import dotenv_values

        for folder in _folders(agent.rpartition(":")[0]):
            if (file := folder / ".env").is_file():
                return {name: value for name, value in dotenv_values(file).items() if value is not None}
    return {}


def _folders(place: str) -> Iterator[Path]:
    """The folders in which python-dotenv searches if it is called in the module or file ``place``."""
    if place.endswith(".py"):
        yield from Path(place).resolve().parents
        return
    package, *inner = place.split(".")
    spec = importlib.util.find_spec(package)  # of the outermost: any other would be imported
    if spec is not None and spec.origin is not None:
        deepest = Path(spec.origin).resolve().parent.joinpath(*inner[:-1])
        yield from (deepest, *deepest.parents)


@cache
def _keep_urls() -> None:
    """``load_dotenv(override=True)`` in the agent's code leaves the URLs of the attempt, in a process that has them."""

    def load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        urls = {name: value for name, value in os.environ.items() if name in _URLS}
        result = wrapped(*args, **kwargs)
        os.environ.update(urls)
        return result

    wrap("dotenv.main", "DotEnv.set_as_environment_variables", load)
    undo_later(_keep_urls.cache_clear)


def _read_tracing_again() -> None:
    """Let the Agents SDK read the variable that switches its tracing off, which it reads once."""
    provider: Any = getattr(sys.modules.get("agents.tracing.setup"), "GLOBAL_TRACE_PROVIDER", None)
    if provider is not None and hasattr(provider, "_env_disabled"):
        provider._env_disabled = None
