"""Names of agents from spans, without OpenTelemetry's SDK, and where a provider has the SDK's in it."""

from __future__ import annotations

import subprocess
import sys

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
