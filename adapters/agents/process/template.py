"""The program from which the processes of rollouts are forked: it imports the agent, and runs none of it.

It has one thread and no event loop, so that a child gets no lock that another thread holds. A child is the parent of
all that it starts, and when it ends this program is: what an attempt leaves is ended here. Where a rollout has a fresh
process, this program runs the agent of one rollout itself.
"""

from __future__ import annotations

import base64
import ctypes
import gc
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
from typing import Any

from groundwire.adapters.agents.app_environment import (
    DEFAULTS,
    missed_variables,
    note_missed,
    provider_urls,
    without_proxy,
)
from groundwire.adapters.agents.process.child import connect, no_input, run_agent
from groundwire.adapters.agents.process.first_use import equal_generators, fork_hazards, share_ssl_contexts, warm_up
from groundwire.adapters.agents.process.folders import NEW_NETWORK, enter, succeeds, way_to_own_folder
from groundwire.adapters.agents.process.guard import adopt_orphans, children, guard, kill, kill_group
from groundwire.adapters.agents.process.network import swap_port
from groundwire.adapters.agents.process.program import LitAgentError
from groundwire.tools.errors import UserError
from groundwire.tools.loading import load_object

_COLLAPSE = 25  # the advice of madvise to make huge pages of a range


class _Template:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._socket = connect(spec["port"], token=spec["token"], channel="control")
        self._children: dict[int, str] = {}  # the attempt of each process
        self._killed: set[int] = set()  # processes that attempts have left, and that have not ended yet
        self._endings: list[tuple[str, str, set[int]]] = []
        """Attempts that have ended, how, and those of the killed processes that may be theirs."""
        self._learns = spec["fork"]
        if spec["folder"] == "copy":
            spec["folder"] = way_to_own_folder(Path(spec["place"], "try"))
        gc.disable()
        try:
            if spec["setup"]:
                load_object(spec["setup"], option="setup")()
            if spec["sealed"] and not succeeds(lambda: enter(NEW_NETWORK)):
                raise ValueError("sealed needs network namespaces, which this system does not allow: leave it out")
            from groundwire.adapters.agents.agent_names import follow_agent_names
            from groundwire.adapters.agents.backend import LitAgentBackend, agent_backend

            note_missed(spec["hidden"])
            share_ssl_contexts()
            swap_port(spec["placeholder"])
            backend = agent_backend(**spec["agent"])
            if isinstance(backend, LitAgentBackend):
                raise LitAgentError("a LitAgent needs the store of its runner")
            follow_agent_names()
        except (UserError, ValueError) as error:
            self._send({"kind": type(error).__name__, "error": str(error), "missed": missed_variables()})
            sys.exit(0)
        _settle()
        self._backend = backend
        self._own = children()  # processes that the import has started, which no attempt ends
        made = {"agents": backend.agents, "calls_tools": backend.calls_tools, "prompts": backend.default_prompts("")}
        shared = {"hazards": fork_hazards(self._own), "generators": equal_generators()} if spec["fork"] else {}
        self._send({**made, **shared, "folder": spec["folder"], "missed": missed_variables()})

    def run(self) -> None:
        """Fork a child for each attempt, until the runner closes the connection."""
        wakeup, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        if self._spec["fork"]:
            adopt_orphans()
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an attempt that ends its parent
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
                self._send({"call": self._backend.describe_call(question)})
            except ValueError as error:
                self._send({"error": str(error)})
        elif "modules" in message:
            self._learn(message)
        else:
            for pid in [pid for pid, key in self._children.items() if key == message["end"]]:
                kill(pid)

    def _start(self, message: dict[str, Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if not self._spec["fork"]:
            run_agent(self._backend, self._spec, message)
        template = os.getpid()
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self._wake.close()
            self._socket.close()
            run_agent(self._backend, self._spec, message, learns=self._learns, template=template)
        self._children[pid] = message["start"]

    def _learn(self, used: dict[str, Any]) -> None:
        """Import and build what the first rollout imported and built, so that the next ones need not."""
        self._learns = False
        before, known = children(), fork_hazards(self._own)
        warm_up(used)
        _settle()
        # Others are what attempts have left that ended meanwhile: each attempt has a session of its own.
        self._own |= {pid for pid in children() - before if os.getsid(pid) == os.getsid(0)}
        if hazards := [hazard for hazard in fork_hazards(self._own) if hazard not in known]:
            self._send({"hazards": hazards})

    def _reap(self) -> None:
        """End what attempts that have ended left, and tell of those of which nothing is left any more."""
        for pid in [*self._children]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                kill_group(pid)
                self._endings.append((self._children.pop(pid), _status(os.waitstatus_to_exitcode(status)), set()))
        left = children() - self._own - self._children.keys()
        gone = {pid for pid in left & self._killed if os.waitpid(pid, os.WNOHANG)[0]}
        for pid in left - self._killed:
            kill(pid)  # and then its children are new ones of this process
        for *_, awaited in self._endings:
            awaited.update(left - self._killed)
        self._killed = left - gone
        for key, how, awaited in self._endings:
            if not awaited & self._killed:
                self._send({"ended": key, "status": how})
        self._endings = [ending for ending in self._endings if ending[2] & self._killed]

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def _settle() -> None:
    """Leave the memory as it is to the children. What a collection changes would be copied; huge pages halve a fork."""
    gc.collect()
    gc.freeze()
    with suppress(OSError):  # Linux only
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            span, access, _, _, file, *name = line.split()
            if access == "rw-p" and file == "0" and name in ([], ["[heap]"]):
                start, end = (int(address, 16) for address in span.split("-"))
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _COLLAPSE)


def _status(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"


def _be_ended_with_the_runner(folder: str) -> None:
    """The runner holds the other end of the standard input open, from which it has sent the settings."""
    lifeline = os.dup(0)
    no_input()
    if hasattr(os, "fork"):
        guard(lifeline=lifeline, at_end=lambda: shutil.rmtree(folder, ignore_errors=True))
        os.close(lifeline)
    else:
        threading.Thread(target=lambda: os._exit(len(os.read(lifeline, 1))), daemon=True).start()


def main() -> None:
    """Serve the runner; the settings are the first line of the standard input."""
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # the runner was ended before it had sent them
        return
    spec = json.loads(line)
    _be_ended_with_the_runner(spec["place"])
    os.environ.pop("PYTHONPATH", None)  # the agent's own programs may have another interpreter
    os.environ.update({"PYTHONPATH": spec["python_path"]} if spec["python_path"] is not None else {})
    spec["placeholder"] = 0
    if spec["agent"].get("train_model") is None:  # else calls of other models go to their own providers
        placeholder = socket.socket()  # bound, and nothing listens: a connection outside of an attempt fails
        placeholder.bind(("127.0.0.1", 0))
        spec["placeholder"] = placeholder.getsockname()[1]
        os.environ.update(provider_urls(f"http://127.0.0.1:{spec['placeholder']}/v1"))
    os.environ.setdefault("HF_TOKEN", DEFAULTS["HF_TOKEN"])
    os.environ.pop("AWS_BEARER_TOKEN_BEDROCK", None)  # it requires HTTPS
    os.environ.update(without_proxy("127.0.0.1", os.environ))
    code = 1
    try:
        _Template(spec).run()
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
