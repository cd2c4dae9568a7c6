"""No key, token or password leaves the process in a message, log, span, file, report or cache."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from judges import verdict
from programs import run as run_program
from typer.testing import CliRunner

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.tools import secrets
from groundwire.tools.errors import UserError, exit_on_user_error
from groundwire.tools.secrets import mask_secrets, masked_values, register_secret
from groundwire.tools.startup import setup_logging
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluate import app
from groundwire.train.evaluation.probe_endpoint import probe_endpoint
from groundwire.train.report.build import build
from groundwire.train.store.__main__ import app as store_app
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Rollout

KEY, JUDGE_KEY, TOKEN, PASSWORD = (f"marked-{name}-0123456789" for name in ("key", "judge", "token", "password"))
ENVIRONMENT = {"OPENAI_API_KEY": KEY, "GROUNDWIRE_JUDGE_API_KEY": JUDGE_KEY, "MY_TOKEN": TOKEN}


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_registered", set())


# -- the function


def test_known_secrets_are_replaced_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        **ENVIRONMENT,
        "LONG_TOKEN": f"{TOKEN}/longer",
        "EMPTY_TOKEN": "",
        "SHORT_TOKEN": "none",
    }.items():
        monkeypatch.setenv(name, value)
    register_secret("registered")
    register_secret(None)
    text = f"none of {KEY}, {TOKEN}/longer, {TOKEN}%2Flonger, {TOKEN}, {JUDGE_KEY}, registered"
    assert mask_secrets(text) == (
        "none of $OPENAI_API_KEY, $LONG_TOKEN, $LONG_TOKEN, $MY_TOKEN, $GROUNDWIRE_JUDGE_API_KEY, ***"
    )


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("GET http://me:pw@host:1/v1?a=b failed", "GET http://host:1/v1?a=b failed"),
        ("(postgres://me:p@w@db/x)", "(postgres://db/x)"),
        ("https://only-a-token@host", "https://host"),
        ("mail me@host, see http://host/@me", "mail me@host, see http://host/@me"),
    ],
)
def test_urls_lose_their_user_and_password(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked


def test_values_are_masked_at_any_depth() -> None:
    register_secret(KEY)
    value = {"a": [1, (KEY, {"b": f"x {KEY}"})], "ids": [1, 2.5], "n": None}
    assert masked_values(value) == {"a": [1, ["***", {"b": "x ***"}]], "ids": [1, 2.5], "n": None}


# -- errors and logs


def test_errors_log_lines_and_tracebacks_are_masked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_secret(KEY)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    try:
        setup_logging()
        try:
            raise ValueError(KEY)
        except ValueError as error:
            logging.getLogger("groundwire.x").exception("refused: %s", KEY)
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        root.handlers[:] = before
    with pytest.raises(SystemExit), exit_on_user_error():
        raise UserError(f"bad key {KEY} at http://me:{PASSWORD}@host")
    printed = capsys.readouterr().err
    assert "refused: ***" in printed
    assert printed.count("ValueError: ***") == 2
    assert printed.endswith("error: bad key *** at http://host\n")
    assert KEY not in printed


def test_the_uri_of_a_mongodb_need_not_be_in_the_process_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUNDWIRE_MONGO_URI", f"mongodb://me:{PASSWORD}@127.0.0.1:9/?replicaSet=rs0")
    done = CliRunner().invoke(store_app, ["--port", "0"])
    assert done.exit_code != 0
    assert "error: --mongo" in done.stderr
    assert PASSWORD not in done.output


def test_a_message_is_one_line_whatever_ids_are_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    hook = sys.excepthook
    try:
        setup_logging()
        logging.getLogger("groundwire.x").error("rollout %s failed", "ro-1\nerror: \x1b[2Jall is well é")
    finally:
        root.handlers[:], sys.excepthook = before, hook
    assert capsys.readouterr().err == r"rollout ro-1\nerror: \x1b[2Jall is well é failed" + "\n"


# -- a provider that repeats the key


class _Echo(BaseHTTPRequestHandler):
    """It answers the first request of a model, and the judge's every second one; else it repeats the key in a 401."""

    asked: list[str] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"].removeprefix("Bearer ")
        self.asked.append(body["model"])
        if body.get("stream"):
            return self._stream(key)
        text = verdict(0.5).replace("because", f"because {key}")
        if self.asked.count(body["model"]) % (2 if body["model"] == "judge" else 1 << 30) == 1:
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            reply = {"id": key, "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
            return self._send(200, reply)
        return self._send(401, {"error": {"message": f"{'x' * 480} no key {key}", "code": None}})

    def _stream(self, key: str) -> None:
        failed = {"error": {"message": f"no key {key}"}}
        data = f"data: {json.dumps(failed)}\n\ndata: [DONE]\n\n".encode()
        self._send(200 if self.asked.count("big") == 1 else 401, data, "text/event-stream")

    def _send(self, status: int, body: dict[str, Any] | bytes, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    _Echo.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


AGENT = f'''
import zlib
import openai
from agentlightning.emitter import emit_annotation
from groundwire.adapters import Answer
from groundwire.tools.types import AgentStep

async def ask(question, endpoint):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:
        try:
            await client.chat.completions.create(
                model=endpoint.model, messages=[{{"role": "user", "content": "{TOKEN} {JUDGE_KEY}"}}]
            )
        except openai.APIStatusError as error:
            if zlib.crc32(question.id.encode()) % 3 == 0:
                raise
            refusal = error.response.text
    if zlib.crc32(question.id.encode()) % 3 == 1:
        raise ValueError(refusal + " {TOKEN} http://me:{PASSWORD}@db")
    emit_annotation({{"seen": refusal + " {TOKEN}"}})
    step = AgentStep(agent="a", kind="tool", input="{TOKEN}", output="postgres://me:{PASSWORD}@db", ok=True)
    return Answer(text=refusal + " {JUDGE_KEY}", steps=[step])
'''


def _contents(folder: Path) -> str:
    """All files below ``folder`` as text, compressed ones unpacked."""
    texts = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            texts.append(path.read_bytes().decode("utf-8", "replace"))
    for run in {path.parent.resolve() for path in folder.rglob("config.json")}:
        opened = RunDir.open(run)
        texts.append(str(opened.rollouts()))
        page = build(opened).html
        packed = re.findall(r"H4sI[A-Za-z0-9+/=]{40,}", page)
        texts += [page, *(gzip.decompress(base64.b64decode(each)).decode() for each in packed)]
        assert packed
    return "\n".join(texts)


def test_no_secret_of_an_evaluation_is_printed_or_stored(endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "leaky.py").write_text(AGENT)
    done = run_program(
        *("-m", "train.evaluate", "--base-url", endpoint, "--model", "big", "--val-tasks", "9", "--domain", "medical"),
        *("--backend", "custom", "--agent", "leaky:ask", "--output-dir", str(tmp_path / "out"), "retries=0"),
        *("--judge-model", "judge", "--judge-base-url", endpoint),
        *("--judge", f"cache={tmp_path / 'out' / 'judge.sqlite'}"),
        environment={**ENVIRONMENT, "PYTHONPATH": str(tmp_path / "agent")},
    )
    stored = _contents(tmp_path / "out")
    for sign in ("no key ***", "$MY_TOKEN", "because $GROUNDWIRE_JUDGE_API_KEY", "postgres://db"):
        assert sign in stored, (sign, done.stdout)
    everything = stored + done.stdout + done.stderr
    for secret in (KEY, JUDGE_KEY, TOKEN, PASSWORD):
        assert secret not in everything
        assert secret[:-4] not in everything


def test_an_endpoint_that_repeats_the_key_is_quoted_without_it(endpoint: str) -> None:
    _Echo.asked.append("big")
    with pytest.raises(ConfigError, match=r"answered 401: x{480} no key \*\*\*") as caught:
        probe_endpoint(endpoint, model="big", api_key=KEY, sampling={})
    assert KEY not in str(caught.value)


def test_an_endpoint_s_url_with_a_password_is_refused_before_it_is_stored(tmp_path: Path) -> None:
    for url in (f"http://me:{PASSWORD}@127.0.0.1:9/v1", f"http://me:{PASSWORD}/x@h/v1", f"http://h/v1?key={PASSWORD}"):
        done = CliRunner().invoke(app, ["--base-url", url, "--model", "m", "--output-dir", str(tmp_path)])
        assert done.exit_code == 2
        assert done.stderr.endswith(
            "has a user, a password or a query: leave it out, and put the key into OPENAI_API_KEY or the "
            "variable of --api-key-env\n"
        )
        assert PASSWORD not in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stream", [False, True])
async def test_neither_agents_nor_spans_get_the_key_that_the_policy_server_repeats(endpoint: str, stream: bool) -> None:
    store = MemoryStore()
    await store.enqueue([Rollout(task={"id": "t1"})])
    [rollout] = await store.dequeue(1)
    ids = (rollout.rollout_id, rollout.attempts[-1].attempt_id)
    async with LLMProxy(upstreams=[endpoint], sink=store, model="big", api_key=KEY) as proxy:
        async with httpx.AsyncClient(base_url=proxy.base_url(*ids)) as agent:
            request = {"messages": [{"role": "user", "content": f"{KEY} http://me:{PASSWORD}@db"}], "stream": stream}
            replies = [await agent.post("/chat/completions", json=request) for _ in range(2)]
        await proxy.flush()
    assert [reply.status_code for reply in replies] == [200, 401]
    assert all("***" in reply.text and KEY not in reply.text for reply in replies)
    spans = str(await store.get(rollout.rollout_id))
    assert spans.count("*** http://db") == 2
    assert "no key ***" in spans
    assert KEY not in spans
    assert PASSWORD not in spans


@pytest.mark.parametrize("argument", ["judge.api_keyy={}", "api_key={}", "verl.api_key={}", "--judge=api_key={}", "{}"])
def test_a_mistyped_setting_is_reported_without_its_value(argument: str) -> None:
    key = "sk-proj-0123456789abcdef"
    ended = run_program("-m", "groundwire.train.run", "--print-config", argument.format(key))
    assert ended.returncode == 2
    assert key not in ended.stdout + ended.stderr
