"""``make chaos`` notices each kind of fault: a check that cannot fail would prove nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import external_processes
import pytest
from aiohttp import web
from chaos import databases, kills, processes, requests, runners, tally, traces
from chaos.mutations import Request, _json, gzip_bomb, mutate
from chaos.processes import Processes
from chaos.tally import Tally
from programs import wait_for
from spider_folder import make_database

from groundwire.adapters.tracing.scripted_server import END, encode
from groundwire.adapters.tracing.spans import SpanRecord, TraceLimit
from groundwire.tools import schema
from groundwire.train.store.health import HEALTH, check_store
from groundwire.train.store.rollout import Outcome, Rollout


def _faults(found: Tally) -> dict[str, int]:
    return {name: found.counts[name] for name in tally.FAULTS if found.counts[name]}


@pytest.fixture
def store_file() -> Iterator[sqlite3.Connection]:
    conn = sqlite3.connect(":memory:")
    conn.executescript(
        "CREATE TABLE spans (rollout_id, attempt_id, span_id); INSERT INTO spans VALUES ('r', 'a', 's');"
        "CREATE TABLE rollouts (rollout_id, attempts);"
        """INSERT INTO rollouts VALUES ('r', '[{"attempt_id": "a", "status": "succeeded"}]');"""
    )
    yield conn
    conn.close()


@pytest.mark.parametrize(
    ("entry", "lost"),
    [
        (["rollout", "r"], 0),
        (["rollout", "another"], 1),
        (["span", "r", "a", "s"], 0),
        (["span", "r", "a", "another"], 1),
        (["ended", "r", "a", "succeeded"], 0),
        (["ended", "r", "a", "failed"], 1),
        (["ended", "r", "another", "succeeded"], 1),
    ],
)
def test_what_was_acknowledged_and_is_not_in_the_file_is_lost(
    store_file: sqlite3.Connection, entry: list[str], lost: int
) -> None:
    found = Tally()
    kills.check_journal(iter([entry]), store_file, found)
    assert found.counts["lost"] == lost
    assert found.counts[f"acknowledged: {entry[0]}"] == 1


def _step(number: int, **changes: Any) -> dict[str, Any]:
    expected = f"SELECT name FROM singer WHERE id = {number}"
    rollout: dict[str, Any] = {"task": f"t{number}", "rollout_id": f"ro-{number}", "status": "succeeded", "reward": 1.0}
    return {
        "step": number,
        "rollouts": [{**rollout, "answer": expected, "calls": [[*encode(expected), END]], **changes}],
    }


@pytest.mark.parametrize(
    ("steps", "faults"),
    [
        ([_step(1), _step(2)], {}),
        ([_step(1), _step(2, status="timeout", reward=None, answer="", calls=[])], {}),
        ([_step(1), {**_step(2), "step": 1}], {"trained twice": 1}),
        ([_step(1), _step(2, rollout_id="ro-1")], {"trained twice": 1}),
        ([_step(1), _step(2, task="t1")], {"trained twice": 1, "lost": 1}),
        ([_step(1, calls=_step(1)["rollouts"][0]["calls"] * 2)], {"trained twice": 1}),
        ([_step(1, calls=[])], {"lost": 1}),
        ([_step(1, reward=0.0)], {"lost": 1}),
        ([_step(1, answer="another")], {"lost": 1}),
    ],
)
def test_what_is_trained_twice_or_wrongly_is_noticed(steps: list[Any], faults: dict[str, int]) -> None:
    found = Tally()
    kills.check_trained(steps, found)
    assert _faults(found) == faults


_CODE = {
    "tracebacks": "import time, traceback\ntry: 1/0\nexcept ZeroDivisionError: traceback.print_exc()\n",
    "hangs": "import signal, time; signal.signal(15, signal.SIG_IGN)\n",
    "too much memory": "import time; x = b'x' * 80_000_000\n",
    "crashes": "import time, sys; time.sleep(1); print('no more', file=sys.stderr); sys.exit(1)\n",
    "": "import time\n",
}


@pytest.mark.parametrize("fault", _CODE)
def test_the_fault_of_a_process_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "hangs":
        monkeypatch.setattr(processes, "END_S", 0.5)
    monkeypatch.setattr(tally, "MAX_MEMORY_MB", 60)
    found = Tally()
    ready = tmp_path / "ready"
    with Processes(tmp_path / "files", found) as all_processes:
        code = f"{_CODE[fault]}open({str(ready)!r}, 'w'); time.sleep({external_processes.DEADLINE_S})"
        process = all_processes.python("a server", "-c", code)
        deadline = time.monotonic() + external_processes.DEADLINE_S
        while not ready.exists() and process.status is None and time.monotonic() < deadline:
            time.sleep(0.05)
    assert _faults(found) == ({fault: 1} if fault else {})
    assert found.memory_mb["a server"] > 1


def test_a_process_that_outlives_its_trainer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_END_S", 0.2)
    found = Tally()
    with Processes(tmp_path, found) as all_processes:
        lasting = all_processes.python("one", "-c", "import time; time.sleep(60)")
        runners.check_ended([lasting.pid], found)
        assert _faults(found) == {"hangs": 1}
        all_processes.kill(lasting)
        runners.check_ended([lasting.pid], found)
    assert _faults(found) == {"hangs": 1}


def test_a_loss_of_a_runner_that_is_not_said_or_made_up_for_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SAID_S", "_ALL_S"):
        monkeypatch.setattr(runners, name, 0.2)
    found = Tally()
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'train.runner'])\n"
        "time.sleep(60)"
    )
    with Processes(tmp_path, found) as all_processes:
        trainer = all_processes.python("trainer", "-c", code)
        wait_for(lambda: runners.descendants(trainer.pid))
        [child] = runners.descendants(trainer.pid)
        wait_for(lambda: b"train.runner" in Path(f"/proc/{child}/cmdline").read_bytes())
        runners.disturb(trainer, random.Random(0), found)
        runners.wait_for_all(trainer, found)
    assert _faults(found) == {"lost": 2}


@pytest.mark.parametrize(
    ("kept", "failure", "faults"),
    [
        (slice(0, 5), "", {}),
        (slice(0, 4), "", {"lost": 1}),
        (slice(None, None, -1), "", {"lost": 1}),
        (slice(0, 3), "trace_limit", {}),
        (slice(0, 5), "trace_limit", {"lost": 1}),
        (slice(1, 3), "trace_limit", {"lost": 1}),
    ],
)
def test_a_span_of_a_long_trace_that_is_lost_is_noticed(kept: slice, failure: str, faults: dict[str, int]) -> None:
    ids: Any = {"rollout_id": "r", "attempt_id": "a", "attributes": {}, "start_time": 1.0, "end_time": 1.0}
    spans = [SpanRecord(name=f"n{number}", sequence_id=number, **ids) for number in range(5)]
    read = Rollout(task={}, status="succeeded", outcome=Outcome(reward=1.0, failure=failure), annotations=spans[kept])
    found = Tally()
    traces.check_spans(spans, read, TraceLimit(spans=3 if failure else 9), found)
    assert _faults(found) == faults


def test_a_trainer_that_ends_at_the_second_signal_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_S", 5.0)
    code = (
        "import signal, sys, time\nsaid = []\n"
        "def stop(*_):\n    if said: sys.exit()\n"
        "    said.append(print('stopping after the update of step 1; once more: at once', flush=True))\n"
        "signal.signal(15, stop)\nprint('ready', flush=True)\nwhile True: time.sleep(1)"
    )
    found = Tally()
    with Processes(tmp_path, found) as all_processes:
        trainer = all_processes.python("trainer", "-c", code)
        wait_for(lambda: "ready" in trainer.output)
        all_processes.stop(trainer)
    assert _faults(found) == {}


def test_a_kill_and_a_stop_are_counted_and_are_no_faults(tmp_path: Path) -> None:
    found = Tally()
    with Processes(tmp_path, found) as all_processes:
        all_processes.kill(all_processes.python("one", "-c", "import time; time.sleep(60)"))
        all_processes.stop(all_processes.python("another", "-c", "import time; time.sleep(60)"))
    assert (found.counts["kills"], found.counts["stops"], _faults(found)) == (1, 1, {})


def forgetful_store(path: str, port: int) -> None:
    """The store, which acknowledges every 50th span without storing it."""
    from groundwire.train.store.sqlite import SqliteStore

    numbers = itertools.count(1)
    store_rows = SqliteStore.add_span_rows

    def forget(self: SqliteStore, rollout_id: str, attempt_id: str, spans: Any) -> list[str]:
        store_rows(self, rollout_id, attempt_id, [span for span in spans if next(numbers) % 50])
        return [span["span_id"] for span in spans]

    SqliteStore.add_span_rows = forget  # type: ignore[method-assign]
    external_processes.store(path, port)


@pytest.mark.parametrize("store", [external_processes.store, forgetful_store])
def test_a_store_that_forgets_spans_is_noticed_from_end_to_end(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_processes, "store", store)
    found = Tally()

    def wait(pieces: kills.Pieces, _: random.Random) -> None:
        deadline = time.monotonic() + external_processes.DEADLINE_S
        while len(pieces.steps()) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)

    kills.disturbed_run(tmp_path, 0.1, random.Random(1), found, wait)
    assert found.counts["acknowledged: span"] > 50
    lost = {what for (name, what) in found.faults if name == "lost"}
    assert ("span" in lost) == (store is forgetful_store)


class _Running:
    status = None


@pytest.mark.parametrize(
    ("answer", "fault"), [("well", None), ("error", "status 500"), ("never", "hangs"), ("refuses", "hangs")]
)
async def test_the_fault_of_a_server_is_noticed(
    answer: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer == "never":
        monkeypatch.setattr(requests, "END_S", 0.5)
    monkeypatch.setattr(requests, "_SLOW_CLIENTS", 2)

    async def handle(request: web.Request) -> web.Response:
        if answer == "never":
            await asyncio.sleep(3)
        return web.Response(status={"error": 500, "refuses": 401}.get(answer, 200))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        probe = Request("GET", b"/", {"Host": "localhost"})
        process: Any = _Running()
        server = requests.Server("a server", process, runner.addresses[0][1], probe, [probe])
        found = Tally()
        await requests.fuzz(server, 0.5, random.Random(1), found)
    finally:
        await runner.cleanup()
    assert found.counts["requests: a server"] > 0
    assert (fault in _faults(found)) if fault else not _faults(found)


def test_a_seed_repeats_the_requests() -> None:
    request = Request("POST", b"/a/b", {"Host": "localhost"}, {"a": [1, {"b": "text"}], "c": None})
    first, second, other = (
        [mutate(request, rng).encode() for _ in range(200)] for rng in map(random.Random, (1, 1, 2))
    )
    assert first == second != other
    assert len(set(first)) > 150


def test_no_request_is_larger_than_the_memory() -> None:
    rng = random.Random(1)
    for _ in range(50):
        request = Request("POST", b"/a", {"Host": "localhost"}, [[["a", "b"], ["c"]], ["d"]])
        for _ in range(6):
            request = _json(request, rng)
            assert len(request.encode()) < 100_000_000


def test_the_bomb_is_valid_gzip() -> None:
    import zlib

    text = zlib.decompressobj(wbits=31).decompress(gzip_bomb(megabytes=2, start=b"["), 3_000_000)
    assert text == b"[" + b" " * 2_000_000


def test_a_store_that_restarts_while_it_is_checked_is_waited_for() -> None:
    def serve(listener: socket.socket) -> None:
        import struct

        for number in range(3):
            connection, _ = listener.accept()
            connection.recv(10_000)
            if number == 0:  # killed after it had taken the request
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                body = [b"[]", str(HEALTH).replace("'", '"').replace("True", "true").encode()][number == 1]
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                )
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert check_store(address, timeout_s=external_processes.DEADLINE_S)["status"] == "ok"


def test_a_reader_that_changes_a_database_or_fails_in_another_way_is_a_fault(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_database(tmp_path / "x.sqlite", "CREATE TABLE t0 (a); CREATE TABLE t1 (a)")
    databases._read(str(tmp_path / "x.sqlite"), tmp_path)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(schema, "table_info", lambda path, **_: Path(path).write_bytes(b"x").missing)
    databases._read(str(tmp_path / "x.sqlite"), tmp_path)
    errors = capfd.readouterr().err
    assert "AttributeError: 'int' object has no attribute 'missing'" in errors
    assert "AssertionError: {'x.sqlite': " in errors
