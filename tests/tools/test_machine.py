"""What a process may take is the least that any of its limits allows, and a lack of it is one sentence."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import ROOT, Program, run, until

from groundwire.tools import machine

GIB = 1 << 30
MEMINFO = "MemTotal:  16777216 kB\nMemFree:  100 kB\nMemAvailable:  8388608 kB\n"
V2 = "41 31 0:38 {root} {top} rw,relatime - cgroup2 cgroup2 rw"
V1 = "35 31 0:32 {root} {top}/{name} rw,relatime shared:9 - cgroup cgroup rw,{name}"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the control groups, in place of /sys/fs/cgroup."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    (tmp_path / "groups").mkdir()
    return tmp_path / "groups"


def _place(groups: Path, lines: str, *mounts: str, root: str = "/") -> None:
    own = groups.parent / "proc" / "self"
    (own / "cgroup").write_text(lines)
    (own / "mountinfo").write_text("\n".join(mount.format(top=groups, root=root, name="memory") for mount in mounts))


def _write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_groups_the_machine_is_the_limit(groups: Path) -> None:
    _place(groups, "")
    assert machine.free_memory() == 8 * GIB
    assert machine.free_processes() == math.inf


def test_each_group_above_limits_those_below_it(groups: Path) -> None:
    _place(groups, "0::/slice/job\n", V2)
    job = groups / "slice" / "job"
    _write(groups, memory__stat="inactive_file 5")
    _write(job, memory__max="max", memory__current=GIB, pids__max=100, pids__current=40)
    _write(job.parent, memory__max=4 * GIB, memory__current=3 * GIB, pids__max=50, pids__current=45)
    assert machine.free_memory() == GIB
    assert machine.free_processes() == 5
    _write(job.parent, memory__stat=f"anon 7\ninactive_file {GIB}\nactive_file 9")  # a cache, which is freed first
    assert machine.free_memory() == 2 * GIB
    _write(job, memory__high=2 * GIB)
    assert machine.total_memory() == 2 * GIB


def test_groups_of_version_1_and_of_a_container_are_read(groups: Path) -> None:
    _place(groups, "9:pids:/x\n4:memory:/docker/abc/job\n0::/\n", V1, V2, root="/docker/abc")
    _write(groups / "memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    _write(groups / "memory" / "job", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    assert machine.free_memory() == GIB
    # In a container with another view of its path, the top of what is mounted is its own group.
    _place(groups, "4:memory:/elsewhere\n", V1, root="/docker/abc")
    assert machine.free_memory() == GIB


def test_a_groups_share_of_the_processors_time_is_read(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    _place(groups, "0::/slice/job\n", V2)
    job = groups / "slice" / "job"
    _write(job, cpu__max="max 100000")
    assert machine.processors() == 64
    _write(job.parent, cpu__max="350000 100000")
    assert machine.processors() == 4
    _write(job, cpu__max="10000 100000")
    assert machine.processors() == 1
    _place(groups, "4:cpu,cpuacct:/job\n0::/\n", V2, V1.replace("{name}", "cpu"))
    _write(groups / "cpu" / "job", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert machine.processors() == 64
    _write(groups / "cpu", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    assert machine.processors() == 2


def test_only_one_function_counts_processors() -> None:
    packages = ("adapters", "domains", "rewards", "tools", "train")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    counting = [str(file.relative_to(ROOT)) for file in files if re.search("cpu_count|getaffinity", file.read_text())]
    assert counting == ["tools/machine.py"]


def test_the_limit_of_a_real_group_is_read(tmp_path: Path) -> None:
    version2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup", "" if version2 else "memory", f"test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control group can be made here")
    try:
        try:
            (group / ("memory.max" if version2 else "memory.limit_in_bytes")).write_text(str(GIB))
        except OSError:
            pytest.skip("no control group of memory can be made here")
        code = "from groundwire.tools.machine import *; input(); print(free_memory(), total_memory())"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            (group / "cgroup.procs").write_text(str(child.pid))
            printed, _ = child.communicate("\n")
        free, total = map(float, printed.split())
        assert 0 < free <= total == GIB
    finally:
        group.rmdir()


LIMITED = (
    "import resource; resource.setrlimit(resource.{name}, ({soft}, {hard}))\nfrom groundwire.tools.machine import *\n"
)


def _limited(name: str, soft: int, hard: int, code: str) -> str:
    done = run("-c", LIMITED.format(name=name, soft=soft, hard=hard) + code)
    assert not done.stderr, done.stderr
    return done.stdout


def test_a_shells_limit_of_open_files_is_raised_and_the_systems_means_fewer_rollouts() -> None:
    code = "print(*rollouts_at_once(64), sep=': '); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256)"
    assert _limited("RLIMIT_NOFILE", 64, 4096, code) == "64: \nTrue\n"
    said, raised = _limited("RLIMIT_NOFILE", 32, 100, code).splitlines()
    possible = int(said.partition(":")[0])
    assert 1 <= possible < 64
    assert f"{possible} rollouts run at once, not 64: this process may have 100 open files (ulimit -n)" in said
    assert raised == "False"


def test_a_run_with_few_open_files_says_that_fewer_rollouts_run_at_once() -> None:
    code = LIMITED.format(name="RLIMIT_NOFILE", soft=64, hard=64)
    code += "import sys; sys.argv[1:] = ['n_runners=64', '--print-config', '--trainer', 'local']\n"
    done = run("-c", code + "from groundwire.train.run import app; app()", folder=ROOT)
    assert "rollouts run at once, not 64" in done.stderr
    assert '"n_runners": 64' not in done.stdout
    assert '"n_runners": ' in done.stdout


SHORT_OF = {
    "bytearray(1 << 60)": "the memory that this process may take is used up",
    "import torch; torch.empty(1 << 45)": "the memory that this process may take is used up",
    "[open('/dev/null') for _ in iter(int, 1)]": "files are open, as many as may be (ulimit -n)",
    "raise RuntimeError('in a thread') from RuntimeError(\"can't start new thread\")": "no more processes and threads",
    "raise BlockingIOError(11, 'Resource temporarily unavailable')": "no more processes and threads",
    "raise ImportError('libx.so: failed to map segment from shared object')": "the memory that this process may take",
    "from groundwire.tools.errors import check_layer\nresource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))\n"
    "check_layer('torch')": "1,000 MB of addresses (ulimit -v), and torch and the other libraries alone need",
}


@pytest.mark.parametrize("code", SHORT_OF)
def test_a_command_that_lacks_something_of_the_machine_ends_with_a_sentence(code: str) -> None:
    lines = "\n".join(f"    {line}" for line in code.split("\n"))
    program = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
    program += "from groundwire.tools.errors import exit_on_user_error\nwith exit_on_user_error():\n" + lines
    done = run("-c", program)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert SHORT_OF[code] in done.stderr


def test_another_error_keeps_its_traceback() -> None:
    program = "from groundwire.tools.errors import exit_on_user_error\nwith exit_on_user_error():\n    raise {error}"
    for error in (
        "RuntimeError('a fault')",
        "ImportError('x.so: failed to map segment from shared object: not permitted')",
    ):
        assert "Traceback" in run("-c", program.format(error=error)).stderr


SERVER = """
import asyncio, os, resource, signal, sys
from aiohttp import web
from groundwire.tools.http.server import HttpServer

class Server(HttpServer):
    def application(self):
        app = web.Application()
        app.router.add_get("/", self.answer)
        return app
    async def answer(self, request):
        with open("/dev/null"):
            return web.Response(text="here")

async def main():
    async with Server() as server:
        limit = len(os.listdir("/proc/self/fd")) + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        print(server.port, flush=True)
        await asyncio.to_thread(os.read, stopped, 1)
    await asyncio.sleep(1.5)  # asyncio tries to accept again after a second

stopped, stop = os.pipe()
signal.signal(signal.SIGTERM, lambda *_: os.close(stop))
asyncio.run(main())
"""


def test_a_server_without_free_files_says_so_once_and_goes_on() -> None:
    server = Program("-c", SERVER, "4")

    async def connect(port: int) -> list[asyncio.StreamWriter]:
        return [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(40)]

    async def use(port: int) -> bytes:
        writers = await connect(port)
        await asyncio.to_thread(until, lambda: "new connections wait" in server.stderr_so_far(), server)
        for writer in writers:
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = await reader.read()
        await connect(port)  # and it stops while connections wait
        server.send_signal(15)
        return answer

    until(server.stdout_so_far, server)
    assert asyncio.run(use(int(server.stdout_so_far()))).endswith(b"here")
    said = server.wait(600).stderr
    assert said.count("\n") == 1
    assert "files are open, as many as may be (ulimit -n)" in said


def test_a_server_keeps_files_for_its_work_and_serves_more_clients_than_it_has_files() -> None:
    server = Program("-c", SERVER, "24")

    async def use(port: int) -> list[bytes]:
        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # and keeps the connection
            answer = await reader.readuntil(b"here")
            kept.append(writer)
            return answer

        kept = list[asyncio.StreamWriter]()
        answers = await asyncio.gather(*(ask() for _ in range(60)))
        server.send_signal(15)
        return answers

    until(server.stdout_so_far, server)
    assert len(asyncio.run(asyncio.wait_for(use(int(server.stdout_so_far())), 600))) == 60
    assert server.wait(600).stderr.count("\n") == 1
