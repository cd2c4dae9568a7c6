"""Rollouts in processes: :class:`ProcessBackend`, on the runner's side.

The runner keeps one process that has imported the agent and from which one is forked for each attempt; or, where a
forked process would not do, a few, each of which runs one attempt (:mod:`groundwire.adapters.agents.process.program`).
An attempt ends with all of its processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from groundwire.adapters._types import (
    AgentError,
    AgentSetupError,
    Answer,
    Backend,
    BackendError,
    Endpoint,
    Question,
    ToolError,
)
from groundwire.adapters.agents.app_environment import hidden_hint, which_missed
from groundwire.adapters.agents.process.folders import NOT_COPIED, remove
from groundwire.adapters.agents.process.program import END_S, Program, RunningAttempt, failure_from, pickled, warn_of
from groundwire.adapters.tracing.emitted_spans import current_emissions
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.machine import PROCESS_LIMITS, free_memory, free_processes, processors

_log = logging.getLogger(__name__)
_SHOWN_OUTPUT = 1000
_OF_THE_AGENT = (AgentError.kind, AgentSetupError.kind, ToolError.kind)
"""Failures for which a missing variable may be the reason."""
_LEARN_S = 60.0  # how long other rollouts wait for the first, from which the template learns what to import
_SPARES = 1 + processors() // 2  # fresh processes that import the agent before a rollout needs them
_THREADS = 16  # processes and threads that must be free for one more rollout
_place: ContextVar[RunningAttempt | None] = ContextVar("place", default=None)


class ProcessBackend(Backend):
    """Runs each rollout of an agent in a process of its own.

    ``spec`` are the keyword arguments of :func:`groundwire.adapters.agents.backend.agent_backend`. This process does
    not import the agent. ``folder`` is what a rollout has as its working folder: ``copy`` (of the present one, on
    write), ``empty`` or ``shared``. With ``fork``, the processes are forked from one that has imported the agent, else
    each imports it. ``sealed`` ones reach nothing but the model. ``setup`` names a function that is called before the
    import. ``env`` are names of variables that agents get beside the usual ones. Raises ``ValueError`` if the agent
    cannot be imported or is none.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        folder: str = "copy",
        fork: bool = True,
        sealed: bool = False,
        setup: str = "",
        env: Collection[str] = (),
    ) -> None:
        if fork and not hasattr(os, "fork"):
            fork = False
            _log.warning(
                "this system cannot fork: each rollout starts a process that imports the agent; what the agent starts "
                "in processes of their own is not ended with it, and nothing can be sealed"
            )
        settings = {"folder": folder, "fork": fork, "sealed": sealed, "setup": setup, "env": [*env]}
        self._spec, self._fork = {"agent": dict(spec), **settings}, fork
        self._first: Program | None = Program(self._spec)
        made = self._first.made
        self.agents, self.calls_tools, self._prompts = tuple(made["agents"]), made["calls_tools"], made["prompts"]
        self._programs: deque[asyncio.Task[Program]] = deque()
        """The template, or the fresh processes that run no attempt yet."""
        self._attempts: set[RunningAttempt] = set()
        self.environment_note = which_missed(made["missed"]) if made["missed"] else ""
        self._said_missed = set(made["missed"])
        self._child_bytes = (64 if fork else 256) << 20
        self._imports, self._starting = asyncio.Semaphore(_SPARES), asyncio.Lock()
        self._has_waited = False
        warn_of(made.get("hazards", ()))
        if folder == "copy" and made["folder"] == "shared":
            _log.warning(NOT_COPIED, Path.cwd())
        if made.get("generators"):
            _log.warning(
                "%s: random generators that were made at the agent's import give every rollout the same numbers; make "
                "them in the agent, or use the functions of random and numpy.random",
                ", ".join(made["generators"]),
            )

    def describe_call(self, question: Question) -> str:
        """As the agent's own backend, which is asked in the process that has imported it."""
        assert self._first is not None, "before the first rollout"
        reply = self._first.ask({"describe": pickled(question)})
        if "error" in reply:
            raise ValueError(reply["error"])
        return str(reply["call"])

    def default_prompts(self, form: str) -> dict[str, str]:
        """As the agent's own backend."""
        return dict(self._prompts)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Room in the memory, and a process that has imported the agent. Raises a :class:`adapters.BackendError`."""
        emissions = current_emissions()

        def on_report(message: dict[str, Any]) -> None:
            if "modules" in message:
                program.learn(message)
            elif emissions is not None:
                emissions.write(message["emitted"])

        async with self._starting:  # each counts those before it
            await self._room()
            program = await self._program()
            if program.used:  # by the rollout from which it learns what to import
                await asyncio.wait({program.learnt}, timeout=_LEARN_S)
                if program.ended:
                    program = await self._program()
            program.used = True
            attempt = RunningAttempt(key=uuid.uuid4().hex, program=program, on_report=on_report)
            self._attempts.add(attempt)
            program.attempts[attempt.key] = attempt
        token = _place.set(attempt)
        try:
            yield
        finally:
            _place.reset(token)
            await self._end(attempt)

    def at_once(self, wanted: int) -> tuple[int, str]:
        """As many as there is room for, at least one."""
        running = len(self._attempts)
        possible = min(wanted, free_memory() / self._child_bytes, running if free_processes() < _THREADS else wanted)
        return max(1, int(possible)), self._shortage(wanted) if possible < wanted else ""

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question in a process of its own. Raises a :class:`adapters.BackendError`."""
        async with AsyncExitStack() as stack:
            attempt = _place.get()
            if attempt is None or attempt not in self._attempts or attempt.used:
                await stack.enter_async_context(self.place())
                attempt = _place.get()
            assert attempt is not None
            attempt.used = True
            arguments = pickled((question, endpoint))
            attempt.program.send({"start": attempt.key, "place": str(attempt.place), "arguments": arguments})
            either: set[asyncio.Future[Any]] = {attempt.result, attempt.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({attempt.result}, timeout=END_S)  # its end may be read before its result
            message = attempt.result.result() if attempt.result.done() else None
            if message is None:
                status = await attempt.ended
                end = f"the agent's process ended without an answer: {status}{_last_words(attempt)}"
                raise ToolError(end + hidden_hint(end, attempt.program.environment))
            self._child_bytes = max(self._child_bytes, message.get("bytes", 0))
            missed = message.get("missed", ())
            if new := sorted({*missed} - self._said_missed):
                self._said_missed.update(new)
                _log.warning("agent: %s", which_missed(new))
            if "failure" in message:
                failure, end = message["failure"], _last_words(attempt)
                if failure["kind"] in _OF_THE_AGENT:
                    end += hidden_hint(f"{failure['message']}{end}", attempt.program.environment, missed)
                raise failure_from(failure, end)
            return Answer(**message["answer"])

    async def stop(self) -> None:
        """End all processes."""
        programs, self._programs = self._programs, deque()
        if self._first is not None:
            self._first.end()
            self._first = None
        for starting in programs:
            with suppress(BackendError):
                await (await starting).stop()
        self._imports, self._starting = asyncio.Semaphore(_SPARES), asyncio.Lock()

    async def _program(self) -> Program:
        """The template, which is started again if it has ended; or a fresh process. Raises :class:`ToolError`."""
        if self._fork and self._programs and _has_ended(self._programs[0]):
            self._programs.clear()
        while len(self._programs) < (1 if self._fork else _SPARES):
            self._programs.append(asyncio.create_task(self._start()))
        if self._fork:
            return await asyncio.shield(self._programs[0])
        starting = self._programs.popleft()
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._programs.appendleft(starting)
            raise

    async def _start(self) -> Program:
        program, self._first = self._first, None
        if program is None:
            try:
                async with self._imports:
                    program = await asyncio.wrap_future(in_thread(lambda: Program(self._spec), name="template"))
            except ValueError as error:
                raise ToolError(str(error)) from error
        await program.serve()
        return program

    async def _room(self) -> None:
        """Wait until there are memory and processes for one more child, if any is alive.

        The memory that its children use is counted as well: it may grow.
        """
        while self._attempts and (shortage := self._shortage(len(self._attempts) + 1)):
            if not self._has_waited:
                self._has_waited = True
                _log.warning("%d rollouts run at once: %s", len(self._attempts), shortage)
            await asyncio.sleep(0.1)

    def _shortage(self, count: int) -> str:
        """Why no ``count`` rollouts can run at once; "" if they can."""
        if free_memory() <= self._child_bytes * count:
            return f"each has {self._child_bytes >> 20} MB of its own, and more would take the last free memory"
        if free_processes() < _THREADS:
            return f"no more processes may be started ({PROCESS_LIMITS})"
        return ""

    async def _end(self, attempt: RunningAttempt) -> None:
        try:
            attempt.program.learn({})  # if this one has told nothing, the next one does
            if not self._fork:
                await attempt.program.stop()
            elif attempt.used:
                attempt.program.send({"end": attempt.key})
                await asyncio.wait({attempt.ended}, timeout=END_S)
        finally:
            attempt.program.attempts.pop(attempt.key, None)
            self._attempts.discard(attempt)
            in_thread(lambda: remove(attempt.place), name=f"remove {attempt.key}")


def _has_ended(starting: asyncio.Task[Program]) -> bool:
    if not starting.done():
        return False
    return starting.cancelled() or starting.exception() is not None or starting.result().ended


def _last_words(attempt: RunningAttempt) -> str:
    text = attempt.output.decode("utf-8", "replace").strip()
    return f"; it printed last: {text[-_SHOWN_OUTPUT:]}" if text else ""
