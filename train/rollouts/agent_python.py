"""The interpreter of an agent's own environment (the setting ``runner_python``), checked before a run begins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from groundwire import rewards
from groundwire.tools.startup import PACKAGE
from groundwire.tools.terminal import version
from groundwire.train.config.errors import ConfigError
from groundwire.train.rollouts.factory import ELSEWHERE, no_reward

_TIMEOUT_S = 60.0
_IMPORTS_S = 300.0
"""Of an agent or a reward."""
_PROBE = """
import groundwire.train.store.remote
from groundwire.tools.terminal import version
print(version())
"""
_ABOUT_REWARD = """
import json, sys
from groundwire import rewards
from groundwire.tools.errors import UserError
try:
    reward = rewards.get(sys.argv[1])
except UserError as error:
    sys.exit(str(error))
print(json.dumps([getattr(rewards.answers_of(reward), "name", None), sorted(rewards.names_read(reward))]))
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


def ask(python: str, *arguments: str, given: str = "") -> Any:
    """What a program of ``python`` prints as JSON in its last line. Raises :class:`ConfigError` with its last error."""
    try:
        done = subprocess.run(  # noqa: S603
            [python, *arguments], input=given, check=False, capture_output=True, text=True, timeout=_IMPORTS_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"in the environment of runner_python: no import within {_IMPORTS_S:g} s") from error
    last = (done.stderr if done.returncode else done.stdout).strip().rpartition("\n")[2]
    if done.returncode:
        raise ConfigError(f"in the environment of runner_python: {last:.500}")
    return json.loads(last)


def reward_elsewhere(python: str, name: str) -> rewards.Reward:
    """The reward ``name`` of the environment of ``python``: not to be called here, and what its code says of itself.

    Without a name it is that of a ``LitAgent``. Raises :class:`ConfigError`.
    """
    reward = no_reward(ELSEWHERE)
    form, reads = ask(python, "-c", _ABOUT_REWARD, name) if name else (None, [])
    vars(reward).update(form=form, reads=reads)
    return reward


def _source() -> str:
    """What pip installs: the clone that this is, else the package."""
    clone = PACKAGE.parents[1]
    return str(clone) if (clone / "pyproject.toml").is_file() else "groundwire"
