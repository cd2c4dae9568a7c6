"""Python programs as processes of their own, forked from one that has already imported what they need.

To import torch, transformers and the agent frameworks takes ten seconds of CPU, and most of these tests are about what
comes afterwards. The processes are real: they have their own memory, and are killed and interrupted as any other. That
it all imports from nothing, and how much of it, is what tests/test_lightning.py is about.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preloaded"])


def fork(target: Callable[..., object], *arguments: Any) -> Any:
    """A process that runs ``target``."""
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    with pytest.MonkeyPatch.context() as patch:  # for the server, which starts with the first process
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        process.start()
    return process


class Program:
    """``python COMMAND``, where ``command`` begins with ``-m`` and a module, or with a script in ``folder``."""

    def __init__(self, *command: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
        self._said = tempfile.TemporaryDirectory()
        self._command = command
        environment = dict(os.environ if environment is None else environment)
        arguments = (command, str(folder), environment, self._said.name)
        self._process = fork(_run, *arguments)

    @property
    def pid(self) -> int:
        return self._process.pid

    def complaints(self) -> str:
        """What it has written to stderr so far."""
        file = Path(self._said.name) / "2"
        return file.read_text() if file.exists() else ""

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
        printed, complained = ((Path(self._said.name) / name).read_text() for name in ("1", "2"))
        self._said.cleanup()
        assert status is not None, f"{self._command} took more than {timeout} s\n{printed}\n{complained}"
        return subprocess.CompletedProcess(self._command, status, printed, complained)


def run(
    *command: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` of ``python COMMAND``."""
    return Program(*command, folder=folder, environment=environment).wait(timeout)


def until(condition: Any, program: Program, timeout: float = 200) -> None:
    """Wait until ``condition()``, for as long as ``program`` runs."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert program.poll() is None, program.wait(0)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _run(command: tuple[str, ...], folder: str, environment: Mapping[str, str], said: str) -> None:
    for number in (1, 2):
        file = os.open(Path(said) / str(number), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    module = command[0] == "-m"
    sys.argv = list(command[module:])
    here = folder if module else str(Path(command[0]).parent.absolute())
    sys.path[:0] = [here, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
