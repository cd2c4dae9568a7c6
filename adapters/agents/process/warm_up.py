"""What libraries build at their first call, built in the template, so that no child builds it.

The openai client and the Agents SDK build their types at their first request. A client and an agent of our own, with a
transport that answers at once, make them do so; the author's agent is not run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

_USAGE = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
_CHAT = {
    **{"id": "0", "object": "chat.completion", "created": 0, "model": "m"},
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_TEXT = {"type": "output_text", "text": "ok", "annotations": []}
_RESPONSE = {
    **{"id": "0", "object": "response", "created_at": 0, "model": "m", "status": "completed", "tools": []},
    **{"parallel_tool_calls": False, "tool_choice": "auto"},
    "output": [{"type": "message", "id": "0", "role": "assistant", "status": "completed", "content": [_TEXT]}],
    "usage": {
        **_USAGE,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}


def built_models() -> list[str]:
    """The names of the models of pydantic that are built. Libraries leave theirs to the first use."""
    return [name for name, model in _models() if model.__pydantic_complete__]


def _models() -> Iterator[tuple[str, Any]]:
    pydantic = sys.modules.get("pydantic")
    remaining = [pydantic.BaseModel] if pydantic is not None else []
    while remaining:
        subclasses = remaining.pop().__subclasses__()
        remaining += subclasses
        for model in subclasses:
            yield f"{model.__module__}.{model.__qualname__}", model


def warm_up(models: Collection[str]) -> None:
    """Build ``models`` of pydantic, by their names, and make the imported libraries build what their first call builds.

    What fails is left to the children.
    """
    for name, model in [*_models()]:
        if name in models and not model.__pydantic_complete__:
            with suppress(Exception):
                model.model_rebuild()
    for package, make in _CALLS.items():
        if package in sys.modules:
            with suppress(Exception):
                asyncio.run(make())


def _client() -> Any:
    import openai
    from openai import _base_client

    client: Any = _base_client
    httpx: Any = getattr(client, "httpx2", None) or client.httpx  # newer versions have another package

    def answer(request: Any) -> Any:
        reply = _RESPONSE if request.url.path.endswith("/responses") else _CHAT
        return httpx.Response(200, content=json.dumps(reply), headers={"content-type": "application/json"})

    transport = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return openai.AsyncOpenAI(api_key="none", base_url="http://127.0.0.1/v1", http_client=transport)


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


_CALLS: dict[str, Callable[[], Any]] = {"openai": _call_openai, "agents": _run_agents_sdk}
