"""Processes that are watched: their stderr, their end and their memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fork_server import Forked

from chaos.tally import Tally

__all__ = ["END_S", "Process", "Processes"]

END_S = 300.0
"""What must start, end or answer has done so after this time: a lot, since the machine may be busy."""
_TRACEBACK = re.compile(rb"^(?:\s*\|\s*)?Traceback \(most recent call last\)|^Exception ignored", re.MULTILINE)
_SAMPLE_S = 0.5
_SECOND_SIGNAL = "once more: at once"


class Process:
    """A forked function or a command, with its stderr in a file."""

    def __init__(self, name: str, folder: Path, target: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
        self.name, self.stderr = name, folder / f"{name}.{time.monotonic_ns()}.stderr"
        self.forked = target is not None
        with self.stderr.open("wb") as stderr, open(os.devnull, "rb") as stdin, self._stdout().open("wb") as stdout:
            if target is not None:
                files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
                self._process: Any = Forked(target, *arguments, files=files)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, *arguments], stdin=stdin, stdout=stdout, stderr=stderr
                )
        self.pid: int = self._process.pid

    def _stdout(self) -> Path:
        return self.stderr.with_suffix(".stdout")

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._process.exitcode if self.forked else self._process.poll()

    @property
    def output(self) -> str:
        """What it has written to stdout and stderr."""
        return "".join(file.read_text(errors="replace") for file in (self._stdout(), self.stderr))

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> bool:
        """Whether it has ended within ``END_S``."""
        deadline = time.monotonic() + END_S
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.status is not None

    def memory_mb(self) -> float | None:
        """The peak of its resident memory; of a forked process, the memory that it does not share."""
        with contextlib.suppress(OSError, ValueError):
            if self.forked:
                text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
                return sum(map(int, re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE))) / 1000
            found = re.search(r"^VmHWM:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
            return int(found[1]) / 1000 if found else None
        return None


class Processes:
    """The processes of a scenario. At the end of the context all are stopped and their stderr is searched."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.folder, self.tally = folder, tally
        self._all: list[Process] = []
        self._ended = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)

    def fork(self, name: str, target: Callable[..., Any], *arguments: Any) -> Process:
        """Call ``target(*arguments)`` in a process."""
        return self._add(Process(name, self.folder, target, arguments))

    def python(self, name: str, *arguments: str) -> Process:
        """Run ``python ARGUMENTS``."""
        return self._add(Process(name, self.folder, None, arguments))

    def _add(self, process: Process) -> Process:
        self._all.append(process)
        return process

    def kill(self, process: Process) -> None:
        """End it with SIGKILL."""
        self._note_memory(process)
        if process.status is None:
            self.tally.add("kills")
        process.signal(signal.SIGKILL)
        process.wait()
        self._search(process)

    def stop(self, process: Process, *, count: bool = True) -> None:
        """End it with SIGTERM; one that does not end is a hang.

        A trainer that updates its model says that it ends afterwards, and at once at a second signal: on a busy
        machine an update takes minutes.
        """
        self._note_memory(process)
        if count and process.status is None:
            self.tally.add("stops")
        process.signal(signal.SIGTERM)
        if not process.wait() and _SECOND_SIGNAL in process.output:
            process.signal(signal.SIGTERM)
        if not process.wait():
            self.tally.fault("hangs", f"{process.name} runs {END_S:g} s after SIGTERM")
            process.signal(signal.SIGKILL)
            process.wait()
        self._search(process)

    def check_running(self, process: Process) -> bool:
        """Whether it runs; one that has ended by itself is a crash."""
        if process.status is not None and process in self._all:
            last = (process.output.strip() or "no output").rsplit("\n", 1)[-1]
            self.tally.fault("crashes", f"{process.name} ended with status {process.status}", last)
            self._search(process)
        return process.status is None

    def _search(self, process: Process) -> None:
        """Look for tracebacks in the stderr of a process that has ended."""
        if process not in self._all:
            return
        self._all.remove(process)
        text = process.stderr.read_bytes()
        for found in _TRACEBACK.finditer(text):
            lines = text[found.start() :].decode(errors="replace").split("\n")
            error = next((line for line in lines[1:] if line and not line.startswith((" ", "\t"))), "")
            self.tally.fault("tracebacks", f"{process.name}: {error.split(':')[0]}", f"{error} ({process.stderr})")

    def _note_memory(self, process: Process) -> None:
        if (megabytes := process.memory_mb()) is not None:
            self.tally.memory(process.name, megabytes)

    def _watch_memory(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            for process in list(self._all):
                self._note_memory(process)

    def __enter__(self) -> Processes:
        self._watcher = threading.Thread(target=self._watch_memory, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        for process in list(self._all):
            if self.check_running(process):
                self.stop(process, count=False)
