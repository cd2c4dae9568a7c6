"""Any program as a backend: ``--backend command --agent "node agent.mjs"``.

Each rollout is a process. It reads its task from standard input or from its arguments, and writes its answer to
standard output. The base URL of its attempt and an API key are in the environment, under the names that the clients of
providers read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from groundwire.adapters._types import (
    AgentError,
    AgentSetupError,
    Answer,
    Backend,
    Endpoint,
    MalformedOutputError,
    Question,
    ToolError,
)
from groundwire.adapters.agents import app_environment
from groundwire.adapters.agents.answers import judged_answer
from groundwire.adapters.agents.drivers import AgentTask, agent_task
from groundwire.adapters.agents.process.folders import NOT_COPIED, SHARED, remove
from groundwire.adapters.agents.process.guard import guarded
from groundwire.adapters.tracing.open_attempts import call_summary
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.files import TemporaryFolder
from groundwire.tools.infrastructure import hosts_in, is_infrastructure_text

_log = logging.getLogger(__name__)
_MAX_ANSWER, _LAST_LINES = 1 << 20, 20
_SHOWN = 1000  # characters of standard error in the message of a failure
_END_S = 5.0
_COLUMN = re.compile(r"\{(\w+)\}")
_ERROR_LINE = re.compile(r"(?! )[\w.\[ ]*(error|exception|panic|fatal)", re.IGNORECASE)
_NOISE = re.compile(r"\s+at .*|\s*File \".*|[\s^~{}\[\](),;]*|Node\.js v\S+")
"""Lines of a stack, and those that only mark or close something."""


class CommandBackend(Backend):
    """Starts ``agent``, a command line, for each question. Raises ``ValueError`` if there is no such program.

    ``{question}`` and the names of other columns in the command line are replaced, each within its argument. ``input``
    is what the program reads: the task as ``json``, the question as a ``line``, or ``none``, which is the default where
    the command line has a column. ``output`` is where the answer is in what it writes: ``all``, the ``last-line``, or
    ``json:FIELD``, a field of the JSON object that is written last. ``agent_folder`` is its working folder, as for
    other agents: a ``copy`` of the present one, ``empty``, or ``shared``; those of caches are its own.
    """

    def __init__(
        self,
        *,
        agent: str,
        agent_folder: str = "copy",
        agent_env: Collection[str] = (),
        input: Literal["json", "line", "none"] | None = None,
        output: str = "all",
    ) -> None:
        try:
            self._command = shlex.split(agent)
        except ValueError as error:
            raise ValueError(f"agent {agent!r} is no command line: {error}") from error
        if not self._command or shutil.which(self._command[0]) is None:
            raise ValueError(f"agent {agent!r}: there is no program {' '.join(self._command[:1])!r}")
        if output not in ("all", "last-line") and not output.removeprefix("json:") != output != "json:":
            raise ValueError(f"the option output is {output!r}; it must be all, last-line or json:FIELD")
        self._input, self._output = input, output
        self._is_noted = False
        self._root: TemporaryFolder | None = None
        self._ends: set[Future[None]] = set()
        self._way = "overlay" if agent_folder == "copy" else agent_folder
        environment = app_environment.agent_environment(agent_env)
        self._environment = {**app_environment.app_variables(environment), **environment}
        self.environment_note = app_environment.without_keys(self._environment)

    def describe_call(self, question: Question) -> str:
        """How the program is called."""
        return self._call(agent_task(question))[2]

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`, by its output."""
        command, text, called = self._call(agent_task(question))
        try:
            process, place = self._start(command, self._settings(endpoint), reads=bool(text))
        except (OSError, ValueError) as error:
            raise AgentSetupError(f"the agent cannot be started: {error} ({called:.{_SHOWN}})") from error
        talk = in_thread(lambda: _talk(process, text, self._output == "all"), name=f"agent {question.id}")
        try:
            output, errors = await asyncio.wrap_future(talk)
        finally:
            if process.poll() is None:  # its rollout was cancelled: the guard ends all that it has started
                process.terminate()
            if not self._is_noted and (place / SHARED).exists():
                self._is_noted = True
                _log.warning(NOT_COPIED, Path.cwd())
            end = in_thread(lambda: _end(process, place), name=f"remove {place.name}")
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)
        asks_again = self._input == "line" and _useful(errors.decode("utf-8", "replace")).startswith("EOFError")
        if process.returncode and not asks_again:  # a loop on input() ends where its input does
            raise self._failure(process.returncode, output, errors)
        result = self._read(output.decode("utf-8", "replace").strip())
        answer, field = judged_answer(result, question.answers, (), {})
        made, no_call = await call_summary(endpoint.base_url) if endpoint.base_url else None, ""
        if made is not None and not made.calls:
            no_call = (
                f"{shlex.join(self._command)} made no LLM call to {endpoint.base_url}, which it has in "
                "OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the like: let its client read them, or give it the URL in its "
                "own way"
            )
        place_of_answer = field if answer != result else "standard output"
        return Answer(text=answer, judged_field=place_of_answer, input=called, no_call=no_call)

    async def stop(self) -> None:
        """Wait until the programs have ended, and remove their folders."""
        await asyncio.gather(*map(asyncio.wrap_future, self._ends))
        if self._root is not None:
            self._root.remove()
            self._root = None

    def _start(
        self, command: Sequence[str], settings: Mapping[str, str], *, reads: bool
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """The program below its guard, in folders of its own, and the place of these."""
        self._root = self._root or TemporaryFolder("groundwire-program-")
        place = Path(tempfile.mkdtemp(dir=self._root.path)).resolve()
        try:
            # Not asyncio's own: they need a child watcher, which the policy of uvloop (set by Ray) does not have.
            process = subprocess.Popen(  # noqa: S603
                guarded(command, place=str(place), way=self._way),
                stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self._environment, **settings},
                start_new_session=True,
            )
        except (OSError, ValueError):
            remove(place)
            raise
        return process, place

    def _settings(self, endpoint: Endpoint) -> dict[str, str]:
        """The variables that send the program's LLM calls to the attempt."""
        host = urlsplit(endpoint.base_url).hostname or "127.0.0.1"
        return {
            **app_environment.missing_variables(self._environment),
            **app_environment.provider_urls(endpoint.base_url),
            **app_environment.hooked_python(self._environment),
            **app_environment.without_proxy(host, self._environment),
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), endpoint.api_key),
        }

    def _call(self, task: AgentTask) -> tuple[list[str], bytes, str]:
        """The command line for a task, what is written to the program, and how to show both."""
        known = {name for part in self._command[1:] for name in _COLUMN.findall(part) if name in task}

        def value(match: re.Match[str]) -> str:
            return str(task[match[1]]).replace("\0", "\ufffd") if match[1] in known else match[0]

        command = [self._command[0], *(_COLUMN.sub(value, argument) for argument in self._command[1:])]
        kind = self._input or ("none" if known else "json")
        asked = task["question"].replace("\n", " ")
        line = asked if kind == "line" else json.dumps(task, ensure_ascii=False, default=str)
        shown = shlex.join(command)
        if kind == "none":
            return command, b"", shown
        return command, f"{line}\n".encode("utf-8", "replace"), f"{shown} with {line:.{_SHOWN}} as standard input"

    def _read(self, text: str) -> str:
        """The part of the output that has the answer."""
        if self._output == "all":
            return text
        if self._output == "last-line":
            return text.splitlines()[-1] if text else ""
        name = self._output.removeprefix("json:")
        for source in (text, text[text.rfind("\n{") + 1 :]):
            with suppress(ValueError, RecursionError):
                written = json.loads(source)
                if isinstance(written, dict) and name in written:
                    return written[name] if isinstance(written[name], str) else json.dumps(written[name])
        raise MalformedOutputError(f"the agent wrote no JSON object with the field {name!r}, but {text[-_SHOWN:]!r}")

    def _failure(self, status: int, output: bytes, errors: bytes) -> AgentError | ToolError:
        lines = [*output.split(b"\n"), *errors.strip().split(b"\n")][-_LAST_LINES:]
        end = b"\n".join(lines).decode("utf-8", "replace")
        broken = is_infrastructure_text(end) or status in (-signal.SIGKILL, 128 + signal.SIGKILL)  # out of memory
        useful = _useful(errors.decode("utf-8", "replace"))
        message = f"the agent ended with status {status}: {useful} ({shlex.join(self._command)})"
        message += app_environment.hidden_hint(f"{message} {end}", self._environment)
        if not broken:
            return AgentError(message)
        failure = ToolError(message)
        failure.resources = hosts_in(end)
        return failure


def _talk(process: subprocess.Popen[bytes], text: bytes, keep_first: bool) -> tuple[bytes, bytes]:
    """Write ``text`` to the program, and read what it writes until it ends: the first or last MiB, and its errors."""
    output, errors = _Kept(first=keep_first), _Kept(first=False)
    pipes = ((output, process.stdout), (errors, process.stderr))
    reads = [in_thread(partial(kept.read, pipe), name="an agent's output") for kept, pipe in pipes]
    if process.stdin is not None:
        with suppress(OSError):  # it reads no more
            process.stdin.write(text)
        with suppress(OSError):
            process.stdin.close()
    process.wait()
    wait(reads, _END_S)  # something that nobody could end may hold the pipes
    return output.bytes(), errors.bytes()


def _end(process: subprocess.Popen[bytes], place: Path) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    remove(place)


class _Kept:
    """The first or the last MiB of a stream."""

    def __init__(self, *, first: bool) -> None:
        self._bytes, self._first = bytearray(), first

    def read(self, pipe: Any) -> None:
        with pipe:
            while piece := pipe.read1(1 << 16):
                if not self._first or len(self._bytes) < _MAX_ANSWER:
                    self._bytes += piece
                if not self._first and len(self._bytes) > 2 * _MAX_ANSWER:
                    del self._bytes[:-_MAX_ANSWER]

    def bytes(self) -> bytes:
        return bytes(self._bytes[:_MAX_ANSWER] if self._first else self._bytes[-_MAX_ANSWER:])


def _useful(errors: str) -> str:
    """What standard error says at its end: from the last line that names an error on, without the stack."""
    lines = [line for line in errors.splitlines() if not _NOISE.fullmatch(line)][-_LAST_LINES:]
    start = max((number for number, line in enumerate(lines) if _ERROR_LINE.match(line)), default=0)
    return " ".join(map(str.strip, lines[start:]))[:_SHOWN]
