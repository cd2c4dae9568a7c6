"""The shipped backends pass the conformance kit, and the kit finds errors."""

from __future__ import annotations

import os
from pathlib import Path

import openai
import pytest
from programs import run

from groundwire.adapters import Backend, Endpoint, Question
from groundwire.adapters.conformance import BackendConformance, Recording, load_backend
from groundwire.adapters.sql_agents import prompts


async def asks_and_checks(question: Question, endpoint: Endpoint) -> str:
    """As many calls as the other backends, with an OpenAI client only."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:

        async def ask(agent: str, message: str) -> str:
            reply = await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": message}],
                extra_headers=endpoint.agent_headers(agent),
                **endpoint.sampling,
            )
            return reply.choices[0].message.content or ""

        sql = prompts.extract_sql(await ask("writer", prompts.write("write", question.text)))
        await ask("checker", prompts.write("check", question.text, sql, "[]"))
        return sql


def asks_and_checks_in_a_thread(question: Question, endpoint: Endpoint) -> str:
    """The same with a blocking client."""
    with openai.OpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:

        def ask(agent: str, message: str) -> str:
            reply = client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": message}],
                extra_headers=endpoint.agent_headers(agent),
                **endpoint.sampling,
            )
            return reply.choices[0].message.content or ""

        sql = prompts.extract_sql(ask("writer", prompts.write("write", question.text)))
        ask("checker", prompts.write("check", question.text, sql, "[]"))
        return sql


asks_and_checks_in_a_thread.agents = ("writer", "checker")  # type: ignore[attr-defined]
asks_and_checks.agents = ("writer", "checker")  # type: ignore[attr-defined]


FUNCTIONS = [f"{__name__}:asks_and_checks", f"{__name__}:asks_and_checks_in_a_thread"]


class TestShipped(BackendConformance):
    @pytest.fixture(scope="class", params=["langgraph", "openai-agents", "mcp", *FUNCTIONS])
    @classmethod
    def backend_under_test(cls, request: pytest.FixtureRequest) -> Backend:
        return load_backend(request.param)

    def test_all_shipped_backends_record_the_same(self, recording: Recording) -> None:
        assert recording.response_ids == [[1000, 1001, 1002, 1003, 1004], [1010, 1011, 1012, 1013, 1014]]
        assert recording.trained_ids == [id_ for ids in recording.response_ids for id_ in ids]
        assert recording.reward == 1.0


class TestStreamed(BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def backend_under_test(cls) -> Backend:
        return load_backend("streamed_sql_agent:streamed")


class TestExample(BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def backend_under_test(cls) -> Backend:
        return load_backend("examples.custom_agent:answer")


CHANGES_REPLIES = """
import openai

async def answer(question, endpoint):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": question.text}]
        for _ in range(2):
            reply = await client.chat.completions.create(
                model=endpoint.model, messages=messages, **endpoint.sampling
            )
            text = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": text.lower()}, {"role": "user", "content": "Sure?"}]
        return text.split("```")[1].removeprefix("sql").strip()
"""


def test_the_kit_runs_with_one_command_and_explains_a_failure(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(CHANGES_REPLIES)
    kit = ["-p", "groundwire.adapters.conformance", "--pyargs", "groundwire.adapters.conformance"]
    done = run(
        *("-m", "pytest", "-p", "no:cacheprovider", *kit, "--backend-under-test", "theirs:answer"),
        folder=tmp_path,
        environment={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # the kit needs no other plugin
    )
    assert "the agent changed the messages before its last one" in done.stdout
    assert "1 failed, 10 passed" in done.stdout
    assert done.returncode == 1
