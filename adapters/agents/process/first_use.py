"""What the import of an agent and its first rollout make: what forked processes lack, and what they have from it.

The openai client and the Agents SDK build their types at their first request. A client and an agent of our own, with a
transport that answers at once, make them do so in the template; the author's agent is not run there.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from groundwire.adapters.agents.changes import wrap

_TEXT = {"type": "output_text", "text": "ok", "annotations": []}
_REPLY = {
    **{"id": "0", "created": 0, "created_at": 0, "model": "m", "status": "completed", "tools": []},
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
    "output": [{"type": "message", "id": "0", "role": "assistant", "status": "completed", "content": [_TEXT]}],
    "usage": {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens"), 1),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}
"""What both APIs of OpenAI reply, in one."""
_ssl_contexts: dict[Any, Any] = {}


def fork_hazards(processes: Iterable[int]) -> list[str]:
    """What does not work in a forked process: threads, and the ``processes`` that the import has started."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    return [
        *(f"the thread {thread.name!r} ({_target(thread)})" for thread in threads),
        *(f"the process {_command(pid)}" for pid in processes),
    ]


def _target(thread: threading.Thread) -> str:
    target: Any = getattr(thread, "_target", None) or type(thread).run
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return repr(words[:200])
    return str(pid)


def equal_generators() -> list[str]:
    """The names of random generators that are attributes of the app's own modules: all rollouts get equal numbers."""
    kinds: tuple[type, ...] = (random.Random,)
    if "numpy" in sys.modules:
        kinds += (sys.modules["numpy"].random.Generator, sys.modules["numpy"].random.RandomState)
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    files = ((module, getattr(module, "__file__", None)) for module in [*sys.modules.values()])
    own = [module for module, file in files if file and not file.startswith(installed)]
    return sorted(
        f"{module.__name__}.{name}"
        for module in own
        if not module.__name__.startswith("groundwire.")
        for name, value in [*vars(module).items()]
        if isinstance(value, kinds)
    )


def first_use(before: Collection[str]) -> dict[str, list[str]]:
    """The modules that have been imported since ``before``, and the names of the models of pydantic that are built:
    libraries leave theirs to the first use.
    """
    modules = [name for name in [*sys.modules] if name not in before]
    return {"modules": modules, "models": [name for name, model in _models() if model.__pydantic_complete__]}


def warm_up(used: Mapping[str, Collection[str]]) -> None:
    """Import and build what :func:`first_use` told, and what the first calls of libraries build.

    What fails is left to the children.
    """
    for name in used["modules"]:
        if name not in sys.modules:
            with suppress(BaseException):
                importlib.import_module(name)
    for name, model in [*_models()]:
        if name in used["models"] and not model.__pydantic_complete__:
            with suppress(Exception):
                model.model_rebuild()
    for package, call in _CALLS.items():
        if package in sys.modules:
            with suppress(Exception):
                call()


def _models() -> Iterator[tuple[str, Any]]:
    pydantic = sys.modules.get("pydantic")
    remaining = [pydantic.BaseModel] if pydantic is not None else []
    while remaining:
        subclasses = remaining.pop().__subclasses__()
        remaining += subclasses
        for model in subclasses:
            yield f"{model.__module__}.{model.__qualname__}", model


def share_ssl_contexts() -> None:
    """Let the clients of httpx with the usual settings have one SSL context: to read all certificates takes 20 ms."""

    def shared(create: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if args or kwargs.get("verify") is not True or kwargs.get("cert"):
            return create(*args, **kwargs)
        files = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
        key = create.__module__, *sorted(kwargs.items(), key=repr), *files
        if key not in _ssl_contexts:
            _ssl_contexts[key] = create(**kwargs)
        return _ssl_contexts[key]

    for package in ("httpx", "httpx2"):
        wrap(f"{package}._transports.default", "create_ssl_context", shared)


def _client() -> Any:
    import openai
    from openai import _base_client

    httpx: Any = getattr(_base_client, "httpx2", None) or vars(_base_client)["httpx"]  # of newer versions, or older

    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=_REPLY))
    http = httpx.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(api_key="none", base_url="http://127.0.0.1/v1", http_client=http)


async def _call_openai() -> None:
    async with _client() as client:
        await client.responses.create(model="m", input="x")
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


async def _run_agents_sdk() -> None:
    import agents

    def tool(text: str) -> str:
        return text

    async with _client() as client:
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            model = kind("m", client)
            tools = [agents.function_tool(tool, name_override="tool", description_override="A tool.")]
            agent = agents.Agent(name="agent", model=model, tools=tools)
            await agents.Runner.run(agent, "x", run_config=agents.RunConfig(tracing_disabled=True))


_CALLS: dict[str, Callable[[], Any]] = {
    "httpx": lambda: sys.modules["httpx"].Client().close(),  # its SSL context is that of all
    "httpx2": lambda: sys.modules["httpx2"].Client().close(),
    "litellm": lambda: sys.modules["litellm"].get_model_info("openai/none"),  # makes an index of its models
    "openai": lambda: asyncio.run(_call_openai()),
    "agents": lambda: asyncio.run(_run_agents_sdk()),
}
