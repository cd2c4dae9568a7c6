"""Whatever an agent does, or whoever kills its processes: its rollout fails in one sentence, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from process_agents import Agents, Server, said_by, texts, until_true

from groundwire.adapters import Question, ToolError
from groundwire.adapters.agents import process
from groundwire.adapters.agents.process import guard, program
from groundwire.adapters.agents.process.backend import ProcessBackend
from groundwire.adapters.agents.process.program import RunningAttempt

SLOW = """
    import os, pathlib, time
    def agent(question):
        pathlib.Path(question).write_text(str(os.getpid()))
        time.sleep(60)
"""


def _processes(marker: str) -> list[int]:
    """Of the program whose environment or command line has ``marker``."""
    pids = []
    for path in Path("/proc").iterdir():
        try:
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes() if path.name.isdigit() else b""
        except OSError:
            continue
        if marker.encode() in text and int(path.name) != os.getpid():
            pids.append(int(path.name))
    return pids


@pytest.mark.parametrize("sent", ["", '{"place": "/tmp', "{}"], ids=["nothing", "a part", "no end"])
def test_a_template_whose_runner_was_killed_before_it_had_sent_the_settings_ends_without_a_word(sent: str) -> None:
    command = [sys.executable, "-m", "groundwire.adapters.agents.process.template"]
    ended = subprocess.run(command, input=sent, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


async def test_a_line_that_a_killed_process_has_not_ended_is_none() -> None:
    nobody: Any = None
    attempt = RunningAttempt(key="1", program=nobody, on_report=lambda report: pytest.fail(str(report)))
    reader = asyncio.StreamReader()
    reader.feed_data(b'{"answer": "SELECT 1')
    reader.feed_eof()
    await program._read_reports(reader, attempt)
    assert await attempt.result is None


async def test_a_killed_template_is_started_again_and_its_rollouts_fail_as_tools(
    agent: Agents, tmp_path: Path, server: Server
) -> None:
    source = SLOW.replace("time.sleep(60)", "time.sleep(60 * (question != 'c')); return 'answered'")
    backend = agent.backend(source, folder="shared")
    runs = asyncio.create_task(agent(source, "a", "b", folder="shared"))
    await until_true(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "ab"))
    program = backend._programs[0].result()
    os.kill(program._process.pid, signal.SIGKILL)
    errors = await runs
    assert all(isinstance(error, ToolError) for error in errors)
    assert "the process that has imported the agent ended with signal SIGKILL" in str(errors[0])
    pid = int((tmp_path / "a").read_text())
    await until_true(lambda: not Path(f"/proc/{pid}").exists())
    assert texts(await agent(source, "c", folder="shared")) == ["answered"]


async def test_no_rollout_waits_for_a_template_that_ended_before_it_learnt_what_to_import(
    agent: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("groundwire.adapters.agents.process.backend._LEARN_S", 10_000)
    source = SLOW.replace("time.sleep(60)", "time.sleep(60 * (question != 'c')); return 'answered'")
    backend = agent.backend(source, folder="shared")
    runs = asyncio.create_task(agent(source, "a", "c", folder="shared"))
    await until_true((tmp_path / "a").exists)
    os.kill(backend._programs[0].result()._process.pid, signal.SIGKILL)
    failed, answered = await runs
    assert isinstance(failed, ToolError)
    assert texts([answered]) == ["answered"]
    message = "the process that has imported the agent ended with signal SIGKILL: the next rollout starts another"
    assert message in caplog.messages


async def test_an_attempt_that_is_cancelled_at_once_leaves_nothing(agent: Agents, server: Server) -> None:
    backend = agent.backend("def agent(question):\n    return question")
    for _ in range(5):
        run = asyncio.create_task(backend.run(Question(id="1", text="a", database=""), server.endpoint(0)))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert not backend._attempts
    assert texts(await agent("def agent(question):\n    return question", "a", "b")) == ["a", "b"]


async def test_sixty_four_rollouts_run_at_once(agent: Agents) -> None:
    source = "import time\ndef agent(question):\n    time.sleep(0.5)\n    return question"
    questions = [str(number) for number in range(64)]
    assert texts(await agent(source, *questions)) == questions


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("free_memory", "1 rollouts run at once: each has 64 MB of its own, and more would take the last free memory"),
        ("free_processes", "1 rollouts run at once: no more processes may be started"),
    ],
)
async def test_rollouts_wait_where_there_is_room_for_one_only(
    name: str,
    said: str,
    agent: Agents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(process.backend, name, lambda: 0.0)
    source = """
        import time
        def agent(question):
            for word in ("begins", "ends"):
                with open("log", "a") as file:
                    print(question, word, file=file)
                time.sleep(0.1)
    """
    await agent(source, *"abc", folder="shared")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["begins", "ends"] * 3
    possible, why = agent.backend(source, folder="shared").at_once(8)
    assert f"{possible} rollouts run at once: {why}".startswith(said)
    assert caplog.text.count("rollouts run at once") == caplog.text.count(said) == 1


@pytest.mark.parametrize("fork", [True, False])
async def test_memory_that_a_rollout_has_freed_counts_for_the_next_ones(agent: Agents, fork: bool) -> None:
    source = """
        def agent(question):
            words = bytearray(300 << 20)
            words[::4096] = bytes(len(words[::4096]))
            del words
            return open("/proc/self/oom_score_adj").read().strip()
    """
    backend = agent.backend(source, fork=fork)
    assert texts(await agent(source, "a", fork=fork)) == ["1000"]  # the kernel ends it before its trainer
    assert backend._child_bytes > 300 << 20


def test_a_long_import_is_said_and_given_up(
    agent: Agents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process.program, "_LONG_S", 0.1)
    monkeypatch.setattr(process.program, "_START_S", 0.2)
    with pytest.raises(ValueError, match=r"its import did not end within 0.2 s"):
        agent.backend("import time\ntime.sleep(60)\ndef agent(question): ...")
    assert "goes on after 0.1 s" in caplog.text


async def test_an_import_may_end_before_its_runner_reads_that_it_began(
    agent: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = socket.socket.accept

    def accept_late(listener: socket.socket) -> tuple[socket.socket, object]:
        connection, address = accept(listener)
        while connection.recv(1 << 16, socket.MSG_PEEK).count(b"\n") < 2:
            time.sleep(0.01)
        return connection, address

    monkeypatch.setattr(process.program, "_LONG_S", 0.0)
    monkeypatch.setattr(process.program, "_START_S", 0.0)
    with monkeypatch.context() as late:
        late.setattr(socket.socket, "accept", accept_late)
        agent.backend("def agent(question):\n    return question")
    assert texts(await agent("def agent(question):\n    return question", "a")) == ["a"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_when_the_runner_ends_no_process_is_left(tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, subprocess, time\n"
        "def agent(question):\n"
        "    subprocess.Popen(['setsid', 'sleep', '6000'])\n"
        "    pathlib.Path(os.environ['BEGUN']).touch()\n"
        "    time.sleep(6000)\n"
    )
    program = f"""
import asyncio
from groundwire.adapters import Endpoint, Question
from groundwire.adapters.agents.process.backend import ProcessBackend
backend = ProcessBackend({{"agent": {str(tmp_path / "slow.py")!r} + ":agent"}}, env=["MARKER", "BEGUN"])
print(backend._first.folder, flush=True)
asyncio.run(backend.run(Question(id="1", text="a", database=""), Endpoint(base_url="http://127.0.0.1:9/v1", model="m")))
"""
    marker = f"MARKER={tmp_path}"
    environment = {**os.environ, "MARKER": str(tmp_path), "BEGUN": str(tmp_path / "begun")}
    runner = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    asyncio.run(until_true((tmp_path / "begun").exists))
    assert len(_processes(marker)) >= 5
    runner.send_signal(end)
    printed, _ = runner.communicate(timeout=600)
    asyncio.run(until_true(lambda: not _processes(marker)))
    assert not Path(printed.decode().strip()).exists()


BAD = {
    "forks": ("os.fork()\nreturn question", "forks"),
    "daemonises": ("if os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(60)", "it ended with status 0"),
    "ignores signals": ("[signal.signal(n, signal.SIG_IGN) for n in (2, 15, 17)]\nreturn question", "ignores signals"),
    "closes its files": ("os.closerange(0, 200)\nreturn question", "ended without an answer"),
    "kills its group": ("os.killpg(0, 9)", "killed by SIGKILL"),
    "ends its parent": ("os.kill(os.getppid(), 15)\nreturn question", "ends its parent"),
    "prints surrogates": ("print('\\ud800'.encode('utf-8', 'surrogatepass'))\nreturn '\\ud800'", "�"),
    "answers nan": ("return {'answer': question, 'score': float('nan')}", "answers nan"),
    "has an odd error": ("raise ValueError('\\ud800')", "ValueError"),
    "lacks a package": ("import surely_not_installed", "No module named 'surely_not_installed'"),
    "leaves threads": ("threading.Thread(target=time.sleep, args=(60,)).start()\nreturn question", "leaves threads"),
    "ends its process": ("sys.exit()", "SystemExit"),
}


async def test_a_bad_agent_harms_only_its_own_rollout(agent: Agents) -> None:
    said = await said_by(agent, {name: body for name, (body, _) in BAD.items()})
    assert {name for name, (_, message) in BAD.items() if message not in said[name]} == set(), said


async def test_four_hundred_megabytes_of_output_do_not_stay_in_the_runner(agent: Agents) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = (
        "import os\ndef agent(question):\n    os.system('head -c 400000000 /dev/zero')\n    raise ValueError('end')"
    )
    (error,) = await agent(source, "a")
    assert "end" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


async def test_threads_processes_and_generators_of_the_import_are_named(
    agent: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        import random, subprocess, threading, time
        def works():
            time.sleep(60)
        threading.Thread(target=works, name="worker", daemon=True).start()
        server = subprocess.Popen(["sleep", "60"])
        chooser = random.Random(1)
        def agent(question):
            return question
    """
    assert texts(await agent(source, "a")) == ["a"]
    assert "the thread 'worker' (agent0.works)" in caplog.text
    assert "the process 'sleep 60'" in caplog.text
    assert "agent0.chooser" in caplog.text


async def test_a_model_that_is_not_trained_keeps_the_url_of_its_provider(
    agent: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://my-provider/v1")
    source = "import os\ndef agent(question):\n    return os.environ['OPENAI_BASE_URL']"
    assert texts(await agent(source, "a", spec={"train_model": "mine"})) == ["http://my-provider/v1"]


async def test_a_folder_that_cannot_be_copied_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "simple.py").write_text("def agent(question): ...")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a working folder in which the attempts' folders are
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.chdir(folder)
        backend = ProcessBackend({"agent": f"{tmp_path}/simple.py:agent"})
        await backend.stop()
    assert "what one rollout writes there, others find" in caplog.text


async def test_a_fresh_process_runs_each_rollout_where_a_forked_one_would_hang(agent: Agents, server: Server) -> None:
    source = """
        import asyncio, os, threading
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        state = []
        async def work(question):
            state.append(question)
            return f"{state} {os.environ['OPENAI_BASE_URL']}"
        def agent(question):
            return asyncio.run_coroutine_threadsafe(work(question), loop).result()
    """
    answers = texts(await agent(source, "a", "b", "c", fork=False))
    assert answers == [f"['{text}'] {server.endpoint(number).base_url}" for number, text in enumerate("abc")]


async def test_a_rollout_in_a_fresh_process_that_is_cancelled_is_killed(agent: Agents, tmp_path: Path) -> None:
    run = asyncio.create_task(agent(SLOW, "a", fork=False, folder="shared"))
    await until_true(lambda: (tmp_path / "a").exists() and (tmp_path / "a").read_text())
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    pid = int((tmp_path / "a").read_text())
    await until_true(lambda: not Path(f"/proc/{pid}").exists())


WITHOUT_FORK = """
import os, signal, sys
for module in ("fcntl", "resource", "grp", "pwd"):
    sys.modules[module] = None
missing = {os: ["fork", "setsid", "killpg", "getuid"], signal: ["SIGCHLD", "SIGKILL"]}
for owner, names in missing.items():
    for name in names:
        delattr(owner, name)
"""
IN_FRESH_PROCESSES = """
import asyncio, os, sys
import groundwire.train.rollouts.factory
from groundwire.adapters import Endpoint, Question
from groundwire.adapters.agents.process.backend import ProcessBackend

async def main():
    assert not hasattr(os, "fork")
    backend = ProcessBackend({"agent": sys.argv[1]})
    questions = [Question(id=text, text=text, database="") for text in "ab"]
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    answers = await asyncio.gather(*(backend.run(question, endpoint) for question in questions))
    print(*(answer.text for answer in answers))
    await backend.stop()

asyncio.run(main())
"""


def test_where_there_is_no_fork_each_rollout_has_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_FORK)  # for the processes of rollouts as well
    (tmp_path / "simple.py").write_text(
        "import os\nasked = []\ndef agent(question):\n"
        "    asked.append(question)\n    open('kept', 'a').write(question)\n"
        '    return f\'{asked} {open("kept").read()} {hasattr(os, "fork")}\'\n'
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", IN_FRESH_PROCESSES, f"{tmp_path / 'simple.py'}:agent"],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['a'] a False ['b'] b False\n", done.stderr
    assert "this system cannot fork" in done.stderr
    assert not (tmp_path / "kept").exists()


async def test_a_slow_import_does_not_count_as_time_of_a_rollout(agent: Agents, server: Server, tmp_path: Path) -> None:
    (tmp_path / "imports").mkdir()
    source = f"""
        import os, pathlib, time
        time.sleep(1)
        pathlib.Path({str(tmp_path)!r}, "imports", str(os.getpid())).touch()
        def agent(question):
            return str(os.getpid())
    """
    backend = agent.backend(source, fork=False)
    for _ in range(3):
        async with backend.place():
            imported = {path.name for path in (tmp_path / "imports").iterdir()}
            answer = await backend.run(Question(id="1", text="a", database=""), server.endpoint(0))
            assert answer.text in imported


def test_a_guard_that_cannot_fork_says_so_in_a_line() -> None:
    program = f"""
import os, runpy, sys
def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fork
sys.path.insert(0, os.path.dirname({guard.__file__!r}))
sys.argv = ["guard", "0", ".", "shared", "true"]
runpy.run_path({guard.__file__!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "no process can be started: Resource temporarily unavailable\n")
