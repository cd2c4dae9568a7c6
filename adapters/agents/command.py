"""Any program as a backend: ``--backend command --agent "node agent.mjs"``.

Each rollout is a process. It reads its task from standard input, as one JSON object, and writes its answer to standard
output. The base URL of its attempt and an API key are in the environment, under the names that the clients of OpenAI
and Anthropic read.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from typing import Any

from groundwire.adapters._types import AgentError, Answer, Backend, Endpoint, Question, ToolError
from groundwire.adapters.agents.answers import judged_answer
from groundwire.adapters.agents.drivers import agent_task
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.http.access_token import VARIABLE
from groundwire.tools.infrastructure import hosts_in, is_infrastructure_text

_MAX_ANSWER, _LAST_LINES = 1 << 20, 20
_SHOWN = 1000
"""Characters of the last line of standard error in the message of a failure."""


class CommandBackend(Backend):
    """Starts ``agent``, a command line, for each question. Raises ``ValueError`` if there is no such program."""

    def __init__(self, *, agent: str) -> None:
        try:
            self._command = shlex.split(agent)
        except ValueError as error:
            raise ValueError(f"agent {agent!r} is no command line: {error}") from error
        if not self._command or shutil.which(self._command[0]) is None:
            raise ValueError(f"agent {agent!r}: there is no program {' '.join(self._command[:1])!r}")

    def describe_call(self, question: Question) -> str:
        """How the program is called."""
        return f"{shlex.join(self._command)}, with the task as JSON on standard input"

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises :class:`adapters.AgentError`, or :class:`adapters.ToolError` by its output."""
        # Not asyncio's own: they need a child watcher, which the policy of uvloop (set by Ray) does not have.
        process = subprocess.Popen(  # noqa: ASYNC220, S603
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(endpoint),
            start_new_session=True,
        )
        task = json.dumps(agent_task(question), ensure_ascii=False, default=str).encode()
        name = f"agent {question.id}"
        ends = in_thread(lambda: process.communicate(task + b"\n"), name=name)  # some programs read a line
        try:
            await asyncio.wrap_future(in_thread(process.wait, name=name))
        finally:  # also what the agent left running, with its output open, and an agent whose rollout was cancelled
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output, errors = await asyncio.wrap_future(ends)
        if process.returncode:
            written = [*output.split(b"\n"), *errors.strip().split(b"\n")]
            last, end = (b"\n".join(written[-count:]).decode("utf-8", "replace") for count in (1, _LAST_LINES))
            broken = is_infrastructure_text(end) or process.returncode == -signal.SIGKILL  # out of memory
            failure = (ToolError if broken else AgentError)(
                f"the agent ended with status {process.returncode}: {last[:_SHOWN]} ({shlex.join(self._command)})"
            )
            failure.resources = hosts_in(end) if broken else ()
            raise failure
        text = output[:_MAX_ANSWER].decode("utf-8", "replace").strip()
        answer, field = judged_answer(text, question.answers, (), {})
        called = f"{shlex.join(self._command)} with {task.decode():.{_SHOWN}} as standard input"
        return Answer(text=answer, judged_field=field if answer != text else "standard output", input=called)


def _environment(endpoint: Endpoint) -> dict[str, str]:
    base = endpoint.base_url.rstrip("/")
    settings: dict[str, Any] = {
        "OPENAI_BASE_URL": base,
        "OPENAI_API_BASE": base,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": base.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": endpoint.api_key,
    }
    return {**{name: value for name, value in os.environ.items() if name != VARIABLE}, **settings}
