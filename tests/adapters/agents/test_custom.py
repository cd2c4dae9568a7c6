"""Any function is a backend, an option without effect is refused, and errors are one line."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from groundwire import adapters
from groundwire.adapters import (
    AgentError,
    AgentSetupError,
    Answer,
    Backend,
    Endpoint,
    Question,
    ToolError,
    agent_backend,
)
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import AgentStep
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.rollouts import factory
from groundwire.train.rollouts.factory import make_backend

QUESTION = Question(id="1", text="Which singers?", database="", answers=SQL)
ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")


async def plain(question: Question, endpoint: Endpoint) -> str:
    return f"{question.text} {endpoint.model}"


not_a_function = "SELECT 1"


def synchronous(question: Question, endpoint: Endpoint) -> str:
    time.sleep(0.01)  # not allowed on an event loop
    return f"{question.text} {threading.current_thread().name}"


@functools.wraps(plain)
def decorated(question: Question, endpoint: Endpoint) -> Any:
    return plain(question, endpoint)


async def takes_three(task: Any, endpoint: Any, more: Any) -> str:
    return ""


async def returns_nothing(question: Question, endpoint: Endpoint) -> Any:
    return None


class NeedsAnArgument:
    def __init__(self, model: str) -> None:
        pass


class Callable:
    agents = ("a", "b")

    async def __call__(self, question: Question, endpoint: Endpoint) -> Answer:
        return Answer(text="x", steps=[AgentStep(agent="a", kind="llm", input="", output="", ok=True)])


callable_object = Callable()


def _answer(agent: Any) -> Answer:
    return asyncio.run(agent_backend(agent).run(QUESTION, ENDPOINT))


def test_text_is_an_answer_and_an_answer_keeps_its_steps() -> None:
    assert _answer(plain).text == "Which singers? m"
    assert _answer(f"{__name__}:plain").text == "Which singers? m"
    assert _answer(f"{__name__}:callable_object").steps[0]["agent"] == "a"
    assert _answer(functools.partial(plain, endpoint=ENDPOINT, question=QUESTION).func).text


def test_a_plain_def_runs_in_its_own_thread_with_the_rollouts_context() -> None:
    assert _answer(synchronous).text == "Which singers? agent 1"
    assert agent_backend(synchronous).threaded
    assert not agent_backend(plain).threaded
    variable: ContextVar[str] = ContextVar("variable")

    def reads(question: Question, endpoint: Endpoint) -> str:
        return variable.get()

    async def run() -> Answer:
        variable.set("of this rollout")
        return await agent_backend(reads).run(QUESTION, ENDPOINT)

    assert asyncio.run(run()).text == "of this rollout"


def test_plain_defs_run_as_concurrently_as_rollouts() -> None:
    everybody = threading.Barrier(200, timeout=600)

    def waits_for_the_others(question: Question, endpoint: Endpoint) -> str:
        everybody.wait()
        return "x"

    async def run() -> list[Answer]:
        backend = agent_backend(waits_for_the_others)
        return await asyncio.gather(*(backend.run(QUESTION, ENDPOINT) for _ in range(everybody.parties)))

    assert len(asyncio.run(run())) == everybody.parties


def test_a_plain_def_ends_silently_after_its_time_limit(capfd: pytest.CaptureFixture[str]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hangs(question: Question, endpoint: Endpoint) -> str:
        begun.set()
        go_on.wait()
        return "too late"

    async def run() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(agent_backend(hangs).run(QUESTION, ENDPOINT), 0.2)

    asyncio.run(run())
    [thread] = [each for each in threading.enumerate() if each.name == "agent 1"]
    assert begun.is_set()
    assert thread.daemon
    go_on.set()
    thread.join(600)
    assert capfd.readouterr().err == ""


def test_an_async_function_behind_a_decorator_is_awaited() -> None:
    assert _answer(decorated).text == "Which singers? m"


def test_a_functions_agents_are_its_attribute() -> None:
    assert agent_backend(plain).agents == ()
    assert agent_backend(callable_object).agents == ("a", "b")


def test_no_answer_is_an_empty_one() -> None:
    assert _answer(returns_nothing).text == ""


def test_an_exception_is_an_agent_error_unless_it_is_a_backend_error() -> None:
    async def broken(question: Question, endpoint: Endpoint) -> str:
        raise adapters.ToolError("the disk is gone") if question.id == "1" else ZeroDivisionError("a bug")

    with pytest.raises(adapters.ToolError, match="the disk is gone"):
        _answer(broken)
    with pytest.raises(AgentError, match="ZeroDivisionError: a bug"):
        asyncio.run(agent_backend(broken).run(Question(id="2", text="", database=""), ENDPOINT))

    def ends_an_iteration(question: Question, endpoint: Endpoint) -> str:
        return next(iter(()))

    with pytest.raises(AgentError, match="StopIteration"):
        _answer(ends_an_iteration)


async def _asks(base_url: str | None, endpoint: Endpoint, api_key: str | None = "x") -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model=endpoint.model, messages=[{"role": "user", "content": "?"}])
    return ""


async def test_a_call_to_another_address_is_an_error_with_that_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    async with ScriptedPolicyServer(replies=["SELECT 1"]) as policy:
        ours = Endpoint(base_url=f"{policy.base_url}/rollout/r/v1", model="m")

        async def elsewhere(question: Question, endpoint: Endpoint) -> str:
            return await _asks("http://me:secret@127.0.0.1:9/v1", endpoint)

        async def without_its_path(question: Question, endpoint: Endpoint) -> str:
            return await _asks(f"{policy.base_url}/other/v1", endpoint)

        async def without_key(question: Question, endpoint: Endpoint) -> str:
            return await _asks(None, endpoint, None)

        async def right(question: Question, endpoint: Endpoint) -> str:
            return await _asks(endpoint.base_url, endpoint)

        for agent, kind, message in (
            (elsewhere, ToolError, "asked http://127.0.0.1:9/v1/chat/completions, not its endpoint: give"),
            (without_its_path, AgentError, f"asked {policy.base_url}/other/v1/chat/completions, not its endpoint: "),
            (without_key, AgentSetupError, "asked https://api.openai.com/v1/chat/completions, not its endpoint"),
        ):
            with pytest.raises(kind, match=re.escape(message)) as raised:
                await agent_backend(agent).run(QUESTION, ours)
            assert ours.base_url in str(raised.value)
            assert "secret" not in str(raised.value)
        with pytest.raises(adapters.EndpointError, match="answered 404"):
            await agent_backend(right).run(QUESTION, ours)
    with pytest.raises(adapters.EndpointError, match="the model's endpoint gave no answer: ConnectError"):
        await agent_backend(right).run(QUESTION, ENDPOINT)


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        ("nowhere:f", "there is no module 'nowhere'"),
        ("nowhere.deep:f", "there is no module 'nowhere'"),
        (
            "test_custom:missing",
            "has no 'missing'; it has plain, synchronous, decorated, returns_nothing, callable_object",
        ),
        ("test_custom:not_a_function", "is 'SELECT 1': give an agent of a framework .agent-framework, agno, autogen"),
        ("test_custom:NeedsAnArgument", "is <class .*: give an agent of a framework"),
        ("of_a_package:agent", "of_a_package has no 'agent'; of_a_package.inner has writer"),
        ("test_custom", "write it as module:name or path/to/file.py:name"),
        ("raises_on_import:f", "raises_on_import cannot be imported: RuntimeError: not today"),
        ("needs_more:f", "the package 'not_installed', which is not installed here; .* give --runner-python"),
        ("./no/such/file.py:f", "there is no file ./no/such/file.py"),
    ],
)
def test_an_unusable_agent_has_a_one_line_error(
    agent: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('not today')")
    (tmp_path / "needs_more.py").write_text("import not_installed")
    (tmp_path / "of_a_package").mkdir()
    (tmp_path / "of_a_package" / "__init__.py").write_text("from . import inner")
    inner = "writer = type('Agent', (), {'__module__': 'agno.agent.agent', '__qualname__': 'Agent'})()"
    (tmp_path / "of_a_package" / "inner.py").write_text(inner)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=sentence) as caught:
        make_backend(resolve("fast", backend="custom", agent=agent))
    assert "\n" not in str(caught.value)


def test_a_backend_gets_the_options_that_its_constructor_names(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(kw_only=True)
    class Lengthy(Backend):
        max_turns: int = 3
        lines: int = 1

        async def run(self, question: Question, endpoint: Endpoint) -> Answer:
            return Answer(text="x" * self.lines)

    monkeypatch.setattr(factory.adapters, "get", lambda name: Lengthy)
    backend: Any = make_backend(resolve("fast", agent_options={"lines": 5}))
    assert (backend.max_turns, backend.lines) == (2, 5)  # of the preset, and given


def test_a_function_that_makes_the_agent_gets_its_options_and_the_runs_prompts() -> None:
    def make(*, style: str = "short", limit: int = 3, prompts: Mapping[str, str] = {"rule": "Be brief."}) -> Any:
        return lambda question: f"{style} {limit} {prompts['rule']}"

    async def answer(backend: Backend, **prompts: str) -> str:
        endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m", prompts=prompts)
        return (await backend.run(Question(id="1", text="?", database=""), endpoint)).text

    backend = agent_backend(make, options={"style": "long", "limit": 5})
    assert backend.default_prompts("prose") == {"rule": "Be brief."}
    assert asyncio.run(answer(backend)) == "long 5 Be brief."
    assert asyncio.run(answer(backend, rule="Be exact.")) == "long 5 Be exact."
    with pytest.raises(ValueError, match=r"has no option 'styl'; it has style, limit$"):
        agent_backend(make, options={"styl": "long"})
    with pytest.raises(ValueError, match="the option limit of agent 'make' is 'x'; it must be a valid integer"):
        agent_backend(make, options={"limit": "x"})


async def test_an_agent_of_earlier_prompts_is_left_when_many_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundwire.adapters.agents.making._KEPT", 2)
    left: list[str] = []

    @asynccontextmanager
    async def make(*, prompts: Mapping[str, str] | None = None) -> AsyncIterator[Any]:
        name = (prompts or {"rule": "own"})["rule"]
        try:
            yield lambda question: name
        finally:
            left.append(name)

    backend = agent_backend(make)
    for name in "abac":
        endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m", prompts={"rule": name})
        assert (await backend.run(Question(id="1", text="?", database=""), endpoint)).text == name
    assert left == ["b"]
    await backend.stop()
    assert sorted(left) == ["a", "b", "c"]


def test_a_set_option_without_effect_is_refused() -> None:
    custom = {"backend": "custom", "agent": f"{__name__}:plain"}
    make_backend(resolve("fast", **custom))
    make_backend(resolve("hf", **custom))
    with pytest.raises(ConfigError, match="is no function that makes an agent, so it has no options: leave out max_t"):
        make_backend(resolve("fast", **custom, agent_options={"max_turns": 7}))
    with pytest.raises(ConfigError, match=r"agent 'mcp' has no option 'check_last'; it has max_turns, prompt"):
        make_backend(resolve("fast", backend="mcp", agent_options={"check_last": True}))
    make_backend(resolve("qwen", trainer="verl", backend="mcp"))  # the preset's check_last is for another agent
    with pytest.raises(ConfigError, match="--agent means nothing to backend 'mcp'"):
        make_backend(resolve("fast", backend="mcp", agent="a:b"))
    with pytest.raises(ConfigError, match="needs --agent module:name"):
        make_backend(resolve("fast", backend="custom"))


def test_a_value_that_a_backend_refuses_has_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(kw_only=True)
    class Picky:
        max_turns: int

        def __post_init__(self) -> None:
            raise ValueError(f"max_turns is {self.max_turns}; I like 3")

    monkeypatch.setattr(factory.adapters, "get", lambda name: Picky)
    with pytest.raises(ConfigError, match="max_turns is 2; I like 3"):
        make_backend(resolve("fast", agent_options={"max_turns": 2}))
    with pytest.raises(
        ConfigError, match="the option max_turns of agent 'langgraph' is 'x'; it must be a valid integer"
    ):
        make_backend(resolve("fast", agent_options={"max_turns": "x"}))


@pytest.mark.parametrize(
    ("module", "package"), [("agents", "openai-agents"), ("langchain_openai.chat_models", "langchain-openai")]
)
def test_a_missing_framework_has_an_error_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    def get(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(factory.adapters, "get", get)
    with pytest.raises(ConfigError, match=rf"backend 'langgraph' cannot be imported: .*; pip install {package}$"):
        make_backend(resolve("fast"))
