"""A process that has imported what tests and their programs need, and forks a process for each request.

To import torch, transformers and the agent frameworks takes ten seconds of CPU. The server does it once, for all
workers of pytest-xdist and all programs of the tests. The processes are real: they have their own memory, and are
killed and interrupted as any other. What a process without the server imports, tests/test_packaging.py checks.

``python fork_server.py`` is the server; it listens at its standard input. ``python fork_server.py -u -c CODE`` runs
CODE in a forked process: pytest-xdist starts its workers so (see conftest.py).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

MODULES = (
    "groundwire.adapters.sql_agents.langgraph",
    "groundwire.adapters.sql_agents.openai_agents",
    "groundwire.train.run",
    "groundwire.train.evaluate",
    "groundwire.train.report.__main__",
    "groundwire.train.local.trainer",
    "groundwire.train.rollouts.agent",
    "groundwire.train.store.__main__",
    "groundwire.train.verl.launch",
    "groundwire.train.report.plots",
    "groundwire.tools.mcp_sql.server",
    "groundwire.adapters.unmodified.redirection",
    "opentelemetry.instrumentation.threading",
    "agents.mcp",
    "fastmcp.client",
    "hypothesis",
    "openai.resources.chat.completions",  # the client imports it at its first use
    "groundwire.domains.spider",
    "groundwire.rewards.spider.execution_match",
    "pyarrow.dataset",  # with pandas
    "pyarrow.parquet",
    "matplotlib.figure",  # imported to draw
    "matplotlib.backends.backend_agg",
    "IPython.core.interactiveshell",
    "pytest",
    "programs",
)
_ADDRESS = "GROUNDWIRE_TEST_FORK_SERVER"
_NUMBER = struct.Struct("i")


def ensure_running() -> str:
    """The server's socket. The first process that asks starts the server, which ends with that process."""
    if _ADDRESS not in os.environ:
        path = os.path.join(tempfile.mkdtemp(), "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(100)
            # typer reads these while it is imported; each process has its own.
            colours = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
            environment = {name: value for name, value in os.environ.items() if name not in colours}
            subprocess.Popen([sys.executable, __file__], stdin=listener, env=environment)
        os.environ[_ADDRESS] = path
    return os.environ[_ADDRESS]


class Forked:
    """A process that calls ``target(*arguments)`` in ``folder``, with these variables and open files."""

    def __init__(
        self,
        target: Callable[..., object],
        *arguments: Any,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (0, 1, 2),
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(ensure_running())
        socket.send_fds(self._connection, [b"3"], files)
        request = (folder or os.getcwd(), dict(os.environ if environment is None else environment), target, arguments)
        self._connection.sendall(pickle.dumps(request))
        self.pid: int = self._number()
        self._status: int | None = None

    def _number(self) -> int:
        return int(_NUMBER.unpack(self._connection.recv(_NUMBER.size))[0])

    @property
    def exitcode(self) -> int | None:
        """As ``subprocess`` has it; None while the process runs."""
        if self._status is None and select.select([self._connection], [], [], 0)[0]:
            self._status = self._number()
        return self._status

    def join(self, timeout: float | None = None) -> None:
        if self._status is None:
            select.select([self._connection], [], [], timeout)

    def kill(self) -> None:
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve() -> None:
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # each process would look through all of this for garbage, and to look at a page is to copy it
    gc.enable()
    gc.set_threshold(100_000, 50, 50)  # as in conftest.py
    for finalizer in list(weakref.finalize._registry):  # those of torch touch, and so copy, a third of these pages
        finalizer.atexit = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getppid()
    listener = socket.socket(fileno=os.dup(0))
    while os.getppid() == parent:
        if select.select([listener], [], [], 1)[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return _supervise(connection)
            connection.close()
    return None


def _supervise(connection: socket.socket) -> None:
    """Forks the process, and sends its id and its exit status. Ends it when nobody is left who asks."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as stream:
        folder, environment, target, arguments = pickle.load(stream)
    child = os.fork()
    if child == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _call(target, *arguments)
    for file in files:
        os.close(file)
    connection.sendall(_NUMBER.pack(child))

    def kill_without_client() -> None:
        with contextlib.suppress(ConnectionResetError):
            connection.recv(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    threading.Thread(target=kill_without_client, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        connection.sendall(_NUMBER.pack(status))
    finally:
        os._exit(0)


def _call(target: Callable[..., object], *arguments: Any) -> NoReturn:
    """Calls it, and exits as Python does, but without the second in which Python frees what was imported."""
    status = 0
    try:
        target(*arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # waits for the other threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_code(code: str, arguments: Sequence[str] = ()) -> None:
    """``python -c CODE ARGUMENTS``."""
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "")
    exec(code, {"__name__": "__main__"})


def main() -> None:
    if not sys.argv[1:]:
        _serve()
        return
    process = Forked(sys.modules["fork_server"].run_code, sys.argv[-1])
    for file in (0, 1, 2):
        os.close(file)
    process.join()
    os._exit(process.exitcode or 0)


if __name__ == "__main__":
    sys.modules["fork_server"] = sys.modules["__main__"]  # one module, whichever way it is imported
    main()
