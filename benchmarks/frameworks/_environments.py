"""A virtual environment for each agent, on top of the project's own.

Its packages come first; all others, such as torch and groundwire, are those of the environment that runs this. So an
agent's environment takes seconds and some megabytes, and a framework gets the versions that it asks for where they
differ from groundwire's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence

from benchmarks.frameworks._agents import ROOT, Agent

__all__ = ["InstallError", "environment", "make", "overridden", "versions"]

_FOLDER = ROOT / ".frameworks"
_LIST = """
import json, re, sys
from importlib.metadata import PackageNotFoundError, distribution, version
from packaging.requirements import Requirement
overridden = []
for text in distribution("groundwire").requires or []:
    wanted = Requirement(text)
    if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
        continue
    found = version(wanted.name)
    if not wanted.specifier.contains(found, prereleases=True):
        overridden.append(f"{wanted.name} {found} ({wanted.specifier} wanted)")
print(json.dumps({"versions": {name: version(name) for name in sys.argv[1:]}, "overridden": overridden}))
"""


class InstallError(Exception):
    """The packages of an agent cannot be installed; the message is the installer's."""


def make(agent: Agent) -> str:
    """Install what ``agent`` needs, if that is not done yet, and return the Python that runs it.

    Raises :class:`InstallError`.
    """
    if agent.command:
        _install_npm(agent)
        return sys.executable
    folder = _FOLDER / agent.folder
    wanted = (ROOT / agent.path / "requirements.txt").read_text()
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "groundwire-base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    _run(
        *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
        *("-r", str(ROOT / agent.path / "requirements.txt")),
    )
    installed.write_text(wanted)
    return str(python)


def environment() -> dict[str, str]:
    """The environment variables of a process that runs an agent."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}


def versions(agent: Agent, python: str) -> dict[str, str]:
    """The versions of the agent's packages."""
    if agent.command:
        folder = ROOT / agent.path / "node_modules"
        return {name: json.loads((folder / name / "package.json").read_text())["version"] for name in agent.packages}
    return dict(_inspect(agent, python)["versions"])


def overridden(agent: Agent, python: str) -> list[str]:
    """The packages whose versions are not those that groundwire asks for, because the framework wants others."""
    return [] if agent.command else list(_inspect(agent, python)["overridden"])


def _inspect(agent: Agent, python: str) -> dict[str, dict[str, str]]:
    return json.loads(_run(python, "-c", _LIST, *agent.packages))


def _install_npm(agent: Agent) -> None:
    folder = ROOT / agent.path
    if (folder / "node_modules").exists():
        return
    if (npm := shutil.which("npm")) is None:
        raise InstallError("npm is not installed")
    _run(npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefix", str(folder))


def _run(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise InstallError(_last_line(done.stderr.splitlines() or done.stdout.splitlines()))
    return done.stdout


def _last_line(lines: Sequence[str]) -> str:
    errors = [line for line in lines if line.lower().startswith("error")]
    return [*lines, *errors][-1] if lines else "no message"
