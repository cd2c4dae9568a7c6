"""Agents of a source text, each rollout in a process, and a server in place of a model."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from groundwire.adapters import Answer, Endpoint, Question
from groundwire.adapters.agents.process.backend import ProcessBackend


class Server:
    """Answers chat completions with the text of the last message, and notes the paths."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.url = ""

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.paths.append(request.path)
        message = {"role": "assistant", "content": f"re: {body['messages'][-1]['content']}"}
        return web.json_response({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

    def endpoint(self, number: int) -> Endpoint:
        return Endpoint(base_url=f"{self.url}/rollout/r{number}/attempt/a/v1", model="m")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    stub = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", stub.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stub
    await runner.cleanup()


class Agents:
    """Runs the agent of a source text on questions, all at once."""

    def __init__(self, folder: Path, server: Server, stack: AsyncExitStack) -> None:
        self._folder, self._server, self._stack = folder, server, stack
        self.backends: dict[str, ProcessBackend] = {}

    def backend(self, source: str, *, spec: dict[str, Any] | None = None, **options: Any) -> ProcessBackend:
        key = source + repr(options)
        if key not in self.backends:
            file = self._folder / f"agent{len(self.backends)}.py"
            file.write_text(textwrap.dedent(source), encoding="utf-8")
            self.backends[key] = ProcessBackend({"agent": f"{file}:agent", **(spec or {})}, **options)
            self._stack.push_async_callback(self.backends[key].stop)
        return self.backends[key]

    async def __call__(self, source: str, *questions: str, **options: Any) -> list[Any]:
        backend = self.backend(source, **options)
        runs = [
            backend.run(Question(id=text, text=text, database=""), self._server.endpoint(number))
            for number, text in enumerate(questions)
        ]
        return await asyncio.gather(*runs, return_exceptions=True)


@pytest.fixture
async def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> AsyncIterator[Agents]:
    monkeypatch.chdir(tmp_path)
    async with AsyncExitStack() as stack:
        yield Agents(tmp_path, server, stack)


def texts(answers: list[Any]) -> list[str]:
    return [answer.text if isinstance(answer, Answer) else repr(answer) for answer in answers]


async def said_by(agent: Agents, bodies: Mapping[str, str]) -> dict[str, str]:
    """The answers and failures of an agent that has a body for each question; all run at once."""
    branches = "".join(
        f"    if question == {name!r}:\n{textwrap.indent(body, ' ' * 8)}\n" for name, body in bodies.items()
    )
    source = f"import os, signal, sys, threading, time\nasync def agent(question):\n{branches}"
    answers = await agent(source, *bodies)
    texts = (answer.text if isinstance(answer, Answer) else f"{type(answer).__name__} {answer}" for answer in answers)
    return dict(zip(bodies, texts, strict=True))


async def until_true(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  it is about another process
        await asyncio.sleep(0.05)
