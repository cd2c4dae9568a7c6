"""Names of agents from spans, without OpenTelemetry's SDK, and where a provider has the SDK's in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from groundwire.adapters.agents.agent_names import _agent_of_agno, _run_named, current_agent

WITHOUT_SDK = """
import sys
sys.modules["opentelemetry.sdk"] = None  # it cannot be imported
from opentelemetry import trace
from groundwire.adapters.agents.agent_names import current_agent, follow_agent_names

follow_agent_names()
tracer = trace.get_tracer("framework")
with tracer.start_as_current_span("invoke_agent", attributes={"gen_ai.agent.name": "writer"}) as span:
    assert span.is_recording() and span.get_span_context().is_valid
    with tracer.start_as_current_span("chat"):
        print(current_agent())
    other = tracer.start_span("invoke_agent")
    other.set_attribute("gen_ai.agent.name", "reader")
    with trace.use_span(other):
        print(current_agent())
print(repr(current_agent()))
"""


def test_spans_name_the_agent_around_them_without_the_sdk_of_opentelemetry() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_SDK], check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("writer\nreader\n''\n", "")


WRAPPED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from groundwire.adapters.agents.agent_names import current_agent, follow_agent_names
from groundwire.adapters.agents.changes import given_back

class Proxy(trace.TracerProvider):  # as Logfire's
    provider = TracerProvider()
    get_tracer = provider.get_tracer
    add_span_processor = provider.add_span_processor

trace.set_tracer_provider(Proxy())
with given_back():
    follow_agent_names()
    with trace.get_tracer("x").start_as_current_span("invoke_agent", attributes={"gen_ai.agent.name": "writer"}):
        with trace.get_tracer("x").start_as_current_span("chat"):
            print(current_agent())
print(Proxy.provider._active_span_processor._span_processors)
"""


def test_a_provider_that_has_the_sdks_in_it_names_agents_and_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", WRAPPED], check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("writer\n()\n", "")


class Model:
    """As a model of Agno, which is told for which run it is asked."""

    async def aresponse(self, **arguments: Any) -> str:
        return current_agent()

    async def aresponse_stream(self, **arguments: Any) -> AsyncIterator[str]:
        yield current_agent()
        yield current_agent()


@pytest.mark.parametrize(
    ("run", "name"),
    [(SimpleNamespace(agent_name="writer"), "writer"), (SimpleNamespace(team_name="desk"), "desk"), (None, "Model")],
)
async def test_a_call_of_a_model_of_agno_has_the_name_of_the_agent_or_team_that_runs(run: Any, name: str) -> None:
    model = Model()
    assert await _run_named(_agent_of_agno, model.aresponse, model, (), {"run_response": run}) == name
    pieces = _run_named(_agent_of_agno, model.aresponse_stream, model, (), {"run_response": run})
    assert [(piece, current_agent()) async for piece in pieces] == [(name, "")] * 2
