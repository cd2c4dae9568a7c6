"""The runner's side of rollouts in processes: :class:`ProcessBackend`.

The runner keeps one *template*, a process with one thread that has imported the agent, which forks a child for each
attempt (:mod:`groundwire.adapters.agents.process.template`), in which the agent runs
(:mod:`groundwire.adapters.agents.process.child`). All of them connect to a Unix socket of the runner:

    runner <-> template   JSON lines: describe, start, end; what it has imported, ended
    child  ->  runner     its result, one JSON line
    child  ->  runner     what it prints

An attempt ends with all of its processes: the child's group is killed, and what left the group.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groundwire.adapters._types import Answer, Backend, BackendError, Endpoint, Question, ToolError
from groundwire.adapters.agents.process.results import MAX_RESULT, answer_from, failure_from
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.loading import MissingPackageError
from groundwire.tools.startup import child_python_path

_log = logging.getLogger(__name__)
_MAX_OUTPUT = 1 << 16
"""Bytes of what a rollout prints that are kept: the last ones."""
_SHOWN_OUTPUT = 1000
_START_S = 300.0
"""How long the template may take to import the agent."""
_LEARN_S = 60.0
"""How long other rollouts wait for the first, from which the template learns what to import."""
_END_S = 5.0
_POLL_S = 0.05
_FREE_SHARE = 0.1
"""The share of the machine's memory that stays free."""


class LitAgentError(ValueError):
    """The agent is a ``LitAgent``, which needs the store of its runner."""


@dataclass
class _Attempt:
    ended: asyncio.Future[str]
    """Why the child is gone, if it is gone without a result."""
    result: asyncio.Future[Mapping[str, Any]]
    output: bytearray = field(default_factory=bytearray)


class ProcessBackend(Backend):
    """Runs each rollout of an agent in a process of its own, which is forked from one that has imported the agent.

    ``spec`` are the keyword arguments of :func:`groundwire.adapters.agents.backend.agent_backend`. This process does
    not import the agent. ``folder`` is what a rollout has as its working folder: ``copy`` (of the present one, on
    write), ``empty`` or ``shared``. Raises ``ValueError`` if the agent cannot be imported or is none.
    """

    def __init__(self, spec: Mapping[str, Any], *, folder: str = "copy") -> None:
        self._template = _Template(spec, folder)
        made = self._template.made
        self.agents, self.calls_tools, self._prompts = tuple(made["agents"]), made["calls_tools"], made["prompts"]
        self._attempts: dict[str, _Attempt] = {}
        self._serving: asyncio.Task[None] | None = None
        self._learnt: asyncio.Event | None = None
        self._child_bytes = 64 << 20
        self._freed = asyncio.Condition()
        for hazard in made["hazards"]:
            _log.warning(
                "the import of agent %r made %s, which a forked process does not have: the agent may hang; let it make "
                "that when it runs, or give --rollout-process spawn",
                spec["agent"],
                hazard,
            )

    def describe_call(self, question: Question) -> str:
        """As the agent's own backend, which is asked in the process that has imported it."""
        reply = self._template.ask({"describe": _pickled(question)})
        if "error" in reply:
            raise ValueError(reply["error"])
        return str(reply["call"])

    def default_prompts(self, form: str) -> dict[str, str]:
        """As the agent's own backend."""
        return dict(self._prompts)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question in a process of its own. Raises a :class:`adapters.BackendError`."""
        template = self._template
        if self._serving is None:
            self._serving = asyncio.create_task(template.serve(self._attempts))
        await asyncio.shield(self._serving)
        learns = self._learnt is None
        if self._learnt is None:
            self._learnt = asyncio.Event()
        else:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._learnt.wait(), _LEARN_S)
        await self._room()
        key = uuid.uuid4().hex
        loop = asyncio.get_running_loop()
        attempt = self._attempts[key] = _Attempt(loop.create_future(), loop.create_future())
        place = Path(template.folder, key)
        try:
            arguments = _pickled((question, endpoint))
            template.send({"start": key, "place": str(place), "arguments": arguments, "learn": learns})
            await asyncio.wait({attempt.result, attempt.ended}, return_when=asyncio.FIRST_COMPLETED)
            if (
                not attempt.result.done()
            ):  # the result of a child that ends is read before its end is told, or not at all
                await asyncio.wait({attempt.result}, timeout=0.1)
            if not attempt.result.done():
                raise _gone(attempt)
            message = attempt.result.result()
            if learns:
                template.send({"modules": message.get("modules", ())})
            return self._answer(message, attempt)
        finally:
            self._learnt.set()
            await self._end(template, key, attempt, place)

    async def stop(self) -> None:
        """End the template and all that it started."""
        await self._template.stop()

    def _answer(self, message: Mapping[str, Any], attempt: _Attempt) -> Answer:
        self._child_bytes = max(self._child_bytes, message.get("bytes", 0))
        if "failure" in message:
            raise failure_from(message["failure"], _last_words(attempt))
        return answer_from(message["answer"])

    async def _room(self) -> None:
        """Wait until the machine's free memory is enough for one more child, if any is alive."""
        async with self._freed:
            while self._attempts and not _has_room(self._child_bytes):
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), 1.0)

    async def _end(self, template: _Template, key: str, attempt: _Attempt, place: Path) -> None:
        template.send({"end": key})
        await asyncio.wait({attempt.ended}, timeout=_END_S)
        self._attempts.pop(key, None)
        in_thread(lambda: shutil.rmtree(place, ignore_errors=True), name=f"remove {key}")
        async with self._freed:
            self._freed.notify_all()


def _gone(attempt: _Attempt) -> BackendError:
    words = _last_words(attempt)
    return ToolError(f"the agent's process ended without an answer: {attempt.ended.result()}{words}")


def _last_words(attempt: _Attempt) -> str:
    text = attempt.output.decode("utf-8", "replace").strip()
    return f"; it printed last: {text[-_SHOWN_OUTPUT:]}" if text else ""


def _has_room(child_bytes: int) -> bool:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return True
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return kib["MemAvailable"] * 1024 - child_bytes > kib["MemTotal"] * 1024 * _FREE_SHARE


_ERRORS = {error.__name__: error for error in (ValueError, MissingPackageError, LitAgentError)}


def _pickled(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


class _Template:
    """The process from which the children are forked, and the socket to which all of them connect."""

    def __init__(self, spec: Mapping[str, Any], folder: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="groundwire-rollouts-")
        address = os.path.join(self.folder, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(1024)
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "groundwire.adapters.agents.process.template", address],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": child_python_path(*map(Path, filter(None, sys.path)))},
            start_new_session=True,
        )
        self._attempts: dict[str, _Attempt] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: set[asyncio.Task[None]] = set()
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps({"agent": dict(spec), "folder": folder}).encode())
        try:
            self._control = self._accept(spec["agent"])
            self._replies = self._control.makefile("rb")
            self.made = self._read()
        except BaseException:
            self._end()
            raise
        if "error" in self.made:
            self._end()
            raise _ERRORS[self.made["kind"]](self.made["error"])

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a message, before :meth:`serve`."""
        self._control.sendall(json.dumps(message).encode() + b"\n")
        return self._read()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message that has no reply, after :meth:`serve`."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def serve(self, attempts: dict[str, _Attempt]) -> None:
        """Serve the connections of ``attempts`` on the present event loop from now on."""
        self._attempts = attempts
        self._replies.close()  # or the connection would stay open with it
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener, limit=MAX_RESULT + 1)
        reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
        task = asyncio.create_task(self._read_ends(reader))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def stop(self) -> None:
        """End the template, which ends its children."""
        if self._writer is not None:
            self._writer.close()
            self._server.close()
        await asyncio.wrap_future(in_thread(self._end, name="template"))
        for task in self._reading:
            task.cancel()

    def _accept(self, agent: str) -> socket.socket:
        self._listener.settimeout(_POLL_S)
        began = time.monotonic()
        while self._process.poll() is None:
            with suppress(TimeoutError):
                return self._listener.accept()[0]
            if time.monotonic() - began > _START_S:
                raise ValueError(f"agent {agent!r}: its import did not end within {_START_S:g} s")
        raise ValueError(f"the process that imports agent {agent!r} has ended, with status {self._process.returncode}")

    def _read(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            status = self._process.wait()
            raise ValueError(f"the process that imports the agent has ended, with status {status}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _end(self) -> None:
        for opened in (getattr(self, "_replies", None), getattr(self, "_control", None), self._listener):
            if opened is not None:
                opened.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            channel = json.loads(await reader.readline())
            attempt = self._attempts.get(channel["attempt"])
            if attempt is not None and channel["channel"] == "result":
                line = await reader.readline()
                if line and not attempt.result.done():
                    attempt.result.set_result(json.loads(line))
            elif attempt is not None:
                while piece := await reader.read(1 << 16):
                    attempt.output = (attempt.output + piece)[-_MAX_OUTPUT:]
        except (ValueError, ConnectionError):
            pass
        finally:
            self._reading.discard(task)
            writer.close()

    async def _read_ends(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            attempt = self._attempts.get(message["ended"])
            if attempt is not None and not attempt.ended.done():
                attempt.ended.set_result(message["status"])
        for attempt in self._attempts.values():
            if not attempt.ended.done():
                attempt.ended.set_result("the process that it was forked from has ended")
