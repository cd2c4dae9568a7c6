"""A store in a process of its own, as a user starts it."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

__all__ = ["store_process"]


@contextmanager
def store_process(command: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """``command`` with a free ``--port``: its address once it answers, and its process; it is ended afterwards."""
    from groundwire.train.store.health import check_store

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        check_store(f"http://127.0.0.1:{port}", timeout_s=60)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
