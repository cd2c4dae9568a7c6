"""Kills and stops of store, runners and trainer at random moments; what was acknowledged must still be there."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import external_processes

from chaos import workers
from chaos.processes import END_S, Process, Processes
from chaos.tally import Tally
from groundwire.adapters.tracing.scripted_server import END, encode
from groundwire.tools.errors import UserError
from groundwire.train.store.health import check_store

__all__ = ["Pieces", "check_journal", "check_trained", "disturbed_run", "run"]

_RUNNERS = 2
_PAUSE_S = 0.1


def run(folder: Path, seconds: float, rng: random.Random, tally: Tally) -> None:
    """Kills, stops and freezes for ``seconds``."""
    disturbed_run(folder, seconds, rng, tally, _disturb)


def disturbed_run(
    folder: Path, seconds: float, rng: random.Random, tally: Tally, disturb: Callable[[Pieces, random.Random], None]
) -> None:
    """Disturb a run for ``seconds``, then let one step finish in peace, stop all, and compare."""
    with Processes(folder, tally) as processes:
        pieces = Pieces(folder, processes)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(rng.uniform(0, _PAUSE_S))
            pieces.check_running()
            disturb(pieces, rng)
        steps = len(pieces.steps())
        calm = time.monotonic() + END_S
        while len(pieces.steps()) == steps and time.monotonic() < calm:
            time.sleep(0.1)
            pieces.check_running()
        if len(pieces.steps()) == steps:
            ends = "\n".join(f"{name}: {process.output[-150:]}" for name, process in pieces.running.items())
            tally.fault("hangs", f"no step ended within {END_S:g} s after the last disturbance", ends)
        pieces.stop()
        tally.add("steps", len(pieces.steps()))
    check_trained(pieces.steps(), tally)
    with closing(sqlite3.connect(pieces.database)) as conn:
        check_journal(_lines(pieces.journal), conn, tally)


def _disturb(pieces: Pieces, rng: random.Random) -> None:
    """One process is killed, stopped, or frozen for a moment; then it is started again."""
    name = rng.choice(sorted(pieces.running))
    process, processes = pieces.running[name], pieces.processes
    if name != "store" and rng.random() < 0.2:
        _restart_store_during_start(pieces, rng, name)
        return
    how = rng.choice(["kill"] * 12 + ["stop"] * 2 + ["freeze"])
    if how == "freeze":
        process.signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0, 1.5 * workers.UNRESPONSIVE_S))
        process.signal(signal.SIGCONT)
        processes.tally.add("freezes")
        return
    if how == "kill":
        processes.kill(process)
    else:
        processes.stop(process)
    time.sleep(rng.choice([0.0, 0.0, 0.0, rng.uniform(0, 2.0)]))
    pieces.start(name)


def _restart_store_during_start(pieces: Pieces, rng: random.Random, name: str) -> None:
    """Another process starts at a time when the store goes away or is away."""
    processes, store = pieces.processes, pieces.running["store"]
    processes.kill(pieces.running[name])
    is_away = rng.random() < 0.5
    if is_away:
        processes.kill(store)
    pieces.start(name)
    time.sleep(rng.uniform(0, 2.0))
    if not is_away:
        processes.kill(store)
        time.sleep(rng.uniform(0, 2.0))
    pieces.start("store")
    processes.tally.add("restarts of the store during starts")


class Pieces:
    """Store, runners and trainer, started again after each end."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.processes, self._port = processes, external_processes.free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self.database, self.journal = str(folder / "store.db"), str(folder / "journal.jsonl")
        self._trained, self._tasks = str(folder / "trained.jsonl"), str(folder / "singers.sqlite")
        with closing(sqlite3.connect(self._tasks)) as conn, conn:
            conn.execute("CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT)")
            conn.executemany("INSERT INTO singer VALUES (?, ?)", ((n, f"Singer {n}") for n in range(100_000)))
        self.running: dict[str, Process] = {}
        for name in ("store", *(f"runner {n}" for n in range(_RUNNERS)), "trainer"):
            self.start(name)

    def start(self, name: str) -> None:
        """Start the store, a runner or the trainer."""
        fork, address = self.processes.fork, self.address
        if name == "store":
            self.running[name] = fork(name, external_processes.store, self.database, self._port)
            try:
                check_store(address, timeout_s=END_S)
            except UserError as error:
                self.processes.tally.fault("hangs", f"the store does not start: {error}")
        elif name == "trainer":
            arguments = (address, self.journal, self._trained, self._tasks)
            self.running[name] = fork(name, workers.run_trainer, *arguments)
        else:
            self.running[name] = fork(name, workers.run_runner, address, self.journal, 3)

    def check_running(self) -> None:
        """Start again what has ended by itself, which is a fault."""
        for name, process in list(self.running.items()):
            if not self.processes.check_running(process):
                self.start(name)

    def stop(self) -> None:
        """Stop all; the store last, as it would block the others."""
        for name in sorted(self.running, key=["trainer", "runner 0", "runner 1", "store"].index):
            self.processes.stop(self.running[name], count=False)

    def steps(self) -> list[Any]:
        """The steps that the trainers have written."""
        return list(_lines(self._trained))


def _lines(path: str) -> Iterator[Any]:
    if Path(path).exists():
        yield from map(json.loads, Path(path).read_text().splitlines())


def check_trained(steps: list[Any], tally: Tally) -> None:
    """No step, task and rollout is trained twice; each has its own answer, and its one call once."""
    rollouts = [rollout for step in steps for rollout in step["rollouts"]]
    succeeded = [rollout for rollout in rollouts if rollout["status"] == "succeeded"]
    for name, keys in (
        ("step", [step["step"] for step in steps]),
        ("task", [rollout["task"] for rollout in succeeded]),
        ("rollout", [rollout["rollout_id"] for rollout in rollouts]),
    ):
        for key, times in Counter(keys).items():
            if times > 1:
                tally.fault("trained twice", name, f"{key}, {times} times")
    for rollout in succeeded:
        expected = workers.expected_answer(int(rollout["task"][1:]))
        ids = [*encode(expected), END]
        if len(rollout["calls"]) > 1:
            tally.fault("trained twice", "a rollout has more than its one call", str(rollout))
        if rollout["calls"][:1] != [ids] or (rollout["answer"], rollout["reward"]) != (expected, 1.0):
            tally.fault("lost", "a rollout has not its own call, answer and reward", str(rollout))
    tally.add("rollouts trained", len(succeeded))
    for rollout in rollouts:
        if rollout["status"] != "succeeded":
            tally.add(f"rollouts failed: {rollout['status']}")


def check_journal(journal: Iterator[Any], conn: sqlite3.Connection, tally: Tally) -> None:
    """Everything that the store has acknowledged is in its file."""
    rollouts = {row[0] for row in conn.execute("SELECT rollout_id FROM rollouts")}
    spans = set(conn.execute("SELECT rollout_id, attempt_id, span_id FROM spans"))
    attempts = "SELECT rollout_id, value ->> 'attempt_id', value ->> 'status' FROM rollouts, json_each(attempts)"
    statuses = {row[:2]: row[2] for row in conn.execute(attempts)}
    for kind, *key in journal:
        tally.add(f"acknowledged: {kind}")
        if kind == "rollout" and key[0] not in rollouts:
            tally.fault("lost", "rollout", key[0])
        elif kind == "span" and tuple(key) not in spans:
            tally.fault("lost", "span", str(key))
        elif kind == "ended" and statuses.get((key[0], key[1])) != key[2]:
            tally.fault("lost", "status of an attempt", f"{key}: {statuses.get((key[0], key[1]))}")
