"""A full disk, and a store's file that is damaged or emptied."""

from __future__ import annotations

import random
import resource
import shutil
import time
from contextlib import suppress
from pathlib import Path

import external_processes
import httpx

from chaos import servers
from chaos.kills import Pieces, disturbed_run
from chaos.processes import END_S, Process, Processes
from chaos.tally import Tally
from groundwire.tools.errors import UserError
from groundwire.train.store.health import API, check_store

__all__ = ["run"]

_FULL_SHARE = 0.5
_REFUSED = (1, 2)
"""Exit statuses of a command that ends with a message."""


def run(folder: Path, seconds: float, rng: random.Random, tally: Tally) -> None:
    """Half of the time a disk that is full again and again, then an emptied store, then damaged files."""
    started = time.monotonic()
    disturbed_run(folder / "full", _FULL_SHARE * seconds, rng, tally, _fill_disk)
    _empty_store(folder / "emptied", tally)
    number = 0
    while number < 2 or time.monotonic() < started + seconds:
        _open_damaged(folder / "damaged", folder / "full" / "store.db", number, rng, tally)
        number += 1


def _fill_disk(pieces: Pieces, rng: random.Random) -> None:
    """For a moment the files of the store's process cannot grow, as on a full disk."""
    process = pieces.running["store"]
    unlimited = resource.RLIM_INFINITY
    with suppress(ProcessLookupError):
        limit = rng.choice([0, Path(pieces.database).stat().st_size, 1 << 16])
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, unlimited))
        time.sleep(rng.uniform(0, 2))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        pieces.processes.tally.add("full disks")
    time.sleep(rng.uniform(0, 3))


def _empty_store(folder: Path, tally: Tally) -> None:
    """The store is killed, its file is emptied, and it starts again: the trainer ends with one message, or goes on."""
    with Processes(folder, tally) as processes:
        pieces = Pieces(folder, processes)
        deadline = time.monotonic() + END_S
        while not pieces.steps() and time.monotonic() < deadline:
            time.sleep(0.1)
        processes.kill(pieces.running["store"])
        for file in folder.glob("store.db*"):
            file.unlink()
        pieces.start("store")
        steps, trainer = len(pieces.steps()), pieces.running["trainer"]
        deadline = time.monotonic() + END_S
        while trainer.status is None and len(pieces.steps()) < steps + 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        if trainer.status is not None:
            _check_message(trainer, tally)
            processes.kill(trainer)
        elif len(pieces.steps()) < steps + 2:
            tally.fault("hangs", f"the trainer of an emptied store neither ended nor went on within {END_S:g} s")
        tally.add("emptied stores")
        pieces.stop()


def _open_damaged(folder: Path, original: Path, number: int, rng: random.Random, tally: Tally) -> None:
    """A store that cannot read its file ends with one message, or answers each request."""
    with Processes(folder, tally) as processes:
        database, port = folder / f"{number}.db", external_processes.free_port()
        shutil.copy(original, database)
        damage = _damage(database, rng)
        tally.add("damaged files")
        process = processes.fork("store with a damaged file", external_processes.store, str(database), port)
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + END_S
        while process.status is None and time.monotonic() < deadline:
            with suppress(UserError, httpx.TransportError):  # it starts, or ends meanwhile
                check_store(address, timeout_s=1)
                _use(address, damage, tally)
                return
        if process.status is None:
            tally.fault("hangs", f"a store with a damaged file neither ends nor answers: {damage}")
        else:
            _check_message(process, tally)
            processes.kill(process)


def _damage(file: Path, rng: random.Random) -> str:
    """Change the file; returns how."""
    data = bytearray(file.read_bytes())
    how = rng.choice(["cut", "cut to pages", "zeros", "random bytes", "header", "text", "empty"])
    place = rng.randrange(len(data))
    if how == "cut":
        del data[place:]
    elif how == "cut to pages":
        del data[place // 4096 * 4096 :]
    elif how == "zeros":
        data[place : place + 4096] = bytes(len(data[place : place + 4096]))
    elif how == "random bytes":
        for _ in range(200):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif how == "header":
        data[rng.randrange(100)] = rng.randrange(256)
    elif how == "text":
        data = bytearray(b"not a database\n" * 1000)
    else:
        data.clear()
    file.write_bytes(data)
    return f"{how} at byte {place:,} of {file.stat().st_size:,}"


def _use(address: str, damage: str, tally: Tally) -> None:
    """Read and write everything; a failure must have its reason, and no status 500."""
    rollout = {"input": {"id": "t"}, "mode": "train"}
    with httpx.Client(base_url=address + API, headers=servers.JSON, timeout=END_S, trust_env=False) as client:
        ids = []
        requests = [("POST", "/queues/rollouts/enqueue", {"rollouts": [rollout]})]
        requests += [("POST", f"/{name}/search", {"limit": 1000}) for name in ("rollouts", "workers")]
        requests += [("GET", "/resources", None), ("POST", "/queues/rollouts/dequeue", {"limit": 5, "worker_id": "w"})]
        for method, path, body in requests:
            reply = client.request(method, path, json=body)
            if reply.status_code == 500:
                tally.fault("status 500", f"{method} {path} of a store with a damaged file", f"{damage}: {reply.text}")
            if path == "/rollouts/search" and reply.is_success:
                found = reply.json()
                ids = [each["rollout_id"] for each in (found["items"] if isinstance(found, dict) else found)]
        for rollout_id in ids[:50]:
            reply = client.post("/spans/search", json={"rollout_id": rollout_id})
            if reply.status_code == 500:
                tally.fault("status 500", "spans of a store with a damaged file", f"{damage}: {reply.text}")


def _check_message(process: Process, tally: Tally) -> None:
    """It ended with a status of ours and one line."""
    lines = process.stderr.read_text(errors="replace").strip().split("\n")
    if process.status not in _REFUSED or not lines[-1].startswith("error: "):
        tally.fault("crashes", f"{process.name} ended with status {process.status}", lines[-1])
