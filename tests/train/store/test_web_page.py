"""A web page that the user visits can neither read from nor write to a server of ours, in a real browser and raw."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from mcp_servers import http_server, make_database

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.tools.http.access_token import access_token
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.server import PolicyServer
from groundwire.train.report.live import LiveReport
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.rollout import ProxyLLM, Rollout
from groundwire.train.store.server import bind, serve
from groundwire.train.store.sqlite import MEMORY

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
EVIL_POLICY = {"policy": {"resource_type": "proxy_llm", "endpoint": "http://evil.example/v1", "model": "m"}}
ROLLOUT = {
    "input": {"db_path": "/etc/passwd"},
    "metadata": {"settings": {"judge": {"base_url": "http://evil.example"}}},
}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "select"}], "max_tokens": 4}
QUERY = {"name": "query_database_by_sql", "arguments": {"sql": "SELECT name FROM singer"}}
Attack = tuple[str, str, Any]
"""Method, URL, body."""


class _Servers:
    """All our servers, the attacks on them, and what they hold."""

    def __init__(self, store: LightningStore, engine: LocalEngine, attacks: list[Attack]) -> None:
        self.store, self.engine, self.attacks = store, engine, attacks

    async def check_untouched(self) -> None:
        [rollout] = (await self.store.query_rollouts())["items"]
        assert rollout["input"] == {"n": 1}
        [resources] = (await self.store.query_resources())["items"]
        assert resources["resources"]["policy"]["endpoint"] == "http://127.0.0.1:1/v1"
        assert not (await self.store.query_spans(rollout["rollout_id"]))["items"]
        assert self.engine.generated_tokens == 0


@pytest.fixture
async def servers(tiny_policy: Any, tmp_path: Path) -> AsyncIterator[_Servers]:
    store, engine = LightningStore(MEMORY), LocalEngine(*tiny_policy, max_model_len=400)
    await store.put_resources("run", {"policy": ProxyLLM(endpoint="http://127.0.0.1:1/v1", model="m")})
    await store.enqueue([Rollout(task={"n": 1})])
    [attempted] = await store.dequeue(1)
    run = RunDir.create(tmp_path / "runs", backend="langgraph", domain="spider", config=resolve("fast").to_dict())
    policy = PolicyServer(engine)
    async with (
        serve(store, bind("127.0.0.1", 0), token=access_token()) as store_url,
        policy,
        LLMProxy(sink=store, policy=policy) as proxy,
        LiveReport(run) as report,
    ):
        with http_server(make_database(tmp_path / "singer.sqlite")) as (mcp_url, _):
            api = f"{store_url}/v1/agl"
            attempt = proxy.base_url(attempted.rollout_id, attempted.attempts[-1].attempt_id)
            attacks: list[Attack] = [
                ("POST", f"{api}/resources", EVIL_POLICY),
                ("POST", f"{api}/resources/run", EVIL_POLICY),
                ("POST", f"{api}/queues/rollouts/enqueue", {"rollouts": [ROLLOUT]}),
                ("POST", f"{api}/batch", [["POST", "/queues/rollouts/enqueue", json.dumps({"rollouts": [ROLLOUT]})]]),
                ("GET", f"{api}/rollouts", None),
                ("POST", f"{attempt}/chat/completions", CHAT),
                ("GET", f"{attempt}/models", None),
                ("POST", f"{policy.url}/v1/chat/completions", CHAT),
                ("GET", f"{policy.url}/v1/models", None),
                ("POST", mcp_url, {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": QUERY}),
                ("GET", f"{report.url}/", None),
                ("GET", f"{report.url}/state", None),
            ]
            yield _Servers(store, engine, attacks)
    engine.close()


ORIGIN = {"Origin": "http://evil.example"}
CROSS_SITE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
JSON = {"Content-Type": "application/json"}
SENT_BY_BROWSERS: dict[str, dict[str, str]] = {
    "text": {"Content-Type": "text/plain;charset=UTF-8", **ORIGIN, **CROSS_SITE},
    "text, from a server of this machine": {"Content-Type": "text/plain", "Origin": "http://localhost:3000"},
    "text, from a browser that names no site": {"Content-Type": "text/plain"},
    "form": {"Content-Type": "application/x-www-form-urlencoded", "Origin": "null"},
    "JSON": {**JSON, **ORIGIN},
    "DNS rebinding": {**JSON, "Host": "evil.example", "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
}


async def _answer(method: str, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    parts = urlsplit(url)
    host = headers.get("Host", "127.0.0.1")
    if headers.get("Sec-Fetch-Site") == "same-origin":
        headers = {**headers, "Origin": f"http://{host}:{parts.port}"}
    lines = {**headers, "Host": f"{host}:{parts.port}", "Content-Length": str(len(body)), "Connection": "close"}
    lines["Accept"] = "application/json, text/event-stream"
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", parts.port)
    writer.write(f"{method} {parts.path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    answer = (await asyncio.wait_for(reader.read(), 600)).decode()
    writer.close()
    return int(answer.split()[1]), answer


async def test_requests_as_browsers_send_them_for_a_page_are_refused(servers: _Servers) -> None:
    for method, url, body in servers.attacks:
        for name, headers in SENT_BY_BROWSERS.items():
            if method == "GET" and not {"Origin", "Sec-Fetch-Site"} & headers.keys():
                continue  # nothing shows that it comes from a page, and the page cannot read the answer
            data = b"" if body is None else json.dumps(body).encode()
            status, answer = await _answer(method, url, data, headers)
            assert status in (401, 403, 415), f"{name}: {method} {url}: {answer}"
            assert "access-control-allow" not in answer.lower()
        asks = {**ORIGIN, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": "content-type"}
        status, answer = await _answer("OPTIONS", url, b"", asks)
        assert status >= 400, answer
        assert "access-control-allow" not in answer.lower()
    await servers.check_untouched()


PAGE = """<!doctype html><title>kittens</title><body><script>
const attacks = %s, found = [];
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
async function attempt(name, act) {
  try { const text = await act(); if (text) found.push([name, text]); } catch { /* refused by the browser */ }
}
(async () => {
  for (const [method, url, body] of attacks) {
    const data = body === null ? undefined : JSON.stringify(body);
    const read = async (options) => { const reply = await fetch(url, options); return reply.ok ? reply.text() : ""; };
    const json = { "Content-Type": "application/json" }, text = { "Content-Type": "text/plain" };
    await attempt("fetch", () => read({ method, body: data, headers: data ? json : {} }));
    await attempt("simple fetch", () => read({ method, body: data, headers: data ? text : {} }));
    await attempt("blind fetch", async () => {
      await fetch(url, { method, body: data, mode: "no-cors", credentials: "include" });
    });
    await attempt("beacon", () => { navigator.sendBeacon(url, data); });
    await attempt("form", async () => {  // a form whose text/plain body is JSON
      const frame = document.createElement("iframe"), form = document.createElement("form");
      frame.name = "frame" + Math.random();
      Object.assign(form, { action: url, method, target: frame.name, enctype: "text/plain" });
      if (data) {
        const field = document.createElement("input");
        field.name = data.slice(0, -1) + ', "x": "'; field.value = '"}';
        form.append(field);
      }
      document.body.append(frame, form);
      form.submit();
      await pause(50);
      return frame.contentDocument && frame.contentDocument.body.innerText;
    });
    await attempt("script", () => new Promise((done) => {
      const script = document.createElement("script");
      script.onload = () => done("the browser loaded it as a script"); script.onerror = () => done("");
      script.src = url;
      document.body.append(script);
    }));
  }
  await pause(300);
  await fetch("/found", { method: "POST", body: JSON.stringify({ attacks: attacks.length, found }) });
})();
</script>"""


@asynccontextmanager
async def _page(attacks: list[Attack]) -> AsyncIterator[tuple[str, asyncio.Future[Any]]]:
    """The page's server: its port, and what the page has read from other servers."""
    found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=PAGE % json.dumps(attacks).replace("</", "<\\/"), content_type="text/html")

    async def report(request: web.Request) -> web.Response:
        found.set_result(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_post("/found", report)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield str(runner.addresses[0][1]), found
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _browser(profile: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--host-resolver-rules=MAP evil.example 127.0.0.1", "--no-proxy-server"]
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Debian's command is a script that starts the browser
        await process.wait()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium-headless-shell")
@pytest.mark.parametrize("site", ["evil.example", "localhost", "127.0.0.1"])
async def test_a_page_in_a_browser_reads_and_writes_nothing(site: str, servers: _Servers, tmp_path: Path) -> None:
    async with _page(servers.attacks) as (port, found):
        page = f"http://{site}:{port}/"
        async with _browser(tmp_path / "profile", "--remote-debugging-port=0", page):
            result = await asyncio.wait_for(found, 600)
    assert result == {"attacks": len(servers.attacks), "found": []}
    await servers.check_untouched()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium-headless-shell")
async def test_a_page_whose_name_leads_to_this_machine_gets_nothing(servers: _Servers, tmp_path: Path) -> None:
    """DNS rebinding: the browser takes the server for the page's own."""
    for method, url, _ in servers.attacks:
        if method == "GET":
            rebound = url.replace("127.0.0.1", "evil.example")
            async with _browser(tmp_path / "profile", "--dump-dom", rebound) as process:
                shown = (await asyncio.wait_for(process.communicate(), 600))[0].decode()
            assert "is no name of this machine" in shown, shown
    await servers.check_untouched()
