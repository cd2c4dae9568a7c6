"""What this process may take of its machine: memory, open files, processes, by the system, its container and its shell.

A container is limited by control groups, of which each limits those below it (https://docs.kernel.org/admin-guide/
cgroup-v2.html, and cgroup-v1). A shell is limited by ``ulimit``. What is not known is ``math.inf``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from groundwire.tools.infrastructure import causes, short_of

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PROCESS_LIMITS = "ulimit -u or -v, or pids.max of the container"
_PROC = Path("/proc")
_LEAST_ADDRESSES = 2.7e9
_LEAST_THREADS = 16  # besides torch's, one for each processor
_MANY_PROCESSES = 10_000  # of a user; a higher limit is never the first that is reached
_RESERVED_FILES = 48  # open files for all that is no rollout: queries, the store, files of the run, imports
_FILES_OF_SERVER = 16  # open files for what requests need: imports, processes, databases
_FILES_OF_ROLLOUT = 4  # open files of a rollout: its process's connections, and that of its LLM call or a database


def free_memory() -> float:
    """Bytes that this process and those that it starts can still take."""
    text = _read(_PROC / "meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free = [float(int(match[1]) << 10)] if match else []
    for folder in _groups("memory"):
        used = _number(0, folder / "memory.current", folder / "memory.usage_in_bytes")
        cache = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
        free.append(_memory_limit(folder) - used + (int(cache[1]) if cache else 0))  # the kernel frees the cache first
    return max(0.0, min(free, default=math.inf))


def total_memory() -> float:
    """Bytes of memory that all processes of this machine or container have together."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([float(physical), *map(_memory_limit, _groups("memory"))])


def free_processes() -> float:
    """How many more processes and threads this process and those that it starts can have."""
    free = [_number(math.inf, folder / "pids.max") - _number(0, folder / "pids.current") for folder in _groups("pids")]
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0] if resource is not None and os.geteuid() else -1
    if 0 <= limit < _MANY_PROCESSES:
        free.append(limit - _threads_of(os.getuid()))
    return max(0.0, min(free, default=math.inf))


def address_space() -> float:
    """Bytes of addresses that a process may have (``ulimit -v``)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] if resource is not None else -1
    return limit if limit >= 0 else math.inf


def too_small() -> str:
    """Why this process cannot train or sample, whatever the model; empty if it may have what that takes."""
    allowed, more = address_space(), free_processes()
    if allowed < _LEAST_ADDRESSES:
        return (
            f"a process may have {allowed / 1e6:,.0f} MB of addresses (ulimit -v), and torch and the other libraries "
            f"alone need {_LEAST_ADDRESSES / 1e6:,.0f} MB: ulimit -v unlimited"
        )
    if more < (needed := _LEAST_THREADS + processors()):
        return f"{more:.0f} more processes and threads may be started ({PROCESS_LIMITS}), and {needed} are needed"
    return ""


def processors() -> int:
    """How many processors this process may use; a container's share of their time counts as so many whole ones."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([there, *map(_processor_limit, _groups("cpu"))])))


def rollouts_at_once(wanted: int) -> tuple[int, str]:
    """For how many rollouts this process may open files, at most ``wanted``, and a message if it is fewer.

    A shell's own limit (``ulimit -n``) is raised as far as the system allows and the rollouts need.
    """
    if resource is None:
        return wanted, ""
    opened = len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = opened + _RESERVED_FILES + _FILES_OF_ROLLOUT * wanted
    if 0 <= soft < needed:
        soft = needed if hard < 0 else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = max(1, (soft - opened - _RESERVED_FILES) // _FILES_OF_ROLLOUT)
    if soft < 0 or possible >= wanted:
        return wanted, ""
    return possible, (
        f"{possible} rollouts run at once, not {wanted}: this process may have {soft} open files (ulimit -n), and "
        f"{wanted} rollouts need {needed}"
    )


def has_few_files() -> bool:
    """Whether the files that this process may still open are needed for its own work, and for no further connection."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else -1
    return 0 <= limit <= len(os.listdir("/dev/fd")) + min(_FILES_OF_SERVER, limit // 4)


def shortage(error: BaseException) -> str:
    """Which resource of the machine was used up, if that is what ``error`` says, and what to do; else empty."""
    short = next(filter(None, map(short_of, causes(error))), "")
    if not short:
        return ""
    sentence = f"no more processes and threads may be started ({PROCESS_LIMITS})"
    if short == "memory":
        known = f" ({address_space() / 1e6:,.0f} MB of addresses, ulimit -v)" if address_space() < math.inf else ""
        sentence = f"the memory that this process may take is used up{known}"
    elif short == "files":
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else "too many"
        sentence = f"{limit} files are open, as many as may be (ulimit -n)"
    return f"{sentence}: allow more, or run fewer rollouts at once"


def _memory_limit(folder: Path) -> float:
    return min(_number(math.inf, folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes"))


def _processor_limit(folder: Path) -> float:
    """Of one control group: its time in each period, in processors."""
    quota, period = (_read(folder / "cpu.max").split() or ["max", ""])[:2]
    if quota == "max":  # or version 1, where -1 is no limit
        quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() or "-1" for name in ("quota", "period"))
    return int(quota) / int(period) if int(quota) > 0 else math.inf


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, of version 1 or 2."""
    mounts = [line.split() for line in _read(_PROC / "self" / "mountinfo").splitlines()]
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        for mount in mounts:
            kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
            if kind != ("cgroup2" if number == "0" else "cgroup") or (number != "0" and controller not in options):
                continue
            root, top = PurePosixPath(mount[3]), Path(mount[4])
            inside = PurePosixPath(path).relative_to(root) if PurePosixPath(path).is_relative_to(root) else "."
            folder = top / inside  # a container may see its own group as the top
            yield folder
            yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def _threads_of(user: int) -> int:
    count = 0
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            count += len(os.listdir(folder / "task")) if folder.stat().st_uid == user else 0
    return count


def _number(default: float, *files: Path) -> float:
    """The number in the first of these files that exists; infinity for ``max``."""
    text = next(filter(None, map(_read, files)), "").strip()
    return math.inf if text == "max" else float(text or default)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
