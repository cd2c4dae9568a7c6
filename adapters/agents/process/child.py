"""One attempt, in a process that was forked from the template, or in a fresh one that has imported the agent."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from groundwire.adapters._types import AgentError, Answer, Backend, BackendError, Endpoint, Question
from groundwire.adapters.agents.app_environment import hooked_python, missed_variables, provider_urls, without_proxy
from groundwire.adapters.agents.failures import agent_failure
from groundwire.adapters.agents.process.first_use import first_use
from groundwire.adapters.agents.process.folders import own_folders, own_working_folder
from groundwire.adapters.agents.process.guard import adopt_orphans, end_with, is_killed_first
from groundwire.adapters.agents.process.network import hang_up, seal, send_to
from groundwire.adapters.agents.process.program import MAX_RESULT, failure_to
from groundwire.adapters.tracing.emitted_spans import Emissions

_QUIET_S = 1.0  # no import within this time: the agent has imported what it needs for its first call
_STOP_S = 5.0  # how long the agent's context managers may take to exit


def connect(port: int, **introduction: Any) -> socket.socket:
    """A connection to the runner, which has said who it is."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(json.dumps(introduction).encode() + b"\n")
    return connection


class _Reports:
    """The connection on which an attempt reports to the runner: JSON lines, of which the last is its result."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock, self._process = connection, threading.Lock(), os.getpid()

    def send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._process:  # the agent has forked, and this is its copy
            os._exit(0)
        text, problem = "", ""
        try:
            text = json.dumps(message, default=str)
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"cannot be sent ({error})"
        if len(text) > MAX_RESULT:  # JSON of these texts is ASCII
            problem = f"are larger than {MAX_RESULT >> 20} MiB"
        if problem:
            text = json.dumps({"failure": failure_to(AgentError(f"the answer and its steps {problem}"))})
        with self._lock:
            self._connection.sendall(text.encode() + b"\n")

    def send_first_use(self, before: set[str], *, soon: bool = False) -> None:
        """What has been imported since ``before``, and what was made. With ``soon``, once no import has come for a
        while.
        """
        count = -1
        while soon and count != len(sys.modules):
            count = len(sys.modules)
            time.sleep(_QUIET_S)
        self.send(first_use(before))


def run_agent(
    backend: Backend, spec: Mapping[str, Any], message: Mapping[str, Any], *, learns: bool = False, template: int = 0
) -> NoReturn:
    """Run the agent in this process, and end it. One that ``template`` has forked is the parent of all that it starts,
    until it ends. With ``learns``, it tells what it imports.

    ``spec`` has the ``port`` of the runner, its ``token``, the ``folder``, how the working one is made its own
    (:mod:`.folders`), ``sealed``, and the ``placeholder``, the port of clients that were made at the import; 0 if they
    keep their own.
    """
    code = 1
    try:
        if template:
            os.setsid()
            end_with(template, signal.SIGKILL)
            adopt_orphans()
            hang_up()
        is_killed_first()
        introduction = {"token": spec["token"], "attempt": message["start"]}
        reports = _Reports(connect(spec["port"], channel="result", **introduction))
        with connect(spec["port"], channel="output", **introduction) as output:
            for number in (1, 2):
                os.dup2(output.fileno(), number)
        no_input()
        before = {*sys.modules} if learns else None  # else it would copy the memory of all these names
        result = _result(backend, spec, message, reports, before)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if before is not None:
            reports.send_first_use(before)
        reports.send({**result, "bytes": _most_bytes(), "missed": missed_variables()})
        code = 0
    except BaseException as error:  # a fault of ours or of the machine: no answer
        with suppress(Exception):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
    finally:
        os._exit(code)  # exit handlers of the template's libraries would wait for threads that no child has


def _result(
    backend: Backend, spec: Mapping[str, Any], message: Mapping[str, Any], reports: _Reports, before: set[str] | None
) -> dict[str, Any]:
    try:
        question, endpoint = pickle.loads(base64.b64decode(message["arguments"]))  # noqa: S301  of the runner
        if spec["sealed"]:
            endpoint = replace(endpoint, base_url=seal(spec["placeholder"], endpoint.base_url))
        _isolate(spec, endpoint.base_url, Path(message["place"]), seed=message["start"])
        if before is not None:  # a process with threads cannot enter each namespace
            learn = partial(reports.send_first_use, before, soon=True)
            threading.Thread(target=learn, daemon=True).start()
        with Emissions(lambda fields: reports.send({"emitted": fields})).activate():
            return {"answer": dict(vars(asyncio.run(_run_once(backend, question, endpoint))))}
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


def _isolate(spec: Mapping[str, Any], base_url: str, place: Path, *, seed: str) -> None:
    """Give this process what is its own: folders in ``place``, environment, connections, random numbers."""
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own_working_folder(place, spec["folder"])
    os.environ.update(own_folders(place))
    tempfile.tempdir = None
    os.environ.update(without_proxy(urlsplit(base_url).hostname or "", os.environ))
    if spec["placeholder"]:
        os.environ.update({**provider_urls(base_url), **hooked_python(os.environ)})
        send_to(base_url)
    number = int(seed[:8], 16)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def _most_bytes() -> int:
    """The most memory that this process has had alone, in bytes; 0 if the system does not say."""
    with suppress(ImportError, OSError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        sizes = {name.rstrip(":"): int(size) for name, size, _ in map(str.split, lines)}
        return (sizes["Private_Clean"] + sizes["Private_Dirty"] + max(0, most - sizes["Rss"])) << 10
    return 0


def no_input() -> None:
    """Let the standard input of this process have nothing."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
