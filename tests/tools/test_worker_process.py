"""Worker processes are reused, end at their time limits, are started again, and end with their parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import Program, children, is_running, until, wait_for

from groundwire.tools.worker_process import WorkerEndedError, WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("worker_program", size=2)
    yield pool
    pool.close()


def _ask(pool: WorkerPool, expression: str) -> str:
    answer = pool.ask(expression.encode)
    assert answer is not None
    return answer.decode()


def test_a_process_serves_one_request_after_the_other(pool: WorkerPool) -> None:
    first = _ask(pool, "pid()")
    assert first != str(os.getpid())
    assert _ask(pool, "1 + 1") == "2"
    assert _ask(pool, "pid()") == first


def test_a_request_of_any_size_is_answered(pool: WorkerPool) -> None:
    long = "x" * (1 << 20)
    assert _ask(pool, repr(long)) == repr(long)


@pytest.mark.parametrize("request_", ["run_long(0.1)", "compute_long(0.1)"])
def test_a_process_beyond_its_time_limit_is_ended_and_the_next_request_starts_another(
    pool: WorkerPool, request_: str
) -> None:
    first = _ask(pool, "pid()")
    with pytest.raises(WorkerEndedError) as ended:
        _ask(pool, request_)
    assert (ended.value.timed_out, ended.value.crashed) == (True, False)
    assert _ask(pool, "pid()") != first


def test_a_time_limit_ends_with_its_request(pool: WorkerPool) -> None:
    first = _ask(pool, "pid()")
    _ask(pool, "run_within(0.2)")
    assert _ask(pool, "time.sleep(0.5)") == "None"
    assert _ask(pool, "pid()") == first


def test_a_crash_is_reported_and_the_next_request_starts_another_process(pool: WorkerPool) -> None:
    first = _ask(pool, "pid()")
    with pytest.raises(WorkerEndedError, match=f"ended with status -{int(signal.SIGSEGV)}") as ended:
        _ask(pool, "crash()")
    assert (ended.value.timed_out, ended.value.crashed) == (False, True)
    assert _ask(pool, "pid()") != first


def test_a_process_that_was_killed_between_two_requests_is_replaced(pool: WorkerPool) -> None:
    first = int(_ask(pool, "pid()"))
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert _ask(pool, "1 + 1") == "2"
    assert int(_ask(pool, "pid()")) != first


def test_a_cancelled_request_ends_its_process(pool: WorkerPool) -> None:
    first = int(_ask(pool, "pid()"))
    assert pool.ask(lambda: b"hang()", cancelled=lambda: True) is None
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_request_that_cannot_be_made_ends_no_other(pool: WorkerPool) -> None:
    def fail() -> bytes:
        raise RuntimeError

    for _ in range(3):  # more often than there are processes
        with pytest.raises(RuntimeError):
            pool.ask(fail)
    assert _ask(pool, "1 + 1") == "2"


def test_waiting_for_a_free_process_ends_at_the_deadline_or_when_cancelled(pool: WorkerPool) -> None:
    cancelled = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        busy = [threads.submit(pool.ask, lambda: b"hang()", cancelled=cancelled.is_set) for _ in range(2)]
        try:
            wait_for(lambda: pool._free._value == 0)
            with pytest.raises(TimeoutError):
                pool.ask(lambda: b"1", deadline=time.perf_counter())
            assert pool.ask(lambda: b"1", cancelled=lambda: True) is None
        finally:
            cancelled.set()
    assert [each.result() for each in busy] == [None, None]


def test_at_most_max_idle_processes_are_kept(pool: WorkerPool) -> None:
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda number: _ask(pool, str(number)), range(12))) == [str(i) for i in range(12)]
    assert len(pool._idle) == 1


def test_a_forked_child_starts_its_own_and_leaves_the_parents_process(pool: WorkerPool) -> None:
    first = _ask(pool, "pid()")
    child = os.fork()
    if not child:
        try:
            other = _ask(pool, "pid()") != first
            pool.close()
            os._exit(0 if other else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _ask(pool, "pid()") == first


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_a_busy_process_ends_with_its_killed_parent() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from groundwire.tools.worker_process import WorkerPool\n"
        "WorkerPool('worker_program').ask(lambda: b'hang()')"
    )
    parent = Program("-c", code)
    until(lambda: bool(children(parent.pid)), parent)
    [worker] = children(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(600)
    wait_for(lambda: not is_running(worker))
