"""A run with objects gives back what it changed in its process, which is the notebook of the agent's author."""

from __future__ import annotations

import os
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
from programs import run

from groundwire.adapters.agents.changes import given_back, wrap

PROGRAM = """
    import asyncio, concurrent.futures, os, socket, sys, threading

    import agents, aiohttp, httpx, openai, requests
    from agents.tracing import get_trace_provider
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    import groundwire.train
    from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer

    exporter = InMemorySpanExporter()
    if {own_provider}:
        own = TracerProvider()
        own.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(own)
    get_trace_provider().create_trace("read the variables")  # the SDK reads them once
    kept = [os.environ.pop(name, None) for name in ("OPENAI_API_KEY", "NO_PROXY", "no_proxy")]

    def state():
        provider = trace.get_tracer_provider()
        return {{
            "environment": dict(os.environ),
            "functions": [
                vars(owner).get(name)
                for owner, name in (
                    (threading.Thread, "start"), (concurrent.futures.ThreadPoolExecutor, "submit"),
                    (httpx.Client, "send"), (httpx.AsyncClient, "send"), (aiohttp.ClientSession, "_request"),
                    (requests.Session, "send"), (socket, "getaddrinfo"), (socket.socket, "connect"),
                )
            ],
            "provider": provider,
            "processors": getattr(getattr(provider, "_active_span_processor", None), "_span_processors", ()),
            "tracing": type(get_trace_provider().create_trace("t")).__name__,
        }}

    def agent(question):
        changed.append(state())
        with trace.get_tracer("mine").start_as_current_span("of the author"):
            messages = [{{"role": "user", "content": question}}]
            return openai.OpenAI().chat.completions.create(model="m", messages=messages).choices[0].message.content

    async def main():
        async with ScriptedPolicyServer(replies=lambda _: "fine") as policy:
            await asyncio.to_thread(
                groundwire.train.evaluate, agent, [{{"question": "Which?"}}], lambda task, answer: 1.0,
                base_url=policy.base_url, model="m", api_key="none", output_dir=sys.argv[1],
            )

    before, changed = state(), []
    assert before["tracing"] == "TraceImpl", before["tracing"]
    asyncio.run(main())
    after = state()
    assert changed[0]["environment"]["OPENAI_API_KEY"] == "none" and changed[0]["tracing"] == "NoOpTrace"
    assert None not in [one is other or None for one, other in zip(after["functions"], before["functions"])]
    assert not any(one is other for one, other in zip(changed[0]["functions"], before["functions"]))
    for name in before:
        assert after[name] == before[name], (name, before[name], after[name])
    with trace.get_tracer("mine").start_as_current_span("afterwards"):
        pass
    print([span.name for span in exporter.get_finished_spans()])
"""


@pytest.mark.parametrize("own_provider", [True, False])
def test_an_evaluation_changes_nothing_that_stays(tmp_path: Path, own_provider: bool) -> None:
    program = textwrap.dedent(PROGRAM).format(own_provider=own_provider)
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_AGENTS_DISABLE_TRACING"}
    ended = run("-c", program, str(tmp_path), environment=environment)
    assert not ended.returncode, ended.stderr[-3000:]
    said = " ".join(f"{ended.stdout} {ended.stderr}".split())
    assert said.count("rollouts: all in this process, with the agent's object") == 1
    assert ended.stdout.strip().endswith("['of the author', 'afterwards']" if own_provider else "[]")


def test_what_was_wrapped_before_a_run_stays_wrapped_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_in_a_run.py").write_text("def number(): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    wrap("imported_in_a_run", "number", lambda wrapped, *_: wrapped() + 1)
    with given_back():
        assert import_module("imported_in_a_run").number() == 2
    assert import_module("imported_in_a_run").number() == 2
