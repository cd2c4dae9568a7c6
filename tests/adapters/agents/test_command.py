"""Any program is an agent: what it reads, where its answer is, what it leaves, and what its failure says."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from test_agents import traced

from groundwire.adapters import AgentError, AgentSetupError, Answer, Endpoint, MalformedOutputError, Question
from groundwire.adapters.agents.app_environment import DEFAULTS, hooked_python
from groundwire.adapters.agents.command import CommandBackend
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.rollouts.factory import make_backend

QUESTION = Question(id="1", text="Which\nsingers?", database="", columns={"n": 7, "json": "{question}"})
NOBODY = Endpoint(base_url="", model="m")


def _command(program: str, *arguments: str) -> str:
    return shlex.join([sys.executable, "-c", program, *arguments])


async def _run(program: str, *arguments: str, endpoint: Endpoint = NOBODY, **options: Any) -> Answer:
    return await CommandBackend(agent=_command(program, *arguments), **options).run(QUESTION, endpoint)


def _runs(command: str) -> bool:
    return not subprocess.run(["pgrep", "-fx", command], capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("options", "arguments", "read"),
    [
        ({}, (), '{"n": 7, "json": "{question}", "id": "1", "question": "Which\\nsingers?", "database": ""}\n'),
        ({"input": "line"}, (), "Which singers?\n"),
        ({"input": "none"}, (), ""),
        ({}, ("-q={question}", "{n}", "{unknown}", '{"a": 1}', "{json}"), ""),
        ({"input": "line"}, ("{n}",), "Which singers?\n"),
    ],
)
async def test_a_program_gets_its_task_as_it_reads_it(options: Any, arguments: tuple[str, ...], read: str) -> None:
    answer = await _run("import json, sys; print(json.dumps([sys.argv[1:], sys.stdin.read()]))", *arguments, **options)
    values = {"-q={question}": "-q=Which\nsingers?", "{n}": "7", "{json}": "{question}"}
    assert json.loads(answer.text) == [[values.get(argument, argument) for argument in arguments], read]


async def test_a_loop_on_input_ends_after_the_question() -> None:
    program = "while True: print('you asked', input())"
    assert (await _run(program, input="line")).text == "you asked Which singers?"
    with pytest.raises(AgentError, match="EOFError"):
        await _run(program, input="none")


async def test_the_answer_is_where_the_option_says() -> None:
    program = (
        """print('{"answer": "no"}\\nlog'); print('{\\n "answer": "yes",\\n "rows": {\\n"n": 1}\\n}'); print('bye')"""
    )
    assert (await _run(program, output="last-line")).text == "bye"
    program = program.removesuffix("; print('bye')")
    assert (await _run(program, output="json:answer")).text == "yes"
    assert (await _run(program, output="json:rows")).text == '{"n": 1}'
    assert (await _run("print('x'); print('{\"answer\": 1}')", output="json:answer")).text == "1"
    with pytest.raises(MalformedOutputError, match="no JSON object with the field 'answer', but 'nothing'"):
        await _run("print('nothing')", output="json:answer")
    for wrong in ("json:", "json", "first"):
        with pytest.raises(ValueError, match="it must be all, last-line or json:FIELD"):
            CommandBackend(agent="true", output=wrong)


def test_its_options_are_agent_options() -> None:
    options = {"input": "line", "output": "last-line"}
    config = resolve("fast", backend="command", agent="true", agent_options=options)
    assert isinstance(make_backend(config), CommandBackend)
    for wrong, message in (
        ({"input": "text"}, "must be 'json', 'line' or 'none'"),
        ({"inptu": "x"}, "has input, output"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_backend(resolve("fast", backend="command", agent="true", agent_options=wrong))


async def test_what_a_program_leaves_running_does_not_hold_its_rollout() -> None:
    program = "import subprocess; subprocess.Popen(['sleep', '6000'], start_new_session=True); print('fine')"
    assert (await asyncio.wait_for(_run(program), 600)).text == "fine"
    closed = "import os, time; print('fine', flush=True); os.close(1); os.close(2); time.sleep(0.3)"
    assert (await asyncio.wait_for(_run(closed), 600)).text == "fine"


async def test_rollouts_share_neither_working_folder_nor_home_nor_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "notes.txt").write_text("of the author")
    monkeypatch.chdir(tmp_path / "app")
    program = (
        "import os, pathlib, subprocess\n"
        "notes, state = pathlib.Path('notes.txt'), pathlib.Path(os.environ['XDG_CONFIG_HOME'], 'state')\n"
        "print(notes.read_text(), state.exists(), flush=True)\n"
        "notes.write_text('changed'), state.write_text('x'), pathlib.Path.home().joinpath('own').touch()\n"
        f"subprocess.Popen(['sleep', '77{os.getpid()}'], start_new_session=True)\n"
    )
    answers = await asyncio.gather(*[_run(program) for _ in range(3)])
    assert [answer.text for answer in answers] == ["of the author False"] * 3
    assert (tmp_path / "app" / "notes.txt").read_text() == "of the author"
    assert not _runs(f"sleep 77{os.getpid()}")
    (tmp_path / "program.py").write_text("import os; print(os.listdir())")
    backend = CommandBackend(agent=f"{sys.executable} {tmp_path}/program.py", agent_folder="empty")
    assert (await backend.run(QUESTION, NOBODY)).text == "[]"


async def test_a_program_whose_rollout_is_cancelled_ends_with_all_that_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen(['sleep', '88{os.getpid()}'], start_new_session=True)\n"
        f"open({str(tmp_path / 'started')!r}, 'w').close(); time.sleep(600)"
    )
    rollout = asyncio.ensure_future(_run(program))
    while not (tmp_path / "started").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    rollout.cancel()
    await asyncio.wait({rollout})
    while _runs(f"sleep 88{os.getpid()}"):  # noqa: ASYNC110  the test's time limit ends this
        await asyncio.sleep(0.05)


async def test_when_the_backend_stops_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = f"from pathlib import Path; import time; Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)"
    backend = CommandBackend(agent=_command(command))
    run = asyncio.create_task(backend.run(QUESTION, NOBODY))
    while not (tmp_path / "begun").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    run.cancel()
    await asyncio.wait({run})
    await backend.stop()
    assert os.listdir(tmp_path) == ["begun"]


@pytest.mark.parametrize("output", ["all", "last-line"])
async def test_a_flood_does_not_fill_the_memory(output: str) -> None:
    program = (
        "import os\nos.write(1, b'first\\n')\nfor _ in range(400): os.write(1, b'x' * (1 << 20))\nprint('\\nlast')"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = await _run(program, output=output)
    assert answer.text.startswith("first") if output == "all" else answer.text == "last"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


async def test_a_large_task_is_written_whole_and_one_that_is_not_read_does_not_hold() -> None:
    question = Question(id="1", text="x" * 3_000_000, database="")
    backend = CommandBackend(agent=_command("import sys; print(len(sys.stdin.read()))"), input="line")
    assert (await backend.run(question, NOBODY)).text == "3000001"
    assert (await CommandBackend(agent="echo fine").run(question, NOBODY)).text == "fine"
    with pytest.raises(AgentSetupError, match=r"cannot be started: .*Argument list too long"):
        await CommandBackend(agent="echo {question}").run(question, NOBODY)


async def test_a_program_without_a_call_says_what_was_set() -> None:
    call = (
        "import json, os, urllib.request as u\n"
        "body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}]}).encode()\n"
        "url, headers = os.environ['OPENAI_BASE_URL'] + '/chat/completions', {'content-type': 'application/json'}\n"
        "u.urlopen(u.Request(url, body, headers))\n"
    )
    async with traced(lambda _: "fine") as policy:
        answer, calls = await policy.run(CommandBackend(agent=_command(call + "print('fine')")))
        assert (answer.no_call, len(calls)) == ("", 1)
        answer, _ = await policy.run(CommandBackend(agent=_command("print('fine')")))
    assert "made no LLM call to http://127.0.0.1" in answer.no_call
    assert "which it has in OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the like" in answer.no_call


NODE = """file:///app/agent.mjs:3
  throw new Refused('no such model')
        ^

Refused [Error]: no such model
    at ask (file:///app/agent.mjs:3:9)
    at file:///app/agent.mjs:9:1 {
  status: 400,
  error: { code: 'x' }
}

Node.js v22.1.0
"""
PYTHON = """Traceback (most recent call last):
  File "agent.py", line 1, in <module>
    raise KeyError("question")
KeyError: 'question'
"""


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        (NODE, "status 1: Refused [Error]: no such model status: 400, error: { code: 'x' } ("),
        (PYTHON, "status 1: KeyError: 'question' ("),
        ("usage: agent [-h]\nagent: unrecognized arguments: -x\n", "usage: agent [-h] agent: unrecognized arguments"),
    ],
)
async def test_a_failure_says_what_standard_error_says(errors: str, message: str) -> None:
    with pytest.raises(AgentError) as raised:
        await _run(f"import sys; sys.stderr.write({errors!r}); sys.exit(1)")
    assert message in str(raised.value)


async def test_a_program_has_the_urls_and_keys_of_all_providers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (*DEFAULTS, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MISTRAL_API_KEY", "of-the-user")
    monkeypatch.setenv("GEMINI_API_KEY", "of-the-user")
    monkeypatch.setenv("GROQ_API_KEY", "")
    monkeypatch.delenv("OPENAI_AGENTS_DISABLE_TRACING", raising=False)
    endpoint = Endpoint(base_url="http://10.0.0.1:9/r/1/v1", model="m", api_key="of-the-run")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    monkeypatch.setattr("groundwire.adapters.agents.command.call_summary", _nothing)
    named = {"agent_env": ["MISTRAL_API_KEY", "GEMINI_API_KEY", "GROQ_API_KEY"]}
    environment = json.loads((await _run(program, endpoint=endpoint, **named)).text)
    assert environment["OPENAI_API_KEY"] == "of-the-run"
    assert environment["OPENAI_AGENTS_DISABLE_TRACING"] == "true"
    assert (environment["MISTRAL_API_KEY"], environment["GROQ_API_KEY"]) == ("of-the-user", "none")
    assert "GOOGLE_API_KEY" not in environment  # a client would take it in place of the user's
    assert environment["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"] == "http://10.0.0.1:9/r/1"
    assert environment["AWS_ACCESS_KEY_ID"] == "none"
    assert "10.0.0.1" in environment["NO_PROXY"].split(",")
    (tmp_path / ".aws").mkdir()
    environment = json.loads((await _run(program, endpoint=endpoint)).text)
    assert "AWS_ACCESS_KEY_ID" not in environment
    assert not os.environ["GROQ_API_KEY"]


async def _nothing(base_url: str) -> None:
    return None


async def test_a_python_program_is_traced_whose_code_has_the_url_of_its_provider(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.of_the_system = 'kept'")
    ask = (
        "import {client}\n"
        "body = {{'model': 'm', 'messages': [{{'role': 'user', 'content': 'x'}}]}}\n"
        "reply = {client}.post('https://openrouter.ai/api/v1/chat/completions', json=body)\n"
        "print(reply.json()['choices'][0]['message']['content'], of_the_system)\n"
    )
    programs = [
        ask.format(client="requests"),
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask.format(client='httpx')!r}])",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
        async with traced(lambda _: "fine") as policy:
            for program in programs:
                answer, calls = await policy.run(CommandBackend(agent=_command(program)))
                assert (answer.text, answer.no_call, len(calls)) == ("fine kept", "", 1)


def test_python_starts_as_before_where_our_base_is_missing() -> None:
    environment = {**hooked_python({}), "PATH": os.environ["PATH"]}
    program = "import sys; sys.modules['groundwire'] = None; import email, requests; print(requests.post.__name__)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("post\n", "")


async def test_a_folder_that_is_not_copied_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a copy would be in itself
    program = "import pathlib; pathlib.Path('written').touch(); print(pathlib.Path.cwd())"
    backend = CommandBackend(agent=_command(program))
    assert [(await backend.run(QUESTION, NOBODY)).text for _ in range(2)] == [str(tmp_path)] * 2
    assert (tmp_path / "written").exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} is too large to be copied, or holds TMPDIR: what one rollout writes there, others find"
    ]
