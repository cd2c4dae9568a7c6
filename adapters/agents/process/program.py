"""The runner's side of a process that has imported the agent: :class:`Program`.

It forks a child for each attempt (:mod:`groundwire.adapters.agents.process.template`), in which the agent runs
(:mod:`groundwire.adapters.agents.process.child`). All of them connect to a port of the runner:

    runner <-> template   JSON lines: describe, start, end; what it has imported, ended
    child  ->  runner     what it emits and its result, JSON lines
    child  ->  runner     what it prints
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groundwire.adapters._types import BackendError, EndpointError
from groundwire.adapters.agents.app_environment import agent_environment, hidden_hint
from groundwire.adapters.agents.process.guard import how_ended
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.loading import MissingPackageError
from groundwire.tools.startup import child_python_path

_log = logging.getLogger(__name__)
MAX_RESULT = 16 << 20
"""Bytes of a result."""
_MAX_OUTPUT = 1 << 16  # bytes of what a rollout prints that are kept: the last ones
_LONG_S, _START_S = 30.0, 300.0  # after how long the import of the agent is said to go on, and how long it may take
END_S = 5.0
_POLL_S = 0.05


class LitAgentError(ValueError):
    """The agent is a ``LitAgent``, which needs the store of its runner."""


_ERRORS: dict[str, type[ValueError]] = {error.__name__: error for error in (MissingPackageError, LitAgentError)}


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


@dataclass(kw_only=True, eq=False)
class RunningAttempt:
    """An attempt, as the runner sees it."""

    key: str
    program: Program
    on_report: Callable[[dict[str, Any]], None]
    """Takes what the child reports before its result."""
    ended: asyncio.Future[str] = field(default_factory=_future)
    """Why the child is gone."""
    result: asyncio.Future[Mapping[str, Any] | None] = field(default_factory=_future)
    """None if the child has closed its connection without a result."""
    output: bytearray = field(default_factory=bytearray)
    used: bool = False

    @property
    def place(self) -> Path:
        """Its own folder."""
        return Path(self.program.folder, self.key)


def pickled(value: Any) -> str:
    """A value of the runner's, for the template."""
    return base64.b64encode(pickle.dumps(value)).decode()


class Program:
    """Starts the process and waits until it has imported the agent. Raises ``ValueError``.

    ``spec`` are the settings that the process gets.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        own_providers = spec["agent"].get("train_model") is not None
        self.environment = agent_environment(spec["env"], own_providers=own_providers)
        self.folder = tempfile.mkdtemp(prefix="groundwire-rollouts-")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._token = secrets.token_hex(16)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "groundwire.adapters.agents.process.template"],
            stdin=subprocess.PIPE,
            env={**self.environment, "PYTHONPATH": child_python_path(*map(Path, filter(None, sys.path)))},
            start_new_session=True,
        )
        self._finish = weakref.finalize(self, _end, os.getpid(), self._process, self._listener, self.folder)
        self.attempts: dict[str, RunningAttempt] = {}
        self.used = self.ended = False
        self._forks = bool(spec["fork"])
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        settings = {
            **spec,
            "port": self._listener.getsockname()[1],
            "token": self._token,
            "place": self.folder,
            "python_path": os.environ.get("PYTHONPATH"),
            "hidden": sorted(os.environ.keys() - self.environment.keys()),
        }
        pipe: Any = self._process.stdin
        try:
            with suppress(BrokenPipeError):
                pipe.write(json.dumps(settings).encode() + b"\n")
                pipe.flush()  # and it stays open: with it the process ends
            self._accept(spec["agent"]["agent"])
            self.made = self._read()
            if "error" in self.made:
                raise _ERRORS.get(self.made["kind"], ValueError)(
                    self.made["error"] + hidden_hint(self.made["error"], self.environment, self.made["missed"])
                )
        except BaseException:
            self.end()
            raise

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a message, before :meth:`serve`."""
        self._control.sendall(json.dumps(message).encode() + b"\n")
        return self._read()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message that has no reply, after :meth:`serve`."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def learn(self, used: dict[str, Any]) -> None:
        """Let it import and make what a rollout has, after :meth:`serve`."""
        if used:
            self.send(used)
        _set(self.learnt, None)

    async def serve(self) -> None:
        """Serve the connections of attempts on the present event loop from now on."""
        self.learnt: asyncio.Future[None] = _future()
        """Whether it has imported what rollouts import, or the first told it nothing."""
        self._replies.close()  # or the connection would stay open with it
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=MAX_RESULT + 1)
        reader, self._writer = await asyncio.open_connection(sock=self._control)
        task = asyncio.create_task(self._read_ends(reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End the process, and with it all of its attempts."""
        if self._writer is not None:
            self._writer.close()
            self._server.close()
        await asyncio.wrap_future(in_thread(self.end, name="template"))
        for task in self._tasks:
            task.cancel()

    def end(self) -> None:
        """As :meth:`stop`, outside of an event loop."""
        for opened in (getattr(self, "_replies", None), getattr(self, "_control", None)):
            if opened is not None:
                opened.close()
        self._finish()

    def _accept(self, agent: str) -> None:
        """Wait for the process's connection, and for its import of the agent."""
        self._listener.settimeout(_POLL_S)
        while self._process.poll() is None:
            with suppress(TimeoutError):
                self._control = self._listener.accept()[0]
                self._control.setblocking(True)
                with self._control.makefile("rb", buffering=0) as unbuffered:  # what follows is waited for
                    line = unbuffered.readline()
                introduction = json.loads(line if line.endswith(b"\n") else "{}")
                if introduction.get("token") == self._token:
                    self._replies = self._control.makefile("rb")
                    break
        else:
            raise ValueError(
                f"the process that imports agent {agent!r} has ended, with {how_ended(self._process.returncode)}"
            )
        for seconds in (_LONG_S, _START_S - _LONG_S):
            self._control.settimeout(seconds)  # select() takes no file above the 1024th
            with suppress(TimeoutError):
                self._control.recv(1, socket.MSG_PEEK)
                self._control.setblocking(True)
                return
            _log.warning("the import of agent %r goes on after %g s", agent, seconds)
        raise ValueError(f"agent {agent!r}: its import did not end within {_START_S:g} s")

    def _read(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line.endswith(b"\n"):  # a process that is killed leaves a part of one
            status = self._process.wait()
            raise ValueError(f"the process that imports the agent has ended, with {how_ended(status)}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            introduction = json.loads(await reader.readline())
            attempt = self.attempts[introduction["attempt"]]
            if introduction["token"] == self._token and introduction["channel"] == "output":
                while piece := await reader.read(1 << 16):
                    attempt.output = (attempt.output + piece)[-_MAX_OUTPUT:]
            elif introduction["token"] == self._token:
                await _read_reports(reader, attempt)
        except (ValueError, LookupError, ConnectionError) as error:
            _log.debug("a connection of a rollout's process: %r", error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _read_ends(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while (line := await reader.readline()).endswith(b"\n"):
                message = json.loads(line)
                warn_of(message.get("hazards", ()))
                if (attempt := self.attempts.get(message.get("ended", ""))) is not None:
                    _set(attempt.ended, message["status"])
        self.ended = True
        while (status := self._process.poll()) is None:  # noqa: ASYNC110  a thread may not start
            await asyncio.sleep(_POLL_S)
        message = f"the process that has imported the agent ended with {how_ended(status)}"
        _set(self.learnt, None)  # others need not wait for it
        for attempt in self.attempts.values():
            _set(attempt.ended, message)
        if self._forks and self._writer is not None and not self._writer.is_closing():
            _log.warning("%s: the next rollout starts another", message)


async def _read_reports(reader: asyncio.StreamReader, attempt: RunningAttempt) -> None:
    try:
        while (line := await reader.readline()).endswith(b"\n"):
            message = json.loads(line)
            if "answer" in message or "failure" in message:
                _set(attempt.result, message)
                return
            attempt.on_report(message)
    finally:
        _set(attempt.result, None)


def failure_to(error: BackendError) -> dict[str, Any]:
    """A failure as JSON, which is read in the runner: never a pickle that an agent made."""
    fields = {"steps": [*error.steps], "input": error.input, "resources": [*error.resources]}
    return {"kind": error.kind, "message": str(error), "status": getattr(error, "status", None), "fields": fields}


def failure_from(message: Mapping[str, Any], output: str) -> BackendError:
    """The failure that :func:`failure_to` wrote, with what the agent printed last."""
    kind = next((kind for kind in _kinds(BackendError) if kind.kind == message["kind"]), BackendError)
    text = f"{message['message']}{output}"
    error = kind(text, status=message["status"]) if issubclass(kind, EndpointError) else kind(text)
    vars(error).update(message["fields"])
    return error


def _kinds(kind: type[BackendError]) -> Iterator[type[BackendError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


def warn_of(hazards: Iterable[str]) -> None:
    """Say what the agent has made that its forked processes do not have."""
    for hazard in hazards:
        _log.warning(
            "the import of the agent has made %s, which a forked process does not have: the agent may hang; let it "
            "make that when it runs, or give --rollout-process spawn",
            hazard,
        )


def _end(owner: int, process: subprocess.Popen[bytes], listener: socket.socket, folder: str) -> None:
    if os.getpid() != owner:  # a fork of the runner
        return
    listener.close()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, AttributeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
