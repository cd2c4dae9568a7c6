"""One turn with each API's own client: a question, and the reply in the form in which it is sent back."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState
from providers import bedrock_ask, gemini_ask, ollama_ask
from wire import PARAMETERS, Bench

from groundwire.adapters.tracing.wire.call import ChatCall, WireCall
from groundwire.adapters.tracing.wire.converse import ConverseCall
from groundwire.adapters.tracing.wire.generate_content import GenerateContentCall
from groundwire.adapters.tracing.wire.messages import MessagesCall
from groundwire.adapters.tracing.wire.ollama import OllamaCall
from groundwire.adapters.tracing.wire.responses import ResponsesCall

QUESTION = "How many?"
_FUNCTION: Any = {"name": "run", "description": "Run it", "parameters": PARAMETERS}


@dataclass(frozen=True)
class Form:
    """An API."""

    call: type[WireCall]
    ask: Callable[[Bench, bool, list[Any]], Awaitable[list[Any]]]
    """Sends items that follow the question, and returns those of the reply."""
    calls: Callable[[Any], list[tuple[Any, Any, Any]]]
    """The id, name and arguments of the calls in an item of a reply."""
    result: Callable[[Any, str], Any]
    """The item with the result of a call."""
    turns: str
    """The field of the items."""

    @property
    def question(self) -> Any:
        """The item of the question."""
        return QUESTIONS.get(self.call.name, {"role": "user", "content": QUESTION})


QUESTIONS: dict[str, Any] = {
    "generate_content": {"role": "user", "parts": [{"text": QUESTION}]},
    "converse": {"role": "user", "content": [{"text": QUESTION}]},
}


async def _chat(b: Bench, stream: bool, items: list[Any]) -> list[Any]:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": QUESTION}, *items]}
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none", max_retries=0) as client:
        if not stream:
            return [(await client.chat.completions.create(**asked)).choices[0].message.to_dict()]
        state = ChatCompletionStreamState()
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            state.handle_chunk(chunk)
        message: Any = state.get_final_completion().choices[0].message.to_dict()
        for call in message.get("tool_calls") or ():
            del call["function"]["parsed_arguments"]  # the parser's own
        return [message]


async def _responses(b: Bench, stream: bool, items: list[Any], **options: Any) -> list[Any]:
    tool = {"type": "function", "strict": False, **_FUNCTION}
    asked: Any = {"model": "m", "input": [{"role": "user", "content": QUESTION}, *items], "tools": [tool], **options}
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none", max_retries=0) as client:
        if not stream:
            return [item.to_dict() for item in (await client.responses.create(**asked)).output]
        async with client.responses.stream(**asked) as events:
            return [item.to_dict() for item in (await events.get_final_response()).output]


async def _encrypted(b: Bench, stream: bool, items: list[Any]) -> list[Any]:
    """As of clients that keep the summaries and encrypted contents of reasoning only."""
    output = await _responses(b, stream, items, include=["reasoning.encrypted_content"], store=False)
    return [
        {name: value for name, value in item.items() if name != "content"} for item in output if "summary" in item
    ] + [item for item in output if "summary" not in item]


async def _messages(b: Bench, stream: bool, items: list[Any]) -> list[Any]:
    asked: Any = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": QUESTION}, *items]}
    asked["tools"] = [{"name": "run", "input_schema": PARAMETERS}]
    async with anthropic.AsyncAnthropic(base_url=b.root, api_key="none", max_retries=0) as client:
        if not stream:
            content = (await client.messages.create(**asked)).content
        else:
            async with client.messages.stream(**asked) as events:
                content = (await events.get_final_message()).content
    return [{"role": "assistant", "content": [block.to_dict() for block in content]}]


async def _gemini(b: Bench, stream: bool, items: list[Any]) -> list[Any]:
    return [await gemini_ask(b, stream, contents=[QUESTIONS["generate_content"], *items])]


async def _bedrock(b: Bench, stream: bool, items: list[Any]) -> list[Any]:
    spec = {"toolSpec": {"name": "run", "inputSchema": {"json": PARAMETERS}}}
    turns = [QUESTIONS["converse"], *items]
    return [await bedrock_ask(b, stream, messages=turns, toolConfig={"tools": [spec]})]


async def _ollama(b: Bench, stream: bool, items: list[Any]) -> list[Any]:
    return [await ollama_ask(b, stream, messages=[{"role": "user", "content": QUESTION}, *items])]


def _chat_calls(item: Any) -> list[Any]:
    calls = [(call.get("id"), call["function"]) for call in item.get("tool_calls") or ()]
    return [(call_id, function["name"], function["arguments"]) for call_id, function in calls]


def _fields(blocks: Sequence[Any], names: Sequence[str]) -> list[Any]:
    return [tuple(block[name] for name in names) for block in blocks]


def _chat_result(call_id: Any, text: str) -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _responses_result(call_id: Any, text: str) -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


FORMS = {
    "responses": Form(
        ResponsesCall,
        _responses,
        lambda item: _fields([item] if item["type"] == "function_call" else (), ("call_id", "name", "arguments")),
        _responses_result,
        "input",
    ),
    "messages": Form(
        MessagesCall,
        _messages,
        lambda item: _fields([b for b in item["content"] if b["type"] == "tool_use"], ("id", "name", "input")),
        lambda call_id, text: {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call_id, "content": text}],
        },
        "messages",
    ),
    "generate_content": Form(
        GenerateContentCall,
        _gemini,
        lambda item: _fields(
            [part["functionCall"] for part in item["parts"] if "functionCall" in part], ("id", "name", "args")
        ),
        lambda call_id, text: {
            "role": "user",
            "parts": [{"functionResponse": {"id": call_id, "name": "run", "response": {"result": text}}}],
        },
        "contents",
    ),
    "converse": Form(
        ConverseCall,
        _bedrock,
        lambda item: _fields(
            [block["toolUse"] for block in item["content"] if "toolUse" in block], ("toolUseId", "name", "input")
        ),
        lambda call_id, text: {
            "role": "user",
            "content": [{"toolResult": {"toolUseId": call_id, "content": [{"text": text}]}}],
        },
        "messages",
    ),
    "ollama": Form(OllamaCall, _ollama, _chat_calls, _chat_result, "messages"),
}
"""The APIs that are translated to chat completions."""
CHAT = Form(ChatCall, _chat, _chat_calls, _chat_result, "messages")
ENCRYPTED = Form(ResponsesCall, _encrypted, FORMS["responses"].calls, _responses_result, "input")


def as_object(arguments: Any) -> Any:
    """A call's arguments as an object."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments
