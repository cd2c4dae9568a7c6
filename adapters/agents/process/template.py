"""The program from which the processes of rollouts are forked: it imports the agent, and runs none of it.

It has one thread and no event loop, so that a child gets no lock that another thread holds. Where a rollout has a fresh
process, this program runs the agent of one rollout itself.
"""

from __future__ import annotations

import base64
import gc
import importlib
import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from groundwire.adapters.agents.process.child import Attempts, connect, run_agent, run_guarded
from groundwire.adapters.agents.process.environment import set_template_environment
from groundwire.adapters.agents.process.folders import way_to_own_folder
from groundwire.adapters.agents.process.guard import guard
from groundwire.adapters.agents.process.hazards import equal_generators, fork_hazards
from groundwire.adapters.agents.process.namespaces import NEW_NETWORK, enter
from groundwire.adapters.agents.process.warm_up import warm_up
from groundwire.tools.errors import UserError
from groundwire.tools.loading import MissingPackageError, load_object

_SIGNALS = (signal.SIGTERM, getattr(signal, "SIGCHLD", signal.SIGTERM))


class _Template:
    def __init__(self, spec: dict[str, Any], placeholder: int) -> None:
        self._spec = spec
        self._socket = connect(spec["address"], token=spec["token"], channel="control")
        self._children: dict[int, str] = {}
        """The guard of each attempt."""
        folder = spec["folder"]
        if folder == "copy":
            folder = way_to_own_folder(Path(spec["place"], "try"))
        gc.disable()
        try:
            if spec["setup"]:
                load_object(spec["setup"], option="setup")()
            if spec["sealed"] and not _can_be_sealed():
                raise ValueError("sealed needs network namespaces, which this system does not allow: leave it out")
            from groundwire.adapters.agents.backend import LitAgentBackend, agent_backend

            backend = agent_backend(**spec["agent"])
            kind = "LitAgentError" if isinstance(backend, LitAgentBackend) else ""
            message = "a LitAgent needs the store of its runner"
        except (UserError, ValueError) as error:
            kind, message = "MissingPackageError" * isinstance(error, MissingPackageError) or "ValueError", str(error)
        if kind:
            self._send({"kind": kind, "error": message})
            sys.exit(0)
        _settle()
        self._attempts = Attempts(
            backend=backend,
            address=spec["address"],
            token=spec["token"],
            folder=folder,
            placeholder=placeholder,
            sealed=spec["sealed"],
        )
        made = {"agents": backend.agents, "calls_tools": backend.calls_tools, "folder": folder}
        made["hazards"] = fork_hazards(self._children) if spec["fork"] else []
        made["generators"] = equal_generators()
        self._send({**made, "prompts": backend.default_prompts("")})

    def run(self) -> None:
        """Fork a child for each attempt, until the runner closes the connection."""
        wakeup, wake = socket.socketpair()
        wake.setblocking(False)
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        if self._spec["fork"]:
            signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
        received = b""
        while True:
            for key, _ in selector.select():
                if key.fileobj is wakeup:
                    wakeup.recv(4096)
                    continue
                piece = self._socket.recv(1 << 20)
                if not piece:
                    return
                *lines, received = (received + piece).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))
            self._reap()

    def _handle(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._start(message)
        elif "describe" in message:
            try:
                question = pickle.loads(base64.b64decode(message["describe"]))  # noqa: S301  of the runner
                self._send({"call": self._attempts.backend.describe_call(question)})
            except ValueError as error:
                self._send({"error": str(error)})
        elif "modules" in message:
            self._learn(message["modules"], set(message["models"]))
        else:
            for pid in [pid for pid, key in self._children.items() if key == message["end"]]:
                os.kill(pid, signal.SIGTERM)

    def _start(self, message: dict[str, Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if not self._spec["fork"]:
            run_agent(self._attempts, message)
        # Until the child has a handler: a runner may end an attempt at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        template = os.getpid()
        pid = os.fork()
        if not pid:
            self._socket.close()
            run_guarded(self._attempts, message, template)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._children[pid] = message["start"]

    def _learn(self, modules: list[str], models: set[str]) -> None:
        """Import and build what the first rollout imported and built, so that the next ones need not."""
        before = fork_hazards(self._children)
        for name in modules:
            if name not in sys.modules:
                with suppress(BaseException):
                    importlib.import_module(name)
        warm_up(models)
        _settle()
        if hazards := [hazard for hazard in fork_hazards(self._children) if hazard not in before]:
            self._send({"hazards": hazards})

    def _reap(self) -> None:
        for pid in [*self._children]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._send({"ended": self._children.pop(pid), "status": _status(os.waitstatus_to_exitcode(status))})

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def _settle() -> None:
    gc.collect()
    gc.freeze()


def _status(code: int) -> str:
    """What became of the agent's process, from the exit code of the one that guarded it, as a shell has it."""
    number = -code if code < 0 else code - 128
    return f"killed by {signal.Signals(number).name}" if number > 0 else f"it ended with status {code}"


def _can_be_sealed() -> bool:
    child = os.fork()
    if not child:
        os._exit(not enter(NEW_NETWORK))
    return not os.waitpid(child, 0)[1]


def _be_ended_with_the_runner(folder: str) -> None:
    """The runner holds the other end of the standard input open, from which it has sent the settings."""
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if hasattr(os, "fork"):
        guard(lifeline=lifeline, at_end=lambda: shutil.rmtree(folder, ignore_errors=True))
        os.close(lifeline)
    else:
        threading.Thread(target=_exit_at, args=(lifeline,), daemon=True).start()


def _exit_at(lifeline: int) -> NoReturn:
    os.read(lifeline, 1)
    os._exit(1)


def main() -> None:
    """Serve the runner; the settings are the first line of the standard input."""
    spec = json.loads(sys.stdin.readline())
    _be_ended_with_the_runner(spec["place"])
    os.environ.pop("PYTHONPATH", None)  # the agent's own programs may have another interpreter
    os.environ.update(spec["environment"])
    port = 0
    if spec["agent"].get("train_model") is None:  # else calls of other models go to their own providers
        placeholder = socket.socket()  # bound, and nothing listens: a connection outside of an attempt fails
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
    set_template_environment(f"http://127.0.0.1:{port}/v1" if port else None)
    code = 1
    try:
        _Template(spec, port).run()
        code = 0
    except (ConnectionError, SystemExit):  # the runner has gone, or was told why no agent was made
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # threads that the import of the agent has started are not waited for


if __name__ == "__main__":
    main()
