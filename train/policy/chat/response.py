"""Chat completion responses, whole or as the events of a stream, and the tool calls in their text.

Model families write tool calls in different formats. ``hermes``: ``<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`` (Qwen, and the starter). ``llama3_json``: the reply is ``{"name": ..., "parameters": {...}}``, or
several of them separated by semicolons (Llama 3.1 and 3.2).

A policy in training writes malformed calls. They stay in the content, where the agent and the trainer can see them, and
are never an error of the server.
"""

from __future__ import annotations

import functools
import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing.calls import to_json
from groundwire.train.policy.chat.request import ChatRequest
from groundwire.train.policy.types import Completion

HELD_TOKENS = 4
"""Tokens that a stream holds back: a later token can change the text of the last few."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_LLAMA_TAG = "<|python_tag|>"

Parsed = tuple[str | None, list[dict[str, Any]]]


class ChatResponse:
    """The response to one request. ``prompt_ids`` are its messages as token ids, ``model`` is the served name."""

    def __init__(
        self, request: ChatRequest, prompt_ids: tuple[int, ...], *, model: str, tokenizer: Any, tool_format: ToolFormat
    ) -> None:
        self.request, self.prompt_ids, self.tool_format = request, prompt_ids, tool_format
        self.tool_names = frozenset(tool["function"]["name"] for tool in request.callable_tools)
        self._tokenizer = tokenizer
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}

    def text(self, token_ids: list[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def message(self, reply: Completion) -> tuple[dict[str, Any], str]:
        """The assistant's message and its finish reason, ``length`` also if the limit came after a whole tool call."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if not self.tool_names:
            return message, reply.finish_reason
        message["content"], calls = self.tool_format.parse(reply.text, self.tool_names)
        if not self.request.parallel_tool_calls:
            calls = calls[:1]
        if calls:
            message["tool_calls"] = calls
        return message, "tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason

    def sampled(self, reply: Completion, message: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
        """The fields of the traced LLM call."""
        return {
            "prompt_ids": list(reply.prompt_ids),
            "response_ids": reply.token_ids,
            "reply_id": self._head["id"],
            "logprobs": reply.logprobs,
            "finish_reason": finish_reason,
            "reply_json": to_json(message),
            "grammar": self.request.grammar,
            **versions(reply),
        }

    def body(self, replies: list[Completion], messages: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
        """The whole response, one choice for each of ``replies``, with its :meth:`message`."""
        choices = []
        for index, (reply, (message, finish_reason)) in enumerate(zip(replies, messages, strict=True)):
            logprobs = self.logprobs(reply.token_ids, reply.logprobs)
            choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
            choice |= self.stop_reason(reply)
            if self.request.return_token_ids:
                choice |= {"token_ids": reply.token_ids, **self.grammar()}
            choices.append(choice)
        body = {**self._head, "choices": choices, "usage": self.usage(replies), **versions(replies[0])}
        if self.request.return_token_ids:
            body["prompt_token_ids"] = self.prompt_ids
        return body

    def stop_reason(self, reply: Completion) -> dict[str, str]:
        """The stop string that ended a reply, in the field that vLLM has for it."""
        if not self.request.stop or reply.finish_reason != "stop":
            return {}
        rest = self.text(reply.token_ids)[len(reply.text) :]
        return next(({"stop_reason": stop} for stop in self.request.stop if rest.startswith(stop)), {})

    def grammar(self) -> dict[str, str]:
        """The constraint, without which training cannot compute the logprobs again."""
        return {"grammar": grammar} if (grammar := self.request.grammar) else {}

    def event(self, *choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """An event of a stream."""
        return {**self._head, "choices": choices, **fields}

    def logprobs(self, token_ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        """The sampled tokens with their logprobs, if the request asks for them."""
        if not self.request.logprobs:
            return None
        tokens = (_token_entry(self._tokenizer, token) for token in token_ids)
        return {"content": [{"logprob": lp, **token} for token, lp in zip(tokens, logprobs, strict=True)]}

    def usage(self, replies: list[Completion]) -> dict[str, Any]:
        """The numbers of tokens."""
        prompt_tokens, generated = len(self.prompt_ids), sum(len(reply.token_ids) for reply in replies)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
        }


class StreamedChoice:
    """One choice of a stream: sends text as soon as no later token can change it."""

    def __init__(self, index: int, response: ChatResponse) -> None:
        self._index, self._response, self._request = index, response, response.request
        self._tokens, self._logprobs = list[int](), list[float]()
        self._sent = ""
        opening = response.tool_format.opening if response.tool_names else " "
        self._held_chars = max(map(len, (*self._request.stop_strings, opening))) - 1

    def start(self) -> dict[str, Any]:
        """The choice of its first event."""
        chunk = self._chunk({"role": "assistant", "content": ""})
        return {**chunk, **self._response.grammar()} if self._request.return_token_ids else chunk

    def add(self, token: int, logprob: float) -> dict[str, Any]:
        """The choice after one more token. Text that may become part of a stop string or a tool call is held back."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        final = self._response.text(self._tokens[:-HELD_TOKENS])
        text = self._response.text(self._tokens)
        differ = (i for i, (a, b) in enumerate(zip(final, text, strict=False)) if a != b)
        end = min(next(differ, min(len(final), len(text))), len(text) - self._held_chars)
        if self._response.tool_names and (at := text.find(self._response.tool_format.opening)) >= 0:
            end = min(end, at)
        delta = text[len(self._sent) : max(end, len(self._sent))]
        self._sent += delta
        logprobs = self._response.logprobs([token], [logprob])
        return self._chunk({"content": delta} if delta else {}, token_ids=[token], logprobs=logprobs)

    def cut_short(self, weights_version: int) -> Completion:
        """The reply that ends with the last sent token, because nobody reads on."""
        ids, text = self._tokens, self._response.text(self._tokens)
        return Completion(self._response.prompt_ids, ids, self._logprobs, text, "length", weights_version)

    def end(self, message: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
        """The choice of its last event, which completes ``message``."""
        rest = (message["content"] or "")[len(self._sent) :]
        delta: dict[str, Any] = {"content": rest} if rest else {}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return self._chunk(delta, finish_reason=finish_reason, token_ids=[])

    def _chunk(self, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        if not self._request.return_token_ids:
            fields.pop("token_ids", None)
        return {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None, **fields}


@functools.lru_cache(maxsize=1 << 17)
def _token_entry(tokenizer: Any, token: int) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "bytes": list(text.encode()), "top_logprobs": []}


def versions(reply: Completion) -> dict[str, int]:
    """The fields that name the weights of a reply."""
    first = reply.first_weights_version
    return {"weights_version": reply.weights_version, **({} if first is None else {"first_weights_version": first})}


@dataclass(frozen=True)
class ToolFormat:
    """``opening`` begins a call; ``parse(text, names)`` splits a text into its content and its calls of ``names``."""

    name: str
    opening: str
    parse: Callable[[str, Collection[str]], Parsed]


def parse_tool_calls(text: str, names: Collection[str]) -> Parsed:
    """Split ``text`` into its content, None if it has only calls, and its Hermes calls in the OpenAI API's form.

    A call with complete JSON needs no closing tag. A call with malformed JSON, a name that is not one of ``names``, or
    arguments that are not an object stays in the content.
    """
    calls: list[dict[str, Any]] = []
    content: list[str] = []
    end = 0
    for match in _CALL.finditer(text):
        try:
            call = _openai_call(json.loads(match.group(1)), names)
        except (ValueError, RecursionError):
            continue
        if call is not None:
            calls.append(call)
            content.append(text[end : match.start()])
            end = match.end()
    if not calls:
        return text, []
    content.append(text[end:])
    return "".join(content).rstrip() or None, calls


def _parse_llama(text: str, names: Collection[str]) -> Parsed:
    """The whole reply is calls, or it is content."""
    decoder, calls = json.JSONDecoder(), []
    rest = text.strip().removeprefix(_LLAMA_TAG).lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        call = _openai_call(value, names)
        if call is None:
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip(" \n;")
    return (None, calls) if calls else (text, [])


def _openai_call(value: Any, names: Collection[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # a model may write the object as text, as it is in the OpenAI API
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


FORMATS = {
    "hermes": ToolFormat("hermes", "<tool_call>", parse_tool_calls),
    "llama3_json": ToolFormat("llama3_json", "{", _parse_llama),
}
"""By the names that vLLM and verl use."""
