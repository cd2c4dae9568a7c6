"""One attempt, in a process that was forked from the template, below a guard (:func:`.guard.guard`)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from groundwire.adapters._types import AgentError, Answer, Backend, BackendError, Endpoint, Question
from groundwire.adapters.agents.failures import agent_failure
from groundwire.adapters.agents.process.guard import end_with, guard
from groundwire.adapters.agents.process.isolation import isolate, own_bytes
from groundwire.adapters.agents.process.namespaces import own_network
from groundwire.adapters.agents.process.relay import Relay
from groundwire.adapters.agents.process.results import MAX_RESULT, answer_to, failure_to
from groundwire.adapters.agents.process.warm_up import built_models
from groundwire.adapters.tracing.emitted_spans import Emissions

_QUIET_S = 1.0
"""No import within this time: the agent has imported what it needs for its first call."""
_STOP_S = 5.0
"""How long the agent's context managers may take to exit."""


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """What the attempts of a template have in common."""

    backend: Backend
    address: Any
    token: str
    folder: str
    """How a copy of the working folder is made; see :mod:`.folders`."""
    placeholder: int
    """The port that clients have which were made at the import; 0 if they keep their own."""
    sealed: bool


def run_guarded(attempts: Attempts, message: dict[str, Any], template: int) -> NoReturn:
    """Be the process that ``template`` has forked for an attempt."""
    try:
        os.setsid()
        end_with(template, signal.SIGTERM)
        ours, theirs = socket.socketpair()
        _, endpoint = _arguments(message)
        guard(beside=partial(_relay, ours, endpoint) if attempts.sealed else None)
        ours.close()
        run_agent(attempts, message, theirs)
    finally:
        os._exit(70)


def _relay(connection: socket.socket, endpoint: Endpoint) -> None:
    """Serve, outside of the attempt's network, the socket that listens in it."""
    _, (number, *_), _, _ = socket.recv_fds(connection, 1, 1)
    Relay(endpoint.base_url).accept(socket.socket(fileno=number))


def connect(address: Any, **introduction: Any) -> socket.socket:
    """A connection to the runner, which has said who it is."""
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    connection.connect(address if isinstance(address, str) else tuple(address))
    connection.sendall(json.dumps(introduction).encode() + b"\n")
    return connection


class _Reports:
    """The connection on which an attempt reports to the runner: JSON lines, of which the last is its result."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock, self._process = connection, threading.Lock(), os.getpid()

    def send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._process:  # the agent has forked, and this is its copy
            os._exit(0)
        try:
            text = json.dumps(message, default=str).encode()
        except (TypeError, ValueError, RecursionError) as error:
            text = _too_odd(f"the answer and its steps cannot be sent ({error})")
        if len(text) > MAX_RESULT:
            text = _too_odd(f"the answer and its steps are larger than {MAX_RESULT >> 20} MiB")
        with self._lock:
            self._connection.sendall(text + b"\n")

    def send_imports(self, before: set[str]) -> None:
        """What has been imported since ``before``, what is built, and the memory of this process."""
        modules = [name for name in [*sys.modules] if name not in before]
        self.send({"modules": modules, "models": built_models(), "bytes": own_bytes()})

    def send_first_imports(self, before: set[str]) -> None:
        """As :meth:`send_imports`, once no import has come for a while."""
        count = -1
        while count != len(sys.modules):
            count = len(sys.modules)
            time.sleep(_QUIET_S)
        self.send_imports(before)


class _Emissions(Emissions):
    """Sends what the agent emits to the runner, which stores it."""

    def __init__(self, reports: _Reports) -> None:
        super().__init__(lambda fields: reports.send({"emitted": fields}))


def _too_odd(message: str) -> bytes:
    return json.dumps({"failure": failure_to(AgentError(message))}).encode()


def _arguments(message: dict[str, Any]) -> tuple[Question, Endpoint]:
    arguments: tuple[Question, Endpoint] = pickle.loads(base64.b64decode(message["arguments"]))  # noqa: S301  of the runner
    return arguments


def run_agent(attempts: Attempts, message: dict[str, Any], outside: socket.socket | None = None) -> NoReturn:
    """Run the agent in this process; the relay of a sealed attempt is behind ``outside``."""
    code = 1
    try:
        introduction = {"token": attempts.token, "attempt": message["start"]}
        reports = _Reports(connect(attempts.address, channel="result", **introduction))
        _redirect_output(connect(attempts.address, channel="output", **introduction))
        before = set(sys.modules)
        if message["learn"]:
            threading.Thread(target=reports.send_first_imports, args=(before,), daemon=True).start()
        result = _result(attempts, message, outside, reports)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if message["learn"]:
            reports.send_imports(before)
        reports.send(result)
        code = 0
    except BaseException as error:  # a fault of ours or of the machine: no answer
        with suppress(Exception):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
    finally:
        os._exit(code)  # exit handlers of the template's libraries would wait for threads that no child has


def _result(
    attempts: Attempts, message: dict[str, Any], outside: socket.socket | None, reports: _Reports
) -> dict[str, Any]:
    try:
        question, endpoint = _arguments(message)
        if attempts.sealed:
            endpoint = _sealed(endpoint, attempts.placeholder, outside)
        isolate(
            endpoint.base_url,
            Path(message["place"]),
            folder=attempts.folder,
            seed=message["start"],
            placeholder=attempts.placeholder,
            forked=outside is not None,
        )
        with _Emissions(reports).activate():
            return {"answer": answer_to(asyncio.run(_run_once(attempts.backend, question, endpoint)))}
    except BackendError as error:
        return {"failure": failure_to(error)}
    except BaseException as error:  # an agent's SystemExit ends its rollout
        return {"failure": failure_to(agent_failure(error))}


async def _run_once(backend: Backend, question: Question, endpoint: Endpoint) -> Answer:
    try:
        return await backend.run(question, endpoint)
    finally:
        with suppress(Exception):
            await asyncio.wait_for(backend.stop(), _STOP_S)


def _sealed(endpoint: Endpoint, port: int, outside: socket.socket | None) -> Endpoint:
    listener = own_network(port)
    assert listener is not None, "the template has tried it"
    assert outside is not None
    socket.send_fds(outside, [b"x"], [listener.fileno()])
    listener.close()
    return replace(endpoint, base_url=f"http://127.0.0.1:{port}/v1")


def _redirect_output(connection: socket.socket) -> None:
    for number in (1, 2):
        os.dup2(connection.fileno(), number)
    connection.close()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
