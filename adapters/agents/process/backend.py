"""The runner's side of rollouts in processes: :class:`ProcessBackend`.

The runner keeps one *template*, a process with one thread that has imported the agent, which forks a child for each
attempt (:mod:`groundwire.adapters.agents.process.template`), in which the agent runs
(:mod:`groundwire.adapters.agents.process.child`). All of them connect to a Unix socket of the runner:

    runner <-> template   JSON lines: start, end; ready, imported, ended
    child  ->  runner     its result, one JSON line
    child  ->  runner     what it prints

An attempt ends with all of its processes: the child's group is killed, and what left the group.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groundwire.adapters._types import AgentSetupError, Answer, Backend, BackendError, Endpoint, Question, ToolError
from groundwire.adapters.agents.process.results import MAX_RESULT, answer_from, failure_from
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.startup import child_python_path

_MAX_OUTPUT = 1 << 16
"""Bytes of what a rollout prints that are kept: the last ones."""
_SHOWN_OUTPUT = 1000
_START_S = 300.0
"""How long the template may take to import the agent."""
_LEARN_S = 60.0
"""How long other rollouts wait for the first, from which the template learns what to import."""
_END_S = 5.0
_FREE_SHARE = 0.1
"""The share of the machine's memory that stays free."""


@dataclass
class _Attempt:
    ended: asyncio.Future[str]
    """Why the child is gone, if it is gone without a result."""
    result: asyncio.Future[Mapping[str, Any]]
    output: bytearray = field(default_factory=bytearray)


class ProcessBackend(Backend):
    """Runs each rollout of ``inner`` in a process of its own, which is forked from one that has imported the agent.

    ``spec`` are the keyword arguments of :func:`groundwire.adapters.agents.backend.agent_backend` that made ``inner``.
    ``folder`` is what a rollout has as its working folder: ``copy`` (of the present one, on write), ``empty`` or
    ``shared``.
    """

    def __init__(self, inner: Backend, spec: Mapping[str, Any], *, folder: str = "copy", fork: bool = True) -> None:
        self.inner, self._spec, self._folder, self._fork = inner, dict(spec), folder, fork
        self.agents, self.reads_only, self.calls_tools = inner.agents, inner.reads_only, inner.calls_tools
        self._attempts: dict[str, _Attempt] = {}
        self._starting: asyncio.Task[_Template] | None = None
        self._learnt: asyncio.Event | None = None
        self._child_bytes = 64 << 20
        self._freed = asyncio.Condition()

    def describe_call(self, question: Question) -> str:
        """As the agent's own backend."""
        return self.inner.describe_call(question)

    def default_prompts(self, form: str) -> dict[str, str]:
        """As the agent's own backend."""
        return self.inner.default_prompts(form)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question in a process of its own. Raises a :class:`adapters.BackendError`."""
        template = await self._template()
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
            pickled = base64.b64encode(pickle.dumps((question, endpoint))).decode()
            template.send({"start": key, "place": str(place), "arguments": pickled, "learn": learns})
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
        if self._starting is not None:
            with suppress(Exception):
                await (await self._starting).stop()
            self._starting = None
        await self.inner.stop()

    def _answer(self, message: Mapping[str, Any], attempt: _Attempt) -> Answer:
        self._child_bytes = max(self._child_bytes, message.get("bytes", 0))
        if "failure" in message:
            raise failure_from(message["failure"], _last_words(attempt))
        return answer_from(message["answer"])

    async def _template(self) -> _Template:
        """The template, which the first rollout starts."""
        first = self._starting is None
        if self._starting is None:
            self._starting = asyncio.create_task(_Template.start(self))
        try:
            return await asyncio.shield(self._starting)
        except Exception:
            if first:
                self._starting = None
            raise

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


class _Template:
    """The process from which the children are forked, and the socket to which all of them connect."""

    def __init__(self, backend: ProcessBackend) -> None:
        self._backend = backend
        self.folder = tempfile.mkdtemp(prefix="groundwire-rollouts-")
        self._ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, backend: ProcessBackend) -> _Template:
        """Start the process; it has imported the agent afterwards. Raises :class:`adapters.AgentSetupError`."""
        template = cls(backend)
        address = os.path.join(template.folder, "socket")
        template._server = await asyncio.start_unix_server(template._serve, address, limit=MAX_RESULT + 1)
        spec = json.dumps({"agent": backend._spec, "folder": backend._folder})
        template._process = subprocess.Popen(  # noqa: ASYNC220, S603
            [sys.executable, "-m", "groundwire.adapters.agents.process.template", address],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": child_python_path(*map(Path, filter(None, sys.path)))},
            start_new_session=True,
        )
        assert template._process.stdin is not None
        template._process.stdin.write(spec.encode())
        template._process.stdin.close()
        ended = asyncio.wrap_future(in_thread(template._process.wait, name="template"))
        await asyncio.wait({template._ready, ended}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if template._ready.done() and "error" not in template._ready.result():
            return template
        await template.stop()
        if template._ready.done():
            raise AgentSetupError(str(template._ready.result()["error"]))
        state = f"ended with status {ended.result()}" if ended.done() else f"did not end within {_START_S:g} s"
        raise AgentSetupError(f"the import of the agent in a process of its own {state}")

    def send(self, message: Mapping[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def stop(self) -> None:
        """End the template, which ends its children."""
        if self._writer is not None:
            self._writer.close()
        self._server.close()
        done = asyncio.wrap_future(in_thread(self._process.wait, name="template"))
        await asyncio.wait({done}, timeout=_END_S)
        if not done.done():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await done
        for task in self._reading:
            task.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            channel = json.loads(await reader.readline())
            attempt = self._backend._attempts.get(channel.get("attempt", ""))
            if channel["channel"] == "template":
                self._writer = writer
                await self._read_template(reader)
            elif attempt is not None and channel["channel"] == "result":
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

    async def _read_template(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if "ended" in message:
                attempt = self._backend._attempts.get(message["ended"])
                if attempt is not None and not attempt.ended.done():
                    attempt.ended.set_result(message["status"])
            elif not self._ready.done():
                self._ready.set_result(message)
        for attempt in self._backend._attempts.values():
            if not attempt.ended.done():
                attempt.ended.set_result("the process that it was forked from has ended")
