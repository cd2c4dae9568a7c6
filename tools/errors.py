"""All errors of the project, and how a command ends with one that its user can fix.

An exception stands after those that it derives from, below them or behind a line.

    UserError: the input or the machine is wrong; the command ends with this one line, and says what to do
    ├── tools      CommandError, PluginError, TokenError, UnknownNameError ── UnusableRewardError
    ├── domains    DataError
    ├── rewards    JudgeSettingsError
    ├── adapters   UnknownPromptError, CallsNotStoredError
    │              SinkRefusedError ── StoreFailedError
    └── train      ConfigError ── ModelUnreadableError, TeacherError ── NoLogprobsError
                   RunDirError ── RunDamagedError
                   TrainingError, ReflectionError, TraceError, UnsupportedModelError, NonFiniteGradientError
                   RolloutsFailedError, RunnersEndedError, EventLoopError
                   StoreAddressError, StoreFileError, MongoStoreError, StoreGoneError, StoreLostDataError

    BackendError: a rollout failed; a run counts it and continues
    ├── AgentError: by its agent's code ── MalformedOutputError, TurnLimitError
    ├── EndpointError: the model was unreachable, or refused the request ── PromptTooLongError
    └── AgentSetupError, ToolError, TimeLimitError, EmittedRewardError, TraceLimitError
    RewardError: an answer could not be judged ── JudgeAbstainedError
    RequestRefusedError, UnreadableAnswerError: a rollout that was not run, an answer that its reward cannot read

    QueryError: what an agent reads in place of its query's rows
    ├── SqlError: the SQL is wrong; the agent can repair it
    ├── NotAllowedError: it does more than read; the agent can write another
    ├── QueryTimeoutError: stopped by its deadline or its caller; the agent can write a cheaper one
    ├── BusyError, UnknownDatabaseError: of the MCP server
    └── DatabaseError: the file is missing, damaged or locked; a BrokenResourceError, which is no agent's fault

    RefusedError: what an HTTP server answers in place of a reply
    ├── EngineError ── EngineClosedError
    └── ContextLengthError, ChatRequestError

    ProviderRefusedError: a call of an agent that would have left for a provider of models

    Caught by the code that calls: AttemptEndedError, BadRequestError, BindingError, EarlyCallError, GivenTwiceError,
    JudgeRequestError, LitAgentError, MissingPackageError, NeedsProcessError, NoVariantsError, NumberRangeError,
    StoppedError, TemplateLimitError, TemplateRefusedError, UnreadableError, WorkerEndedError. A ShortenedWarning or a
    SkippedWarning says what an agent is not shown.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NoReturn

from groundwire.tools.files import remove_temporary_folders
from groundwire.tools.interrupts import INTERRUPTED, allow_interrupts
from groundwire.tools.machine import shortage, too_small
from groundwire.tools.secrets import format_unhandled_messages, mask_secrets, say, say_traceback
from groundwire.tools.text import visible

_MODULES = {
    "agentlightning": "agentlightning",
    "judge": "litellm",
    "langgraph": "langchain_core langchain_openai langgraph",
    "mcp": "fastmcp httpx2 mcp_types",
    "openai-agents": "agents",
    "train": "google jinja2 llguidance matplotlib numpy openai pandas pyarrow safetensors tokenizers torch "
    "transformers",
}
_EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules.split()}
"""The extra of each module that is imported where it is needed."""


def missing_layer(error: ModuleNotFoundError, *, extra: str | None = None) -> str:
    """A message: which extra installs the missing module (``extra``, else its own); empty if it is none of ours."""
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRAS:
        return ""
    needed = "protobuf" if module == "google" else module
    return f"this needs {needed}, which is not installed: pip install 'groundwire[{extra or _EXTRAS[module]}]'"


def check_layer(module: str) -> None:
    """Raise ``ModuleNotFoundError`` if the layer of ``module`` is missing, so that no other error is reported first.

    Raises :class:`CommandError` if ``torch`` would not run in this process.
    """
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    if module == "torch" and (reason := too_small()):
        raise CommandError(reason)


_USER_ERRNOS = (
    errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, None,
)  # fmt: skip


class UserError(Exception):
    """An error that a command prints as one line: what was wrong, with which value, and what to do."""

    exit_code = 2
    """Exit code of the command. 2: the input is wrong; 1: something failed."""
    exits_at_once = False
    """True if blocked threads would keep the process from exiting normally."""
    is_said = False
    """Whether it has been printed, by another process."""

    def __str__(self) -> str:
        return visible(super().__str__())  # it quotes files, SQL and names of others

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback."""
        return [mask_secrets(f"error: {self}")]


class BrokenResourceError(Exception):
    """What a tool works on cannot be used (a database, an index): a failure of the infrastructure, of no agent."""


class ShortenedWarning(UserWarning):
    """What an agent is shown leaves something out."""


class SkippedWarning(UserWarning):
    """A part of a database cannot be read, so nobody is shown it."""


class CommandError(UserError):
    """A command cannot continue."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def named_layer(extra: str | None = None) -> Iterator[None]:
    """Raise :class:`CommandError` with the command that installs the layer of a module that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (message := missing_layer(error, extra=extra)):
            raise
        raise CommandError(message) from error


@contextmanager
def exit_on_user_error(debug: bool = False, exit_code: int | None = None, *, imports: bool = False) -> Iterator[None]:
    """Exit after an error that the user can fix, Ctrl-C and SIGTERM included; the machine's with ``debug`` as they are.

    ``exit_code`` replaces the errors' own. A block that only ``imports`` has nothing to clean up after Ctrl-C.
    """
    if not imports:
        allow_interrupts()
    handles = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if handles:
        signal.signal(signal.SIGTERM, _interrupt)
    format_unhandled_messages()
    sys.excepthook = say_traceback
    try:
        with named_layer():
            _check_working_folder()
            yield
        if handles and signal.getsignal(signal.SIGTERM) is _interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return
    except UserError as caught:
        error = caught
    except KeyboardInterrupt as caught:  # is no error
        say(str(caught) or "stopped", err=True)
        exit_now(INTERRUPTED)
    except Exception as caught:
        if debug or not (reason := machine_error(caught)):
            raise
        error = CommandError(reason, 1)
    if not error.is_said:
        say(f"error: {error}", err=True)
    code = error.exit_code if exit_code is None else exit_code
    if error.exits_at_once:
        exit_now(code)
    sys.exit(code)


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise CommandError("the working folder has been removed: change to another one") from error


def machine_error(error: Exception) -> str:
    """What the machine lacks, or which file cannot be used, if that is what ``error`` says; else empty."""
    if (reason := shortage(error)) or not isinstance(error, OSError):
        return reason
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left on the disk{f' of {error.filename}' if error.filename else ''}: free some"
    if error.filename is None and error.errno not in _USER_ERRNOS:
        return ""
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def exit_now(code: int) -> NoReturn:
    """End the process. A normal exit waits for some threads, and stops others in native code, which may abort (Ray)."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    remove_temporary_folders()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _interrupt(_signal: int, frame: Any) -> None:
    """Do what Ctrl-C does, which ``asyncio.run`` handles itself: it cancels its task and waits for the end of it."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # SIGINT is ignored in the background of a shell
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
