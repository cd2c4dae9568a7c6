"""The program from which the processes of rollouts are forked: it imports the agent, and runs none of it.

It has one thread and no event loop, so that a child gets no lock that another thread holds.
"""

from __future__ import annotations

import base64
import gc
import importlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from groundwire.adapters.agents.process.child import SIGNALS, run_attempt
from groundwire.adapters.agents.process.environment import set_template_environment
from groundwire.adapters.agents.process.relay import PLACEHOLDER
from groundwire.adapters.agents.process.warm_up import warm_up
from groundwire.tools.errors import UserError
from groundwire.tools.loading import MissingPackageError


class _Template:
    def __init__(self, address: str, spec: dict[str, Any]) -> None:
        self._address, self._folder = address, spec["folder"]
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._children: dict[int, str] = {}
        """The guard of each attempt."""
        gc.disable()
        try:
            from groundwire.adapters.agents.backend import LitAgentBackend, agent_backend

            self._backend = agent_backend(**spec["agent"])
            kind = "LitAgentError" if isinstance(self._backend, LitAgentBackend) else ""
            message = "a LitAgent needs the store of its runner"
        except (UserError, ValueError) as error:
            kind, message = "MissingPackageError" * isinstance(error, MissingPackageError) or "ValueError", str(error)
        if kind:
            self._send({"kind": kind, "error": message})
            sys.exit(0)
        self._settle()
        made = {"agents": self._backend.agents, "calls_tools": self._backend.calls_tools}
        self._send({**made, "prompts": self._backend.default_prompts(""), "hazards": fork_hazards()})

    def run(self) -> None:
        """Fork a child for each attempt, until the runner closes the connection."""
        wakeup, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
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

    def close(self) -> None:
        """Kill all children."""
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        while self._children:
            self._reap(0)

    def _handle(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._start(message)
        elif "describe" in message:
            try:
                question = pickle.loads(base64.b64decode(message["describe"]))  # noqa: S301  of the runner
                self._send({"call": self._backend.describe_call(question)})
            except ValueError as error:
                self._send({"error": str(error)})
        elif "modules" in message:
            self._learn(message["modules"])
        else:
            for pid in [pid for pid, key in self._children.items() if key == message["end"]]:
                os.kill(pid, signal.SIGTERM)

    def _start(self, message: dict[str, Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        # Until the child has a handler: a runner may end an attempt at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if not pid:
            self._socket.close()
            run_attempt(self._backend, message, self._address, self._folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._children[pid] = message["start"]

    def _learn(self, modules: list[str]) -> None:
        """Import what the first rollout imported, so that the next ones need not."""
        for name in modules:
            if name not in sys.modules:
                with suppress(BaseException):
                    importlib.import_module(name)
        warm_up()
        self._settle()

    def _settle(self) -> None:
        gc.collect()
        gc.freeze()

    def _reap(self, options: int = os.WNOHANG) -> None:
        while self._children:
            pid, status = os.waitpid(-1, options)
            if not pid:
                return
            if pid in self._children:
                key = self._children.pop(pid)
                with suppress(OSError):  # at the end the runner may be gone
                    self._send({"ended": key, "status": _status(os.waitstatus_to_exitcode(status))})

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def _status(code: int) -> str:
    """What became of the agent's process, from the exit code of the one that guarded it, as a shell has it."""
    return f"killed by {signal.Signals(code - 128).name}" if code > 128 else f"it ended with status {code}"


def fork_hazards() -> list[str]:
    """What the import has made that does not work in a forked process: threads, connections, child processes."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    found = [f"the thread {thread.name!r} ({_target(thread)})" for thread in others]
    with suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        found += [f"the process {_command(int(pid))}" for pid in children]
    return found


def _target(thread: threading.Thread) -> str:
    target: Any = getattr(thread, "_target", None) or type(thread).run
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return repr(words[:200])
    return str(pid)


def main() -> None:
    """Serve the runner whose socket is the first argument; the settings are read from standard input."""
    spec = json.load(sys.stdin)
    placeholder = socket.socket()  # its port is bound, and nothing listens: a connection outside of an attempt fails
    placeholder.bind(("127.0.0.1", 0))
    port = placeholder.getsockname()[1]
    os.environ[PLACEHOLDER] = str(port)
    set_template_environment(f"http://127.0.0.1:{port}/v1")
    template = _Template(sys.argv[1], spec)
    try:
        template.run()
    finally:
        template.close()


if __name__ == "__main__":
    main()
