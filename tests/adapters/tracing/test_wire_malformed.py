"""A malformed request is refused in one sentence, in every API; it is never a fault of the proxy."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from groundwire.adapters.tracing.wire.call import Conversations
from groundwire.adapters.tracing.wire.converse import ConverseCall
from groundwire.adapters.tracing.wire.exchange import HttpExchange
from groundwire.adapters.tracing.wire.generate_content import GenerateContentCall
from groundwire.adapters.tracing.wire.messages import MessagesCall
from groundwire.adapters.tracing.wire.ollama import OllamaCall
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.adapters.tracing.wire.responses import ResponsesCall

RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "n"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "z"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "previous_response_id": None,
    "max_output_tokens": 3,
    "max_tool_calls": 2,
    "truncation": "disabled",
    "store": True,
    "stream": True,
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image", "source": {"url": "x"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t"},
                {"type": "text", "text": "q"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
    "thinking": {"type": "enabled"},
    "stop_sequences": ["a"],
    "stream": True,
}
GENERATE_CONTENT: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "alt": "sse",
    "systemInstruction": {"parts": [{"text": "s"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "q"}, {"inlineData": {"mimeType": "image/png", "data": "x"}}]},
        {
            "role": "model",
            "parts": [{"text": "t", "thought": True}, {"functionCall": {"id": "c", "name": "f", "args": {"a": 1}}}],
        },
        {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {"result": "r"}}}]},
    ],
    "tools": [
        {"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "properties": {"a": {"anyOf": []}}}}]}
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "propertyOrdering": ["a"], "properties": {"a": {"minItems": "1"}}},
        "stopSequences": ["a"],
        "responseModalities": ["TEXT"],
        "candidateCount": 1,
    },
}
CONVERSE: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "system": [{"text": "s"}, {"cachePoint": {"type": "default"}}],
    "messages": [
        {"role": "user", "content": [{"text": "q"}, {"image": {"format": "png", "source": {"bytes": "x"}}}]},
        {
            "role": "assistant",
            "content": [
                {"reasoningContent": {"reasoningText": {"text": "t"}}},
                {"text": "t"},
                {"toolUse": {"toolUseId": "c", "name": "f", "input": {"a": 1}}},
            ],
        },
        {"role": "user", "content": [{"toolResult": {"toolUseId": "c", "content": [{"text": "r"}, {"json": {}}]}}]},
    ],
    "toolConfig": {
        "tools": [{"toolSpec": {"name": "f", "inputSchema": {"json": {}}}}],
        "toolChoice": {"tool": {"name": "f"}},
    },
    "inferenceConfig": {"maxTokens": 3, "stopSequences": ["a"]},
    "additionalModelRequestFields": {"top_k": 1},
    "outputConfig": {"textFormat": {"structure": {"jsonSchema": {"schema": "{}"}}}, "effort": "low"},
}
OLLAMA: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "q", "images": ["x"]},
        {
            "role": "assistant",
            "content": "t",
            "thinking": "t",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "r", "tool_name": "f"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "options": {"num_predict": 3, "num_ctx": 3, "stop": ["a"]},
    "format": {"type": "object"},
    "think": "low",
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
REPLY = {"message": {"content": "a", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
VALUES: list[Any] = [
    None, 0, -1, 1.5, True, "", "x", [], {}, [[]], [None], ["a"], [{}], {"a": {}}, {"type": None}, {"type": []},
    {"type": {}}, {"type": "text"}, 10**30,
]  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from _paths(each, (*path, key))


def _mutated(request: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    request = copy.deepcopy(request)
    for _ in range(chance.choice([1, 1, 2, 3])):
        *parents, last = chance.choice(list(_paths(request)))
        inner: Any = request
        for key in parents:
            inner = inner[key]
        if chance.random() < 0.2:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(chance.choice(VALUES))
    return request


@pytest.mark.parametrize(
    ("api", "request_"),
    [
        (ResponsesCall, RESPONSES), (MessagesCall, MESSAGES), (GenerateContentCall, GENERATE_CONTENT),
        (ConverseCall, CONVERSE), (OllamaCall, OLLAMA),
    ],
)  # fmt: skip
def test_every_request_is_translated_or_refused_in_one_sentence(api: Any, request_: Any) -> None:
    chance, refusals, translated = random.Random(0), list[RefusedError](), 0
    for _ in range(3000):
        mutated = _mutated(request_, chance)
        try:
            call = api(mutated, Conversations().of("r"))
            call.exchange = HttpExchange(rollout_id="r", attempt_id="a")
            json.dumps([call.chat, call.reply({"choices": [REPLY]})])
            translated += 1
        except RefusedError as refused:
            refusals.append(refused)
    assert {refused.status for refused in refusals} == {400}
    assert max(len(str(refused)) for refused in refusals) < 300
    assert min(translated, len(refusals)) > 300


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls_without_ids_are_told_apart_by_their_places(streamed: bool) -> None:
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    call = MessagesCall({"messages": [{"role": "user", "content": "q"}]}, Conversations().of("r"))
    call.exchange = HttpExchange(rollout_id="r", attempt_id="a")
    if streamed:
        deltas = [{"tool_calls": [{"index": index, **made}]} for index, made in enumerate(calls)]
        events = b"".join(call.events({"choices": [{"delta": delta}]}) for delta in deltas) + call.end()
        assert re.findall(rb'"name": "(.)"', events) == [b"f", b"g"]
    else:
        reply = call.reply({"choices": [{"message": {"tool_calls": calls}, "finish_reason": "tool_calls"}]})
        assert [block["name"] for block in reply["content"]] == ["f", "g"]


def test_the_conversations_of_all_rollouts_stay_within_a_limit_and_end_with_their_rollout() -> None:
    kept = Conversations(max_bytes=100)
    for number in range(30):
        kept.of(f"r{number}", 10).add("resp", [{"role": "user", "content": str(number)}])
    assert [message["content"] for number in range(20, 30) for message in kept.of(f"r{number}").before("resp")] == [
        str(number) for number in range(20, 30)
    ]
    kept.forget("r29")
    for rollout_id in ("r0", "r29"):
        with pytest.raises(RefusedError, match="previous_response_id 'resp' is unknown"):
            kept.of(rollout_id).before("resp")
