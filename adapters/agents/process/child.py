"""One attempt, in a process that was forked from the template.

It is two processes: the *guard*, which the template knows, and the agent. The guard waits for the agent's end, or for
SIGTERM, and then kills whatever the agent has started: as a subreaper it inherits also what left the agent's group.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import pickle
import random
import resource
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from groundwire.adapters._types import AgentError, Backend, BackendError, Endpoint, Question
from groundwire.adapters.agents.failures import agent_failure
from groundwire.adapters.agents.process.environment import provider_urls, without_proxy
from groundwire.adapters.agents.process.folders import own_folders, own_working_folder
from groundwire.adapters.agents.process.relay import swap_port
from groundwire.adapters.agents.process.results import MAX_RESULT, answer_to, failure_to

SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
_DEATH_SIGNAL, _SUBREAPER = 1, 36
"""Options of prctl."""


def run_attempt(backend: Backend, message: dict[str, Any], address: str, folder: str) -> NoReturn:
    """Be the guard of an attempt; never returns."""
    try:
        os.setsid()
        _prctl(_SUBREAPER, 1)
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        agent = os.fork()
        if not agent:
            _run_agent(backend, message, address, folder)
        signal.set_wakeup_fd(-1)
        code = None
        while code is None and signal.sigwait(SIGNALS) == signal.SIGCHLD:
            pid, status = os.waitpid(agent, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
        _kill_descendants()
        os._exit(0 if code is None else 128 - code if code < 0 else code)
    finally:
        os._exit(70)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _kill_descendants() -> None:
    """Kill all processes below this one: those whose parent is killed become its children, and are next."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    while children := [int(child) for child in listing.read_text(encoding="ascii").split()]:
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _run_agent(backend: Backend, message: dict[str, Any], address: str, folder: str) -> NoReturn:
    code = 1
    try:
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.setpgid(0, 0)
        for number in SIGNALS | {signal.SIGINT}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        result = _connect(address, message["start"], "result")
        _redirect_output(_connect(address, message["start"], "output"))
        before = set(sys.modules)
        question, endpoint = pickle.loads(base64.b64decode(message["arguments"]))  # noqa: S301  of the runner
        reply = _answer(backend, question, endpoint, Path(message["place"]), folder, message["start"])
        if message.get("learn"):
            reply |= {"modules": [name for name in sys.modules if name not in before], "bytes": _own_bytes()}
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        text = json.dumps(reply, default=str).encode()
        if len(text) > MAX_RESULT:
            error = AgentError(f"the answer and its steps are larger than {MAX_RESULT >> 20} MiB")
            text = json.dumps({"failure": failure_to(error)}).encode()
        result.sendall(text + b"\n")
        code = 0
    except BaseException as error:  # a fault of ours or of the machine: no answer
        with suppress(Exception):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
    finally:
        os._exit(code)  # exit handlers of the template's libraries would wait for threads that no child has


def _answer(
    backend: Backend, question: Question, endpoint: Endpoint, place: Path, folder: str, seed: str
) -> dict[str, Any]:
    try:
        _isolate(endpoint, place, folder, seed)
        with asyncio.Runner() if sys.version_info >= (3, 11) else _Runner() as runner:
            return {"answer": answer_to(runner.run(backend.run(question, endpoint)))}
    except BackendError as error:
        return {"failure": failure_to(error)}
    except BaseException as error:  # an agent's SystemExit ends its rollout
        return {"failure": failure_to(agent_failure(error))}


class _Runner:
    """asyncio.Runner of Python 3.10."""

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, work: Any) -> Any:
        return asyncio.run(work)


def _isolate(endpoint: Endpoint, place: Path, folder: str, seed: str) -> None:
    """Give this process what is its own: folders, environment, connections, random numbers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own_working_folder(place, folder)
    os.environ.update(own_folders(place))
    tempfile.tempdir = None
    os.environ.update(provider_urls(endpoint.base_url))
    os.environ.update(without_proxy(urlsplit(endpoint.base_url).hostname or "", os.environ))
    _hang_up()
    swap_port(endpoint.base_url)
    number = int(seed[:8], 16)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def _hang_up() -> None:
    """Make each inherited TCP connection one whose peer has hung up: siblings would read each other's replies."""
    ours, theirs = socket.socketpair()
    theirs.close()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            number = int(name)
            if number <= 2 or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(number)) as inherited:
                if inherited.family in (socket.AF_INET, socket.AF_INET6) and _connected(inherited):
                    os.dup2(ours.fileno(), number)
    ours.close()


def _connected(inherited: socket.socket) -> bool:
    try:
        inherited.getpeername()
    except OSError:
        return False
    return True


def _connect(address: str, attempt: str, channel: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(json.dumps({"channel": channel, "attempt": attempt}).encode() + b"\n")
    return connection


def _redirect_output(connection: socket.socket) -> None:
    for number in (1, 2):
        os.dup2(connection.fileno(), number)
    connection.close()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _own_bytes() -> int:
    """The memory of this process alone, in bytes; 0 if the system does not say."""
    with suppress(OSError):
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    return 0
