"""Child processes of the benchmarks."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

__all__ = ["free_port", "our_store", "run_once", "running", "store_process"]


def free_port() -> int:
    """A port of the loopback interface that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(*commands: Sequence[str]) -> Iterator[list[psutil.Process]]:
    """Run the commands without output; terminates them at the end."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(command, **quiet) for command in commands]
    try:
        yield [psutil.Process(process.pid) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


@contextmanager
def store_process(command: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """Run a Lightning store, ``command`` with a free ``--port``; yields its address and process when it answers."""
    from groundwire.train.store.health import check_store

    port = free_port()
    with running([*command, "--port", str(port)]) as (process,):
        check_store(f"http://127.0.0.1:{port}", timeout_s=60)
        yield f"http://127.0.0.1:{port}", process


def our_store(folder: str | Path) -> list[str]:
    """The command of our durable store with its database in ``folder``."""
    return [sys.executable, "-m", "groundwire.train.store", "--path", f"{folder}/store.db"]


def run_once(program: str, out: Path, arguments: Sequence[str]) -> Path:
    """Run ``groundwire.train.PROGRAM``, unless ``out`` has a run of it; returns the run directory."""
    if not list(out.glob("2*")):
        command = [sys.executable, "-m", f"groundwire.train.{program}", "--output-dir", str(out), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [run] = out.glob("2*")
    return run
