"""A policy server that follows a script, for tests of agents, backends and trainers over real HTTP.

It speaks the part of the protocol that training depends on: token ids, logprobs, streams, tool calls, errors, silence.
Its tokenizer is UTF-8 bytes with one marker for each role, so the next prompt of a conversation begins with the last
prompt and reply, as with a real chat template.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from aiohttp import web

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.apis import answer, answer_refusals
from groundwire.adapters.tracing.wire.call import ChatCall, Conversations, WireCall
from groundwire.adapters.tracing.wire.completions import CompletionsCall
from groundwire.adapters.tracing.wire.exchange import CANCELLED, HttpExchange, OnSampled
from groundwire.adapters.tracing.wire.request import RAW_PROMPT, RefusedError
from groundwire.tools.http.server import HttpServer

END = 256
"""The token that ends a turn, in prompts and in replies."""
_ROLES = {"system": 257, "developer": 257, "user": 258, "assistant": 259, "tool": 260}
_ERROR = 400


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One scripted reply. Ids that are None come from the text; a ``status`` from 400 on makes it an error."""

    id: str = ""
    """The id of the reply; "" for a new one."""
    reasoning: str = ""
    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """OpenAI tool calls: ``{"id": …, "type": "function", "function": {"name": …, "arguments": …}}``."""
    prompt_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    finish_reason: str | None = None
    grammar: str = ""
    """The constraint that the tokens were sampled with."""
    weights_version: int | None = None
    status: int = 200
    code: str | None = None
    """Of an error reply, e.g. ``context_length_exceeded``; None repeats the status."""
    delay_s: float = 0.0
    """Silence before the reply, or before the last chunk of a stream."""
    breaks_off: bool = False
    """Close the connection before the last chunk of a stream."""


Script = Sequence[str | Reply] | Callable[[dict[str, Any]], str | Reply | Sequence[Reply]]
"""The replies by the order of the requests, or a function of a request. A sequence of replies from it has one for each
choice (``n``); else all choices are the same."""


def encode(text: str) -> list[int]:
    """The ids of ``text``: its UTF-8 bytes."""
    return list(text.encode("utf-8", "replace"))


def render(
    messages: Sequence[Mapping[str, Any]], content_ids: Callable[[Mapping[str, Any]], Sequence[int]] | None = None
) -> list[int]:
    """The prompt's ids: each message as marker, text and :data:`END`, then the assistant's marker.

    ``content_ids`` gives other ids for what follows the marker of a message.
    """
    ids: list[int] = []
    for message in messages:
        ids += [_ROLES[message["role"]], *(content_ids or message_ids)(message)]
    return [*ids, _ROLES["assistant"]]


def message_ids(message: Mapping[str, Any]) -> list[int]:
    """The ids of a message's reasoning, text and tool calls, and :data:`END`."""
    functions = (json.dumps(call["function"], sort_keys=True) for call in message.get("tool_calls") or ())
    return [*encode((message.get("reasoning") or "") + text_of(message) + "".join(functions)), END]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message whose content is a string, a list of parts, or missing."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def message_key(message: Mapping[str, Any]) -> str:
    """Role, text and tool calls of a message, without what clients add and leave out."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], json.loads(function["arguments"])] for function in functions]
    return json.dumps([message["role"], text_of(message), calls])


class ReplyIds(dict[str, list[int]]):
    """The ids of each reply, by :func:`message_key`: a tokenizer that knows each reply in a later prompt again."""

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt's ids. A message that is not exactly a reply is tokenized as :func:`message_ids`."""
        return render(messages, lambda message: self.get(message_key(message)) or message_ids(message))


class ScriptedPolicyServer(HttpServer):
    """``async with ScriptedPolicyServer(replies=["SELECT 1"]) as server: … server.base_url``.

    ``replies`` are given in the order of the requests, or made by a function of the request's body. A request beyond
    the end of the script is answered with status 500.

    It is also a :class:`groundwire.adapters.tracing.wire.apis.LocalPolicy`: ``LLMProxy(policy=server, ...)``.
    """

    def __init__(self, replies: Script, *, model: str = "scripted") -> None:
        super().__init__(drain_timeout_s=0.1)
        self.replies = replies
        self.model = self.model_name = model
        self.requests: list[dict[str, Any]] = []
        """The body of every request."""
        self.cancelled = 0
        """Requests whose client disconnected before the reply was complete."""

    @property
    def base_url(self) -> str:
        """The OpenAI base URL."""
        return f"{self.url}/v1"

    def application(self) -> web.Application:
        """The routes of the server."""
        app = web.Application(middlewares=[answer_refusals])
        for api in (ChatCall, CompletionsCall):
            app.router.add_post(f"/v1/{api.path}", partial(self._answer, api))
        app.router.add_get("/v1/models", self._models)
        return app

    async def complete(
        self, body: Any, *, session: str, on_sampled: OnSampled, exchange: HttpExchange
    ) -> dict[str, Any]:
        """The chat completion of the next reply. Raises :class:`RefusedError` for an error reply."""
        replies = self._take(body)
        try:
            await asyncio.sleep(replies[0].delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        sampled, choices = [_sampled(body, reply) for reply in replies], list[dict[str, Any]]()
        for index, (reply, fields) in enumerate(zip(replies, sampled, strict=True)):
            on_sampled(index, fields)
            choice = {"index": index, "message": _message(reply), "finish_reason": fields["finish_reason"]}
            choices.append({**choice, **_grammar(reply), **_tokens(body, fields, 0, len(fields["response_ids"]))})
        head = self._head("chat.completion", replies[0])
        return {**head, "choices": choices, "usage": _usage(sampled), **_prompt(body, sampled[0])}

    async def stream(
        self, body: Any, *, session: str, on_sampled: OnSampled, exchange: HttpExchange
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the next reply, as of vLLM: an empty one with the prompt's ids, one for each token, the usage.

        The tokens of several choices take turns. Raises :class:`RefusedError` for an error reply.
        """
        replies = self._take(body)
        sampled, head = [_sampled(body, reply) for reply in replies], self._head("chat.completion.chunk", replies[0])
        counts, sent = [len(fields["response_ids"]) for fields in sampled], [0] * len(replies)
        deltas = [_deltas(reply, count) for reply, count in zip(replies, counts, strict=True)]
        try:
            for index, reply in enumerate(replies):
                start = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield {**head, "choices": [{**start, **_grammar(reply)}], **_prompt(body, sampled[0])}
            for position, index in product(range(max(counts)), range(len(replies))):
                if position >= counts[index]:
                    continue
                reply, fields, finish_reason = replies[index], sampled[index], None
                if position == counts[index] - 1:
                    await asyncio.sleep(reply.delay_s)
                    if reply.breaks_off:
                        raise ConnectionResetError("the script breaks the stream off")
                    finish_reason = fields["finish_reason"]
                    on_sampled(index, fields)
                choice = {"index": index, "delta": deltas[index][position], "finish_reason": finish_reason}
                sent[index] += 1
                yield {**head, "choices": [{**choice, **_tokens(body, fields, position, position + 1)}]}
            if (body.get("stream_options") or {}).get("include_usage"):
                yield {**head, "choices": [], "usage": _usage(sampled)}
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            for index, fields in enumerate(sampled):
                if 0 < sent[index] < counts[index]:
                    cut = {name: fields[name][: sent[index]] for name in ("response_ids", "logprobs")}
                    on_sampled(index, {**fields, **cut, "finish_reason": CANCELLED})
            raise

    async def count_tokens(self, body: Any) -> int:
        """The length of the prompt."""
        return len(render(body["messages"]))

    def models(self) -> dict[str, Any]:
        """The list of models."""
        return {"object": "list", "data": [{"id": self.model, "object": "model"}]}

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models())

    async def _answer(self, api: type[WireCall], request: web.Request) -> web.StreamResponse:
        call = api(await request.json(), Conversations().of(""))
        call.exchange = HttpExchange(rollout_id="", attempt_id="", started=time.time())
        return await answer(request, call, self, session="", on_sampled=lambda *_: None)

    def _take(self, body: dict[str, Any]) -> list[Reply]:
        """The next reply, for each choice that ``body`` asks for."""
        self.requests.append(body)
        number = len(self.requests)
        found: str | Reply | Sequence[Reply]
        if callable(self.replies):
            found = self.replies(body)
        elif number <= len(self.replies):
            found = self.replies[number - 1]
        else:
            found = Reply(status=500, text=f"the script has {len(self.replies)} replies; this is one request more")
        found = Reply(text=found) if isinstance(found, str) else found
        replies = [found] * (body.get("n") or 1) if isinstance(found, Reply) else found
        return [reply if reply.id else replace(reply, id=f"chatcmpl-{number}") for reply in replies]

    def _head(self, kind: str, reply: Reply) -> dict[str, Any]:
        return {"id": reply.id, "object": kind, "created": 0, "model": self.model, **_version(reply)}


def _sampled(body: Mapping[str, Any], reply: Reply) -> dict[str, Any]:
    """The fields of the call. Raises :class:`RefusedError` for an error reply."""
    if reply.status >= _ERROR:
        raise RefusedError(reply.status, reply.text, code=reply.code)
    prompt_ids, token_ids = reply.prompt_ids, reply.token_ids
    if prompt_ids is None:
        prompt = body.get(RAW_PROMPT) or render(body["messages"])
        prompt_ids = encode(prompt) if isinstance(prompt, str) else prompt
    if token_ids is None:
        token_ids = message_ids(_message(reply))
    return {
        "prompt_ids": list(prompt_ids),
        "response_ids": list(token_ids),
        "logprobs": [-0.5] * len(token_ids) if reply.logprobs is None else list(reply.logprobs),
        "finish_reason": reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop"),
        "reply_id": reply.id,
        "reply_json": to_json(_message(reply)),
        **_grammar(reply),
        **_version(reply),
    }


def _prompt(body: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt_token_ids": sampled["prompt_ids"]} if body.get("return_token_ids") else {}


def _tokens(body: Mapping[str, Any], sampled: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """What a choice has for some of the tokens, if the request asks for it."""
    tokens: dict[str, Any] = {}
    if body.get("logprobs"):
        logprobs = sampled["logprobs"][start:end]
        content = [{"token": "", "logprob": value, "top_logprobs": []} for value in logprobs]
        tokens["logprobs"] = {"content": content}
    if body.get("return_token_ids"):
        tokens["token_ids"] = sampled["response_ids"][start:end]
    return tokens


def _version(reply: Reply) -> dict[str, int]:
    return {} if reply.weights_version is None else {"weights_version": reply.weights_version}


def _grammar(reply: Reply) -> dict[str, str]:
    return {"grammar": reply.grammar} if reply.grammar else {}


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    message |= {"reasoning": reply.reasoning} if reply.reasoning else {}
    return {**message, "tool_calls": list(reply.tool_calls)} if reply.tool_calls else message


def _usage(sampled: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    prompt, reply = len(sampled[0]["prompt_ids"]), sum(len(choice["response_ids"]) for choice in sampled)
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def _deltas(reply: Reply, count: int) -> list[dict[str, Any]]:
    """One delta for each token: a character with its last byte, tool calls with the last token."""
    deltas: list[dict[str, Any]] = [{} for _ in range(count)]
    position = -1
    for name, text in (("reasoning", reply.reasoning), ("content", reply.text)):
        for character in text:
            position = min(position + len(encode(character)), count - 1)
            deltas[position][name] = deltas[position].get(name, "") + character
    if reply.tool_calls:
        deltas[-1]["tool_calls"] = [{"index": index, **call} for index, call in enumerate(reply.tool_calls)]
    return deltas
