"""A rollout is a process: nothing of one reaches another, and nothing is left when it has ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from process_agents import Agents, Server, said_by, texts, until_true

from groundwire.adapters import Answer, Question
from groundwire.adapters.agents.process import folders
from groundwire.adapters.agents.process.backend import ProcessBackend
from groundwire.adapters.agents.process.folders import overlay

SLEEP = f"sleep 60.{os.getpid()}"


async def test_no_state_file_folder_or_variable_of_a_rollout_reaches_another(agent: Agents, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("app", encoding="utf-8")
    source = """
        import os, pathlib, tempfile
        state = []
        def agent(question):
            state.append(question)
            os.environ["LEFT"] = os.environ.get("LEFT", "") + question
            names = "XDG_CACHE_HOME", "XDG_STATE_HOME", "DSPY_CACHEDIR", "CREWAI_STORAGE_DIR"
            folders = ["", pathlib.Path.home(), tempfile.gettempdir(), *map(os.environ.get, names)]
            files = [pathlib.Path(folder, "kept.txt") for folder in folders]
            for path in files:
                with path.open("a") as file:
                    file.write(question)
            texts = [path.read_text() for path in files]
            os.chdir("/")
            return " ".join([*state, os.environ["LEFT"], *texts])
    """
    for _ in range(2):
        answers = await agent(source, "a", "b", "c")
        assert texts(answers) == [f"{name} {name} app{name}{f' {name}' * 6}" for name in "abc"]
    assert (tmp_path / "kept.txt").read_text() == "app"
    assert not [path for path in Path.home().glob("kept.txt")]


async def test_an_empty_folder_and_a_shared_one(agent: Agents, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("app", encoding="utf-8")
    listing = "import os\ndef agent(question):\n    open('new', 'w').close()\n    return str(sorted(os.listdir()))"
    assert texts(await agent(listing, "a", folder="empty")) == ["['new']"]
    (shared,) = texts(await agent(f"{listing} + ''", "a", folder="shared"))
    assert "kept.txt" in shared
    assert (tmp_path / "new").exists()


async def test_files_of_models_stay_where_they_are(
    agent: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    (tmp_path / "data-gym-cache").mkdir()
    source = "import os\ndef agent(question):\n    return os.environ['TIKTOKEN_CACHE_DIR']"
    assert texts(await agent(source, "a")) == [str(tmp_path / "data-gym-cache")]


async def test_a_client_that_was_made_at_the_import_reaches_the_url_of_its_attempt(
    agent: Agents, server: Server
) -> None:
    source = """
        import http.client, json, os, urllib.parse
        url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
        async def agent(question):
            client = http.client.HTTPConnection(url.hostname, url.port)
            body = json.dumps({"model": "gpt", "messages": [{"role": "user", "content": question}]})
            client.request("POST", f"{url.path}/chat/completions", body)
            return json.load(client.getresponse())["choices"][0]["message"]["content"]
    """
    assert texts(await agent(source, "a", "b")) == ["re: a", "re: b"]
    assert sorted(server.paths) == [f"/rollout/r{number}/attempt/a/v1/chat/completions" for number in range(2)]


async def test_a_client_of_uvloop_that_read_its_url_at_the_import_reaches_it_too(agent: Agents, server: Server) -> None:
    pytest.importorskip("uvloop")
    source = """
        import asyncio, json, os, urllib.parse, uvloop
        from contextlib import closing
        url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
        async def ask(question):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            body = json.dumps({"model": "gpt", "messages": [{"role": "user", "content": question}]}).encode()
            head = f"POST {url.path}/chat/completions HTTP/1.1", "Host: model", f"Content-Length: {len(body)}"
            writer.write("".join(f"{line}\\r\\n" for line in (*head, "")).encode() + body)
            reply = await reader.read()
            return json.loads(reply.partition(b"\\r\\n\\r\\n")[2])["choices"][0]["message"]["content"]
        def agent(question):
            with closing(uvloop.new_event_loop()) as loop:
                return loop.run_until_complete(ask(question))
    """
    assert texts(await agent(source, "a", "b")) == ["re: a", "re: b"]


async def test_child_processes_find_the_url_of_the_attempt_in_their_environment(agent: Agents, server: Server) -> None:
    source = """
        import subprocess, sys
        program = "import os; print(os.environ['OPENAI_BASE_URL'], os.environ['GOOGLE_GEMINI_BASE_URL'])"
        def agent(question):
            return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    """
    base = server.endpoint(0).base_url
    assert texts(await agent(source, "a")) == [f"{base} {base.removesuffix('/v1')}"]


async def test_a_python_child_process_is_traced_whose_code_has_the_url_of_its_provider(
    agent: Agents, server: Server
) -> None:
    source = """
        import subprocess, sys
        program = (
            "import requests, sys\\n"
            "body = {'model': 'gpt', 'messages': [{'role': 'user', 'content': sys.argv[1]}]}\\n"
            "reply = requests.post('https://openrouter.ai/api/v1/chat/completions', json=body)\\n"
            "sys.stdout.write(reply.json()['choices'][0]['message']['content'])"
        )
        def agent(question):
            return subprocess.run([sys.executable, "-c", program, question], capture_output=True, text=True).stdout
    """
    assert texts(await agent(source, "a", "b")) == ["re: a", "re: b"]
    assert sorted(server.paths) == [f"/rollout/r{number}/attempt/a/v1/chat/completions" for number in range(2)]


async def test_whatever_an_agent_starts_ends_with_it(agent: Agents, tmp_path: Path) -> None:
    source = f"""
        import os, subprocess
        def agent(question):
            sleep = "{SLEEP}"
            shells = [sleep, f"setsid {{sleep}}", f"(setsid {{sleep}} &) &", f"env -i setsid {{sleep}}"]
            started = [subprocess.Popen(["sh", "-c", shell]) for shell in shells]
            return " ".join(str(process.pid) for process in started)
    """
    answers = await agent(source, "a", "b")
    assert all(isinstance(answer, Answer) for answer in answers)
    await until_true(lambda: not _sleeping())


async def test_what_the_first_rollout_leaves_ends_although_the_template_is_learning_from_it(
    agent: Agents, tmp_path: Path
) -> None:
    (tmp_path / "imports").mkdir()
    (tmp_path / "slow.py").write_text("import os, time\nopen(f'imports/{os.getpid()}', 'w').close()\ntime.sleep(2)")
    source = f"""
        import os, subprocess, time
        def agent(question):
            import slow
            while len(os.listdir("imports")) < 2:  # until the template imports it
                time.sleep(0.01)
            subprocess.Popen(["setsid", *"{SLEEP}".split()])
            return question
    """
    assert texts(await agent(source, "a", folder="shared")) == ["a"]
    await until_true(lambda: not _sleeping())


def _begin_of(pid: str) -> str:
    """When a process began, which tells it from a later one of the same number; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


async def test_a_rollout_that_is_cancelled_is_killed(agent: Agents, tmp_path: Path) -> None:
    source = """
        import os, pathlib, signal, time
        async def agent(question):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if question == "slow":
                pathlib.Path("pid").write_text(str(os.getpid()))
                time.sleep(6000)
            return question
    """
    file = tmp_path / "pid"
    run = asyncio.create_task(agent(source, "slow", folder="shared"))
    await until_true(lambda: run.done() or (file.exists() and file.read_text()))
    assert not run.done(), run.exception()
    began = _begin_of(file.read_text())
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until_true(lambda: _begin_of(file.read_text()) != began)
    assert texts(await agent(source, "fast", folder="shared")) == ["fast"]


ENDS = {
    "raise ValueError('it broke')": "AgentError ValueError: it broke (before any LLM call)",
    "raise SystemExit(3)": "AgentError SystemExit: 3",
    "os._exit(7)": "it ended with status 7",
    "os.kill(os.getpid(), 11)": "killed by SIGSEGV",
    "os.closerange(3, 100); return 'x'": "it ended with status 1",
    "print('x' * (1 << 20)); raise ConnectionError('no network')": "ToolError ConnectionError: no network",
    "print('words'); os._exit(1)": "status 1; it printed last: words",
    "return 'x' * (20 << 20)": "AgentError the answer and its steps are larger than 16 MiB",
}


async def test_each_end_of_a_rollout_is_said(agent: Agents) -> None:
    said = await said_by(agent, {body: body for body in ENDS})
    for body, message in ENDS.items():
        assert message in said[body]
        assert said[body].startswith(("AgentError", "ToolError"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import surely_not_installed", "needs the package 'surely_not_installed'"),
        ("raise ValueError('broken')", "cannot be imported: ValueError: broken"),
        ("import os; os._exit(3)", "has ended, with status 3"),
        ("raise KeyboardInterrupt", "has ended, with status 1"),
        ("other = 1", "has no 'agent'"),
    ],
)
def test_an_agent_that_cannot_be_made_is_said_in_one_sentence(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        ProcessBackend({"agent": f"{tmp_path / 'broken.py'}:agent"})


def test_this_process_does_not_import_the_agent_and_can_say_how_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "never_here.py").write_text("def agent(question, city): ...", encoding="utf-8")
    backend = ProcessBackend({"agent": f"{tmp_path / 'never_here.py'}:agent"})
    question = Question(id="1", text="How many?", database="", columns={"city": "Bonn"})
    assert backend.describe_call(question).endswith("agent(question=the question, city=the column city)")
    with pytest.raises(ValueError, match="city"):
        backend.describe_call(Question(id="1", text="How many?", database=""))
    asyncio.run(backend.stop())
    assert "never_here" not in sys.modules


async def test_the_template_imports_what_the_first_rollout_imported(agent: Agents) -> None:
    source = """
        import sys
        def agent(question):
            known = "colorsys" in sys.modules
            import colorsys
            return str(known)
    """
    first = await agent(source, "a", "b")
    assert texts(first + await agent(source, "a")) == ["False", "True", "True"]


async def test_clients_of_httpx_share_the_ssl_context_of_the_import_if_they_have_the_usual_settings(
    agent: Agents,
) -> None:
    source = """
        import httpx
        def context(**settings):
            return httpx.Client(**settings)._transport._pool._ssl_context
        usual = context()
        def agent(question):
            other = context(verify=False)
            return f"{context() is usual} {other is usual} {usual.verify_mode.name} {other.verify_mode.name}"
    """
    assert texts(await agent(source, "a", "b")) == ["True False CERT_REQUIRED CERT_NONE"] * 2


async def test_random_numbers_differ_between_rollouts(agent: Agents) -> None:
    for module, call in (("random", "random.random()"), ("numpy", "numpy.random.random()")):
        source = f"import {module}\ndef agent(question):\n    return str({call})"
        assert len(set(texts(await agent(source, *"abcd")))) == 4


async def test_no_proxy_is_asked_for_the_host_of_the_policy(
    agent: Agents, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "of.the.user")
    monkeypatch.setattr(server, "url", "http://policy.host")
    source = "import os\ndef agent(question):\n    return os.environ['NO_PROXY']"
    assert {"of.the.user", "policy.host", "127.0.0.1"} <= {*texts(await agent(source, "a"))[0].split(",")}


async def test_connections_of_the_import_are_hung_up(agent: Agents, server: Server) -> None:
    source = f"""
        import socket, urllib.parse
        url = urllib.parse.urlsplit({server.url!r})
        inherited = socket.create_connection((url.hostname, url.port))
        def agent(question):
            try:
                inherited.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
                return repr(inherited.recv(10))
            except OSError as error:
                return type(error).__name__
    """
    assert set(texts(await agent(source, "a", "b"))) <= {"BrokenPipeError", "ConnectionResetError", "b''"}


async def test_steps_and_the_input_of_a_rollout_arrive(agent: Agents) -> None:
    (answer,) = await agent("def agent(question):\n    return {'answer': question}", "a")
    assert (answer.text, answer.judged_field) == ("a", "answer")
    assert answer.input.endswith("(question='a')")
    assert answer.no_call


def test_a_large_folder_is_not_copied_where_it_cannot_be_overlaid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "overlay", lambda folder, place: False)
    assert folders.way_to_own_folder(tmp_path / "place") == "shared"  # it would be a copy in itself
    place = tmp_path.parent / f"{tmp_path.name}.place"
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert folders.way_to_own_folder(place) == "copy"
    monkeypatch.setattr(folders, "_MAX_COPY", 99)
    assert folders.way_to_own_folder(place) == "shared"


def test_a_copy_of_a_folder_is_one_without_its_pipes_and_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = tmp_path / "app"
    (app / "data").mkdir(parents=True)
    monkeypatch.chdir(app)  # and back at the end
    (app / "data" / "file").write_text("content", encoding="utf-8")
    (app / "dangling").symlink_to("nowhere")
    os.mkfifo(app / "data" / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    folders.own_working_folder(tmp_path / "place", "copy")
    copied = [str(path.relative_to(Path.cwd())) for path in Path.cwd().rglob("*")]
    assert sorted(copied) == ["dangling", "data", "data/file"]


def test_an_overlay_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "file").write_text("before", encoding="utf-8")
    pid = os.fork()
    if not pid:
        mounted = overlay(app, tmp_path / "place")
        if mounted:
            (app / "file").write_text("after", encoding="utf-8")
        os._exit(0 if mounted else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 3)
    assert (app / "file").read_text(encoding="utf-8") == "before"


def _sleeping() -> set[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid for pid in pids if _command(pid) == SLEEP}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def test_a_result_is_json(tmp_path: Path) -> None:
    from groundwire.adapters import EndpointError
    from groundwire.adapters.agents.process.program import failure_from, failure_to

    error = EndpointError("refused", status=400)
    error.input, error.resources = "agent(question)", {"host"}
    read = failure_from(json.loads(json.dumps(failure_to(error))), "")
    assert (type(read), str(read), read.input, list(read.resources)) == (
        EndpointError,
        "refused",
        error.input,
        ["host"],
    )
    assert isinstance(read, EndpointError)
    assert read.status == 400


def test_version_managers_stay_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They write the path of their folder into their files, and that of an attempt's home ends with the attempt."""
    (tmp_path / "home" / ".pyenv").mkdir(parents=True)
    (tmp_path / "attempt").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    variables = folders.own_folders(tmp_path / "attempt")
    assert variables["PYENV_ROOT"] == str(tmp_path / "home" / ".pyenv")
    assert variables["HOME"] == str(tmp_path / "attempt" / "home")
