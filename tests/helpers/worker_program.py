"""A worker for the tests of worker processes: a request is an expression, its answer the value's ``repr``."""

import os
import signal
import time

from groundwire.tools.worker_process import answer_requests, time_limit

__all__ = ["serve"]


def serve(descriptor: int, parent: int) -> None:
    answer_requests(lambda request: repr(eval(request)).encode(), descriptor, parent)


def pid() -> int:
    return os.getpid()


def run_long(seconds: float) -> None:
    """Hang, as a C function would, with a limit on the elapsed time."""
    with time_limit(signal.ITIMER_REAL, seconds):
        time.sleep(600)


def compute_long(seconds: float) -> None:
    """Compute, with a limit on the CPU time."""
    with time_limit(signal.ITIMER_PROF, seconds):
        while True:
            pass


def run_within(seconds: float) -> None:
    with time_limit(signal.ITIMER_REAL, seconds):
        pass


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(600)
