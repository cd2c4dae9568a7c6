"""One conversation gives the same tokens and loss masks, whatever client and API the agent uses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from providers import bedrock_ask, gemini_ask, ollama_ask
from wire import CALL, CHAT_TOOL, PARAMETERS, Bench, bench

from groundwire.adapters.tracing.scripted_server import END, Reply, encode, render

SYSTEM, QUESTION, RESULT = "Answer with the tool.", "How many singers?", "[[42]]"
LOOK, ANSWER = "Let me look: ", "There are 42 schöne singers."
FUNCTION: Any = {"name": "run", "description": "Run it", "parameters": PARAMETERS}
RESPONSES_TOOL: Any = {"type": "function", "strict": False, **FUNCTION}
ANTHROPIC_TOOL: Any = {"name": "run", "description": "Run it", "input_schema": PARAMETERS}
CHAT: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]

__all__ = ["bench"]


def tool_message(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": RESULT}


async def openai_chat(b: Bench, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none") as client:

        async def ask(messages: list[Any]) -> Any:
            request: Any = {"model": "m", "messages": messages, "tools": [CHAT_TOOL]}
            if not stream:
                return (await client.chat.completions.create(**request)).choices[0].message
            state = ChatCompletionStreamState()
            async for chunk in await client.chat.completions.create(**request, stream=True):
                state.handle_chunk(chunk)
            return state.get_final_completion().choices[0].message

        first = await ask(CHAT)
        [made] = first.tool_calls
        function = {"name": made.function.name, "arguments": made.function.arguments}
        said = {"role": "assistant", "content": first.content, "tool_calls": [{**made.to_dict(), "function": function}]}
        second = await ask([*CHAT, said, tool_message(made.id)])
        return second.content


async def openai_responses(b: Bench, stream: bool, *, by_id: bool = False) -> str:
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none") as client:

        async def ask(items: list[Any], **options: Any) -> Any:
            request: Any = {"model": "m", "instructions": SYSTEM, "input": items, "tools": [RESPONSES_TOOL], **options}
            if not stream:
                return await client.responses.create(**request)
            async with client.responses.stream(**request) as events:
                return await events.get_final_response()

        asked: list[Any] = [{"role": "user", "content": QUESTION}]
        first = await ask(asked)
        call_id = next(item.call_id for item in first.output if item.type == "function_call")
        output = [{"type": "function_call_output", "call_id": call_id, "output": RESULT}]
        if by_id:
            return (await ask(output, previous_response_id=first.id)).output_text
        return (await ask([*asked, *(item.to_dict() for item in first.output), *output])).output_text


async def openai_responses_by_id(b: Bench, stream: bool) -> str:
    return await openai_responses(b, stream, by_id=True)


async def anthropic_messages(b: Bench, stream: bool) -> str:
    async with anthropic.AsyncAnthropic(base_url=b.root, api_key="none") as client:

        async def ask(messages: list[Any]) -> Any:
            request: Any = {"model": "m", "max_tokens": 99, "system": SYSTEM, "tools": [ANTHROPIC_TOOL]}
            if not stream:
                return await client.messages.create(messages=messages, **request)
            async with client.messages.stream(messages=messages, **request) as events:
                return await events.get_final_message()

        asked: list[Any] = [{"role": "user", "content": QUESTION}]
        first = await ask(asked)
        use = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
        said = {"role": "assistant", "content": first.content}
        return (await ask([*asked, said, {"role": "user", "content": [result]}])).content[0].text


async def gemini(b: Bench, stream: bool, *, sse: bool = True) -> str:
    declaration = {
        "name": "run",
        "description": "Run it",
        "parameters": {"type": "OBJECT", "properties": {"sql": {"type": "STRING"}}, "required": ["sql"]},
    }
    request = {"systemInstruction": {"parts": [{"text": SYSTEM}]}, "tools": [{"functionDeclarations": [declaration]}]}
    asked: list[Any] = [{"role": "user", "parts": [{"text": QUESTION}]}]
    said = await gemini_ask(b, stream, sse=sse, contents=asked, **request)
    [made] = [part["functionCall"] for part in said["parts"] if "functionCall" in part]
    response = {"name": made["name"], "response": {"result": RESULT}}  # without an id, as of many clients
    turns = [*asked, said, {"role": "user", "parts": [{"functionResponse": response}]}]
    return (await gemini_ask(b, stream, sse=sse, contents=turns, **request))["parts"][0]["text"]


async def gemini_list(b: Bench, stream: bool) -> str:
    return await gemini(b, stream, sse=False)


async def bedrock(b: Bench, stream: bool) -> str:
    spec = {"toolSpec": {"name": "run", "description": "Run it", "inputSchema": {"json": PARAMETERS}}}
    request: Any = {"system": [{"text": SYSTEM}], "toolConfig": {"tools": [spec]}}
    asked: list[Any] = [{"role": "user", "content": [{"text": QUESTION}]}]
    said = await bedrock_ask(b, stream, messages=asked, **request)
    [use] = [block["toolUse"] for block in said["content"] if "toolUse" in block]
    result = {"toolResult": {"toolUseId": use["toolUseId"], "content": [{"text": RESULT}]}}
    turns = [*asked, said, {"role": "user", "content": [result]}]
    return (await bedrock_ask(b, stream, messages=turns, **request))["content"][0]["text"]


async def ollama(b: Bench, stream: bool) -> str:
    said = await ollama_ask(b, stream, messages=CHAT, tools=[CHAT_TOOL])
    [made] = said["tool_calls"]
    made.pop("id")  # the client of Ollama drops it
    result = {"role": "tool", "tool_name": "run", "content": RESULT}
    return (await ollama_ask(b, stream, messages=[*CHAT, said, result], tools=[CHAT_TOOL]))["content"]


async def litellm_chat(b: Bench, stream: bool, *, model: str = "openai/m", url: str = "") -> str:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    async def ask(messages: list[Any]) -> Any:
        request = {"model": model, "messages": messages, "tools": [CHAT_TOOL], "api_base": url or b.url}
        answer = await litellm.acompletion(**request, api_key="none", stream=stream, max_retries=0)
        if stream:
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer])
        return answer.choices[0].message

    first = await ask(CHAT)
    second = await ask([*CHAT, first.model_dump(), tool_message(first.tool_calls[0].id)])
    return second.content


async def litellm_anthropic(b: Bench, stream: bool) -> str:
    return await litellm_chat(b, stream, model="anthropic/m", url=b.root)


async def litellm_gemini(b: Bench, stream: bool) -> str:
    return await litellm_chat(b, stream, model="gemini/gemini-2.5-flash", url=b.root)


async def litellm_ollama(b: Bench, stream: bool) -> str:
    conversation = litellm_chat(b, stream, model="ollama_chat/m", url=b.root)
    return await asyncio.to_thread(asyncio.run, conversation)  # it asks for /api/show and blocks its event loop


async def litellm_responses(b: Bench, stream: bool) -> str:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    async def ask(items: list[Any]) -> Any:
        answer = await litellm.aresponses(
            model="openai/m", instructions=SYSTEM, input=items, tools=[RESPONSES_TOOL], stream=stream,
            api_base=b.url, api_key="none",
        )  # fmt: skip
        return [event async for event in answer][-1].response if stream else answer

    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    items = [item if isinstance(item, dict) else item.model_dump() for item in (await ask(asked)).output]
    call_id = next(item["call_id"] for item in items if item["type"] == "function_call")
    output = {"type": "function_call_output", "call_id": call_id, "output": RESULT}
    return (await ask([*asked, *items, output])).output_text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("converse", "wire_api"),
    [
        (openai_chat, "chat"), (openai_responses, "responses"), (openai_responses_by_id, "responses"),
        (anthropic_messages, "messages"), (litellm_chat, "chat"), (litellm_anthropic, "messages"),
        (litellm_responses, "responses"), (gemini, "generate_content"), (gemini_list, "generate_content"),
        (bedrock, "converse"), (ollama, "ollama"), (litellm_gemini, "generate_content"), (litellm_ollama, "ollama"),
    ],
)  # fmt: skip
async def test_the_same_conversation_gives_the_same_trajectory(
    bench: Any, converse: Callable[[Bench, bool], Awaitable[str]], wire_api: str, stream: bool
) -> None:
    b = await bench(Reply(text=LOOK, tool_calls=[CALL]), ANSWER)
    assert await converse(b, stream) == ANSWER
    said = {"role": "assistant", "content": LOOK, "tool_calls": [CALL]}
    prompt, full = render(CHAT), render([*CHAT, said, tool_message("call-1")])
    call = [*encode(LOOK + json.dumps(CALL["function"], sort_keys=True)), END]
    inserted = full[len(prompt) + len(call) :]
    [trajectory] = await b.trajectories()
    assert trajectory.prompt_ids == prompt
    assert trajectory.response_ids == [*call, *inserted, *encode(ANSWER), END]
    assert trajectory.loss_mask == [*[1] * len(call), *[0] * len(inserted), *[1] * (len(encode(ANSWER)) + 1)]
    calls = await b.calls()
    assert [each.tools for each in calls] == [[CHAT_TOOL]] * 2
    assert [each.wire_api for each in calls] == [wire_api] * 2
