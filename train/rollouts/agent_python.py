"""The interpreter of an agent's own environment (the setting ``runner_python``), checked before a run begins."""

from __future__ import annotations

import os
import shutil
import subprocess

from groundwire.tools.startup import PACKAGE
from groundwire.tools.terminal import version
from groundwire.train.config.errors import ConfigError

__all__ = ["find_agent_python"]

_TIMEOUT_S = 60.0
_PROBE = """
import groundwire.train.store.runner_client
from groundwire.tools.terminal import version
print(version())
"""


def find_agent_python(given: str) -> str:
    """The absolute path of the interpreter ``given``, whose environment has the base of this version of groundwire.

    A path keeps its symbolic links: those of a virtual environment name the environment. Raises :class:`ConfigError`.
    """
    path = os.path.expanduser(given)
    found = shutil.which(path) if os.sep not in path else os.path.abspath(path)
    if not found:
        raise ConfigError(f"runner_python is {given!r}, and there is no such command: give the path of an interpreter")
    try:
        done = subprocess.run(  # noqa: S603
            [found, "-c", _PROBE], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or f"no answer within {_TIMEOUT_S:g} s"
        raise ConfigError(f"runner_python is {given!r}, which cannot be run: {reason}") from error
    if done.returncode:
        raise ConfigError(
            f"runner_python is {given!r}, and groundwire cannot be imported there "
            f"({(done.stderr.strip().splitlines() or ['no message'])[-1]:.300}): "
            f"install it with {given} -m pip install {_source()}"
        )
    theirs, ours = done.stdout.strip(), version()
    if theirs != ours:
        raise ConfigError(
            f"runner_python is {given!r}, whose groundwire has version {theirs}, and this one {ours}: install the same "
            "version in both environments"
        )
    return found


def _source() -> str:
    """What pip installs: the clone that this is, else the package."""
    clone = PACKAGE.parents[1]
    return str(clone) if (clone / "pyproject.toml").is_file() else "groundwire"
