"""Names of agents from spans, in an environment that has OpenTelemetry's API without its SDK."""

from __future__ import annotations

import subprocess
import sys

CODE = """
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
    done = subprocess.run([sys.executable, "-c", CODE], check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("writer\nreader\n''\n", "")
