"""Python programs as processes of their own (see fork_server.py for how they start)."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fork_server import Forked, run_code

ROOT = Path(__file__).parents[2]


class Program:
    """``python COMMAND``: ``command`` begins with ``-m`` and a module, with ``-c`` and code, or with a script.

    Its input is empty and its output goes to files.
    """

    def __init__(
        self,
        *command: str,
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._output = tempfile.TemporaryDirectory()
        self._command = command
        names = os.devnull, *(str(Path(self._output.name) / number) for number in "12")
        files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in names]
        self._process = Forked(run_command, command, folder=str(folder), environment=environment, files=files)
        for file in files:
            os.close(file)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stderr_so_far(self) -> str:
        """What it has written to stderr so far."""
        file = Path(self._output.name) / "2"
        return file.read_text() if file.exists() else ""

    def stdout_so_far(self) -> str:
        """What it has written to stdout so far."""
        return (Path(self._output.name) / "1").read_text()

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """What became of it. One that takes too long is killed, and is a failure."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            self._process.kill()
            self._process.join()
        printed, errors = ((Path(self._output.name) / name).read_text() for name in "12")
        self._output.cleanup()
        assert status is not None, f"{self._command} took more than {timeout} s\n{printed}\n{errors}"
        return subprocess.CompletedProcess(self._command, status, printed, errors)


def run(
    *command: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` of ``python COMMAND``."""
    return Program(*command, folder=folder, environment=environment).wait(timeout)


def until(condition: Any, program: Program, timeout: float = 600) -> None:
    """Wait until ``condition()``, for as long as ``program`` runs."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert program.poll() is None, program.wait(0)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(condition: Any, timeout: float = 600) -> None:
    """Wait until ``condition()``."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started, of /proc."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether the process has not ended, by /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def run_command(command: tuple[str, ...]) -> None:
    """``python COMMAND`` in this process."""
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if command[0] == "-c":
        return run_code(command[1], command[2:])
    sys.argv = list(command[command[0] == "-m" :])
    sys.modules.pop(sys.argv[0], None)  # imported by the server; runpy would warn
    if command[0] == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command[0]).parent.absolute()))
        runpy.run_path(sys.argv[0], run_name="__main__")
    return None
