"""A conversation through the SDK of each API. Its history is what the SDK returned, as agents send it back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.wire.exchange import HttpExchange, read_exchange


@dataclass(frozen=True, kw_only=True)
class SdkReply:
    """What an SDK returned, of several choices the first. ``calls`` are all choices, where the API has token ids."""

    text: str
    tools: Sequence[Any] = ()
    """Id, name and arguments of each tool call."""
    calls: Sequence[LLMCall] = ()

    @property
    def key(self) -> str:
        """As :func:`groundwire.adapters.tracing.scripted_server.message_key`."""
        return json.dumps(["assistant", self.text, [[name, arguments] for _, name, arguments in self.tools]])


class Thread(ABC):
    """One conversation; ``tool`` is a function as chat completions name it."""

    package: ClassVar[str]
    several: ClassVar[bool] = False
    """Whether the API has several choices."""

    def __init__(self, url: str, key: str, model: str, system: str) -> None:
        self.url, self.key, self.model, self.system = url, key, model, system
        self.history: list[Any] = []

    @property
    def root(self) -> str:
        """The address without the version."""
        return self.url.rstrip("/").removesuffix("/v1")

    def say(self, text: str) -> None:
        """Add the user's message."""
        self.history.append({"role": "user", "content": text})

    @abstractmethod
    def add_results(self, reply: SdkReply, text: str) -> None:
        """Add ``text`` as the result of each of the reply's tool calls."""

    @abstractmethod
    async def ask(self, *, stream: bool, limit: int, tool: Any = None, schema: Any = None, n: int = 1) -> SdkReply:
        """The reply to the history, to which it is added. Raises the SDK's errors."""


class _OpenAI(Thread):
    package = "openai"

    @cached_property
    def client(self) -> Any:
        """Without retries: a request that is sent again is sampled again."""
        import openai

        return openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0)


class _Chat(_OpenAI):
    several = True

    def add_results(self, reply: SdkReply, text: str) -> None:
        self.history += [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, *_ in reply.tools]

    async def ask(self, *, stream: bool, limit: int, tool: Any = None, schema: Any = None, n: int = 1) -> SdkReply:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        options |= {"tools": [{"type": "function", "function": tool}]} if tool else {}
        options |= {"n": n} if n > 1 else {}
        if schema:
            answer = {"name": "answer", "schema": schema, "strict": True}
            options["response_format"] = {"type": "json_schema", "json_schema": answer}
        got = await self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "system", "content": self.system}, *self.history],
            max_tokens=limit,
            logprobs=True,
            extra_body={"return_token_ids": True},
            **options,
        )
        replies = [chunk async for chunk in got] if stream else [got]
        bodies = [reply.model_dump_json(exclude_unset=True) for reply in replies]
        body = "".join(f"data: {each}\n\n" for each in bodies) if stream else bodies[0]
        exchange = HttpExchange(rollout_id="", attempt_id="", body=body.encode(), streamed=stream, choices=n)
        calls = [read_exchange(exchange, choice, 0) for choice in range(n)]
        message = {"role": "assistant", "content": None, **calls[0].reply}
        self.history.append(message)
        functions = [(each["id"], each["function"]) for each in message.get("tool_calls") or ()]
        return SdkReply(
            text=message["content"] or "",
            tools=[(call_id, each["name"], json.loads(each["arguments"])) for call_id, each in functions],
            calls=calls,
        )


class _Responses(_OpenAI):
    def add_results(self, reply: SdkReply, text: str) -> None:
        self.history += [
            {"type": "function_call_output", "call_id": call_id, "output": text} for call_id, *_ in reply.tools
        ]

    async def ask(self, *, stream: bool, limit: int, tool: Any = None, schema: Any = None, n: int = 1) -> SdkReply:
        options: dict[str, Any] = {"tools": [{"type": "function", **tool}]} if tool else {}
        if schema:
            options["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
        got = await self.client.responses.create(
            model=self.model,
            instructions=self.system,
            input=self.history,
            max_output_tokens=limit,
            store=False,
            stream=stream,
            **options,
        )
        events = [event async for event in got] if stream else []
        response = events[-1].response if stream else got
        self.history += response.output
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        calls = [item for item in response.output if item.type == "function_call"]
        return SdkReply(
            text="".join(deltas) if stream else response.output_text,
            tools=[(item.call_id, item.name, json.loads(item.arguments)) for item in calls],
        )


class _Messages(Thread):
    package = "anthropic"

    @cached_property
    def client(self) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.root, api_key=self.key, max_retries=0)

    def add_results(self, reply: SdkReply, text: str) -> None:
        results = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, *_ in reply.tools]
        self.history.append({"role": "user", "content": results})

    async def ask(self, *, stream: bool, limit: int, tool: Any = None, schema: Any = None, n: int = 1) -> SdkReply:
        options: dict[str, Any] = {}
        if tool:
            named = {"name": tool["name"], "description": tool["description"]}
            options["tools"] = [{**named, "input_schema": tool["parameters"]}]
        if schema:
            options["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        options |= {"model": self.model, "system": self.system, "max_tokens": limit, "messages": self.history}
        if stream:
            async with self.client.messages.stream(**options) as events:
                got = await events.get_final_message()
        else:
            got = await self.client.messages.create(**options)
        self.history.append({"role": "assistant", "content": got.content})
        return SdkReply(
            text="".join(block.text for block in got.content if block.type == "text"),
            tools=[(block.id, block.name, block.input) for block in got.content if block.type == "tool_use"],
        )


class _GenerateContent(Thread):
    package, several = "google-genai", True

    @cached_property
    def client(self) -> Any:
        from google import genai

        return genai.Client(api_key=self.key, http_options={"base_url": self.root, "api_version": "v1beta"})

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "parts": [{"text": text}]})

    def add_results(self, reply: SdkReply, text: str) -> None:
        results = [{"id": call_id, "name": name, "response": {"output": text}} for call_id, name, _ in reply.tools]
        self.history.append({"role": "user", "parts": [{"function_response": result} for result in results]})

    async def ask(self, *, stream: bool, limit: int, tool: Any = None, schema: Any = None, n: int = 1) -> SdkReply:
        config: dict[str, Any] = {"system_instruction": self.system, "max_output_tokens": limit}
        config |= {"candidate_count": n} if n > 1 else {}
        config |= {"response_mime_type": "application/json", "response_json_schema": schema} if schema else {}
        if tool:
            named = {"name": tool["name"], "description": tool["description"]}
            function = {**named, "parameters_json_schema": tool["parameters"]}
            config["tools"] = [{"function_declarations": [function]}]
        options: dict[str, Any] = {"model": self.model, "contents": self.history, "config": config}
        if stream:
            replies = [reply async for reply in await self.client.aio.models.generate_content_stream(**options)]
        else:
            replies = [await self.client.aio.models.generate_content(**options)]
        contents = [choice.content for reply in replies for choice in reply.candidates or () if not choice.index]
        parts = [part for content in contents for part in (content and content.parts) or ()]
        text = "".join(part.text for part in parts if part.text and not part.thought)
        found = [part for part in parts if part.function_call]
        self.history.append({"role": "model", "parts": [*([{"text": text}] if text else []), *found]})
        calls = [part.function_call for part in found]
        return SdkReply(text=text, tools=[(call.id, call.name, dict(call.args or {})) for call in calls])


APIS: Mapping[str, type[Thread]] = {
    "chat": _Chat,
    "responses": _Responses,
    "messages": _Messages,
    "generateContent": _GenerateContent,
}
