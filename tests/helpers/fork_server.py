"""A process that has imported what tests and their programs need, and forks a process for each request.

To import torch, transformers and the agent frameworks takes ten seconds of CPU. The server does it once, for all
workers of pytest-xdist and all programs of the tests. The processes are real: they have their own memory, and are
killed and interrupted as any other. What a process without the server imports, tests/project/test_packaging.py checks.

``python fork_server.py HOW`` is the server; it listens at its standard input. HOW is ``many`` if it will fork so many
processes that it prepares for them. ``python fork_server.py ADDRESS COMMAND`` is
``python COMMAND`` in a process of the server at ADDRESS. pytest-xdist starts its workers so (see conftest.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import logging
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
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "groundwire.adapters.sql_agents.langgraph",
    "groundwire.adapters.sql_agents.openai_agents",
    "groundwire.train.run",
    "groundwire.train.evaluate",
    "groundwire.train.report.__main__",
    "groundwire.train.local.trainer",
    "groundwire.train.rollouts.runner.pool",
    "groundwire.train.store.__main__",
    "groundwire.train.verl.launch",
    "groundwire.train.report.charts",
    "groundwire.tools.mcp_sql.server",
    "groundwire.adapters.agents.redirection",
    "agents.mcp",
    "fastmcp.client",
    "hypothesis",
    "openai.resources.chat.completions",  # the client imports it at its first use
    "groundwire.domains.spider.loader",
    "groundwire.rewards.spider.execution_match",
    "pyarrow.dataset",  # with pandas
    "pyarrow.parquet",
    "matplotlib.figure",  # imported to draw
    "matplotlib.backends.backend_agg",
    "IPython.core.interactiveshell",
    "pytest",
    "programs",
)
MODULES_OF_A_RUN = list[str]()
"""What importing these has imported; empty if it is all that is imported."""
_ADDRESS = "GROUNDWIRE_TEST_FORK_SERVER"
_NUMBER = struct.Struct("i")
_MADV_COLLAPSE = 25


def ensure_running(how: str = "few") -> str:
    """The server's socket. The first process that asks starts the server, which ends with that process."""
    if _ADDRESS not in os.environ:
        with _listener() as listener:
            # typer reads these while it is imported; each process has its own.
            colours = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
            environment = {name: value for name, value in os.environ.items() if name not in colours}
            subprocess.Popen([sys.executable, __file__, how], stdin=listener, env=environment)
            os.environ[_ADDRESS] = listener.getsockname()
    return os.environ[_ADDRESS]


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(tempfile.mkdtemp(), "socket"))
    listener.listen(100)
    return listener


class Forked:
    """A process that calls ``target(*arguments)`` in ``folder``, with these variables and open files.

    It ends when this object is deleted.
    """

    def __init__(
        self,
        target: Callable[..., object],
        *arguments: Any,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (0, 1, 2),
        server: str | None = None,
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server or ensure_running())
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
        if self._status is None and self._has_ended(0):
            self._status = self._number()
        return self._status

    def join(self, timeout: float | None = None) -> None:
        if self._status is None:
            self._has_ended(timeout)

    def _has_ended(self, timeout: float | None) -> bool:
        end = select.poll()  # select() takes no file above the 1024th
        end.register(self._connection, select.POLLIN)
        return bool(end.poll(None if timeout is None else 1000 * timeout))

    def wait(self, timeout: float) -> int | None:
        """The exit status, None after ``timeout`` seconds."""
        self.join(timeout)
        return self.exitcode

    def kill(self) -> None:
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)


def _prepare(import_modules: Callable[[], object]) -> None:
    gc.disable()
    import_modules()
    gc.freeze()  # each process would look through all of this for garbage, and to look at a page is to copy it
    gc.enable()
    gc.set_threshold(100_000, 50, 50)  # as in conftest.py
    for finalizer in list(weakref.finalize._registry):  # those of torch touch, and so copy, a third of these pages
        finalizer.atexit = False


def _use_huge_pages() -> None:
    """Moves what was imported into pages of 2 MB.

    fork() copies the entry of each page, and the end of the process frees it: for half a gigabyte of small pages both
    take 35 ms together, for huge pages 10 ms. Linux has this since 6.1; where it fails the pages stay small.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_ = line.split()
        if access.startswith("rw"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(start, end - start, _MADV_COLLAPSE)


def _prepare_for_many() -> None:
    """Takes seconds, in which the first process, the server of the workers, imports the tests."""
    MODULES_OF_A_RUN.extend(sys.modules)
    import agentlightning  # noqa: F401  the runners and stores of several tests import it, for ten seconds of CPU

    draw_examples()
    _use_huge_pages()


def _serve(after_first_fork: Callable[[], object] | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended, wakeup = socket.socketpair()  # readable when a process has ended
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(fileno=os.dup(0))
    events = select.poll()
    for each in (listener, ended):
        events.register(each, select.POLLIN)
    clients: dict[int, socket.socket] = {}  # of each process, by its id
    parent = os.getppid()
    while os.getppid() == parent:
        ready = {file for file, _ in events.poll(1000)}
        for child, client in clients.items():
            if client.fileno() in ready:  # it has hung up: nobody is left who asks
                os.kill(child, signal.SIGKILL)
        if ended.fileno() in ready:
            ended.recv(4096)
            _report_ended(clients, events)
        if listener.fileno() in ready:
            client, _ = listener.accept()
            if child := _fork(client, (listener, ended, wakeup, *clients.values())):
                clients[child] = client
                events.register(client, 0)
                if after_first_fork:
                    after_first_fork()
                    after_first_fork = None
    for child in clients:
        os.kill(child, signal.SIGKILL)


def _fork(client: socket.socket, others: Sequence[socket.socket]) -> int:
    """The id of a new process that does what ``client`` asks, 0 if ``client`` has ended already."""
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    if len(files) < 3:
        return 0
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in others:
            each.close()
        _run(client, files)
    for file in files:
        os.close(file)
    with contextlib.suppress(BrokenPipeError):
        client.sendall(_NUMBER.pack(child))
    return child


def _report_ended(clients: dict[int, socket.socket], events: select.poll) -> None:
    """Sends the exit status of each process that has ended."""
    while clients:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with contextlib.suppress(BrokenPipeError), clients.pop(child) as client:
            events.unregister(client)
            client.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))


def forked_python(folder: Path) -> str:
    """A program that does what ``python`` does, in a process of the server."""
    program = folder / "python"
    server = f'exec {sys.executable} -S {__file__} {ensure_running()} "$@"'
    guard = f'[ "$1" = -S ] && exec {sys.executable} "$@"'  # it forks, and imports nothing
    program.write_text(f"#!/bin/sh\n{guard}\n{server}\n")
    program.chmod(0o755)
    return str(program)


def start_server_of_workers(tests: Sequence[str]) -> tuple[Forked, str]:
    """A server that has imported the modules of ``tests``, paths as pytest takes them, too; and its address.

    Programs are not forked from it: they would have what tests change while they are imported.
    """
    with _listener() as listener:
        return Forked(_serve_workers, tests, files=(listener.fileno(), 1, 2)), listener.getsockname()


def _serve_workers(tests: Sequence[str]) -> None:
    _prepare(lambda: _import_tests(tests))
    loggers = logging.root.manager.loggerDict  # pytest looks through them several times for each test
    for name in [name for name in loggers if name.startswith("torch")]:
        del loggers[name]
    _serve()


def _import_modules() -> None:
    tests = Path(__file__).parents[1]  # a process may call a function of the package chaos, or of a test
    sys.path += [str(tests), *sorted({str(file.parent) for file in tests.rglob("test_*.py")})]
    for name in MODULES:
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles the patterns that each load of a model needs


def _import_tests(paths: Sequence[str]) -> None:
    """As pytest does: with asserts that explain themselves."""
    import pytest

    class OnlyModules:
        def pytest_pycollect_makeitem(self) -> list[Any]:
            return []

    sys.path.insert(0, os.getcwd())
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # the workers report the errors
        files = [path.partition("::")[0] for path in paths]  # a test of a module is not found without its items
        pytest.main(["-s", "-p", "no:cacheprovider", *files], plugins=[OnlyModules()])
    draw_examples()


def draw_examples() -> None:
    """Hypothesis reads its tables of characters, and the constants in the modules that are imported.

    The first time in a clone it collects both, and writes them to files, which takes two seconds.
    """
    from hypothesis import given, settings, strategies

    @settings(max_examples=2, database=None)  # the first example is the simplest; few numbers are such constants
    @given(strategies.text(), strategies.lists(strategies.integers(), min_size=200))
    def draw(text: str, numbers: list[int]) -> None:
        pass

    draw()


def _run(client: socket.socket, files: Sequence[int]) -> NoReturn:
    with client, client.makefile("rb") as stream:
        folder, environment, target, arguments = pickle.load(stream)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _call(target, *arguments)


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
    if len(sys.argv) == 2:
        _prepare(_import_modules)
        _serve(_prepare_for_many if sys.argv[1] == "many" else None)
        return
    from programs import run_command

    server, *command = sys.argv[1:]
    process = Forked(run_command, [word for word in command if word != "-u"], server=server)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(process.pid, number))
    for file in (0, 1, 2):
        os.close(file)
    process.join()
    status = process.exitcode or 0
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    sys.modules["fork_server"] = sys.modules["__main__"]  # one module, whichever way it is imported
    main()
