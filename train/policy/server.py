"""The policy behind the OpenAI API, on this machine only, inside the process that trains it.

The reply is what vLLM 0.24 gives: with ``return_token_ids``, ``prompt_token_ids`` beside the choices and ``token_ids``
in each, the sampled end token included. So no agent knows which of the two it talks to. One field is
ours: ``weights_version``, the training step whose weights wrote the reply. Two differences are on purpose: ``logprobs``
are those of the sampled tokens *at the sampling temperature* (``top_logprobs`` stays empty), because that is what
training recomputes; and a ``max_tokens`` beyond the context ends at the context instead of being refused.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.openai_wire import SESSION_HEADER, OnSampled
from groundwire.train.policy.chat_request import ChatRequest, parse_request
from groundwire.train.policy.engine import Engine
from groundwire.train.policy.errors import ChatRequestError, ContextLengthError, EngineClosedError, EngineError
from groundwire.train.policy.tool_parsers import FORMATS, ToolFormat
from groundwire.train.policy.types import Completion

__all__ = ["PolicyServer"]

MAX_BODY = 16 << 20
"""Largest request, in bytes."""
HELD_TOKENS = 4
"""Tokens that a stream holds back: what a decoder makes of the last few may change with the next one."""
KEPT_PROMPTS = 512
"""Rendered prompts whose ids are remembered; the samples of a group send the same one."""


class PolicyServer:
    """An OpenAI-compatible server around an :class:`~groundwire.train.policy.engine.Engine`, on the running event loop.

    Args:
        engine: answers the requests; it is not closed with the server.
        host: where to listen.
        port: 0 takes a free one; :attr:`url` says which.
        model_name: the one model that is served; another name is answered with 404.
        tool_format: how the model writes tool calls, one of :data:`groundwire.train.policy.tool_parsers.FORMATS`.
        template_options: further variables of the chat template.

    Raises:
        OSError: from :meth:`start`, where the port is taken.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "policy",
        tool_format: str = "hermes",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine, self._host, self._port, self.model_name = engine, host, port, model_name
        self._tool_format, self._template_options = FORMATS[tool_format], dict(template_options or {})
        self._ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._names: dict[int, dict[str, Any]] = {}
        self._started = int(time.time())
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens, without a path: ``http://127.0.0.1:43210``."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self._chat)
        # A client that goes away cancels the handler, and with it the request in the engine.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening, and cancel what is not answered yet."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "weights_version": self._engine.weights_version})

    async def models(self, _: web.Request) -> web.Response:
        """OpenAI's list of models: the one."""
        model = {
            "id": self.model_name, "object": "model", "created": self._started, "owned_by": "groundwire",
            "max_model_len": self._engine.max_model_len,
        }  # fmt: skip
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except web.HTTPRequestEntityTooLarge:
            return _error(
                413, f"the body is larger than {MAX_BODY} bytes", "invalid_request_error", "request_too_large"
            )
        except ValueError as error:
            return _refused(ChatRequestError(f"the body is not JSON: {error}"))
        return await self.chat(request, body, session=request.headers.get(SESSION_HEADER, ""))

    async def chat(
        self,
        request: web.Request,
        body: Any,
        *,
        session: str = "",
        told: OnSampled = lambda _: None,
    ) -> web.StreamResponse:
        """Answer ``body`` on ``request``, which may be another server's of this loop: the proxy's.

        ``told`` gets what was sampled, as :class:`groundwire.adapters.tracing.proxy.LocalPolicy` says.
        """
        try:
            chat = parse_request(body, served=self.model_name, session=session)
            prompt = self._encode(chat)
            if chat.stream:
                return await self._stream(request, chat, prompt, told)
            return await self._answer(chat, prompt, told)
        except ChatRequestError as error:
            return _refused(error)
        except ContextLengthError as error:
            return _error(400, str(error), "invalid_request_error", "context_length_exceeded", "messages")
        except EngineError as error:
            closed = isinstance(error, EngineClosedError)
            return _error(503 if closed else 500, str(error), "server_error", "engine_closed" if closed else None)

    def _encode(self, chat: ChatRequest) -> tuple[int, ...]:
        """The ids that ``tokenizer.apply_chat_template`` gives: rendering, then one look-up or one tokenizer call."""
        tokenizer = self._engine.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools or None, tokenize=False, add_generation_prompt=True,
                **self._template_options,
            )  # fmt: skip
        except Exception as error:  # whatever the template raises is about these messages
            raise ChatRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        ids = self._ids.get(text)
        if ids is None:
            ids = self._ids[text] = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(self._ids) > KEPT_PROMPTS:
                self._ids.popitem(last=False)
        else:
            self._ids.move_to_end(text)
        return ids

    async def _answer(self, chat: ChatRequest, prompt: tuple[int, ...], told: OnSampled) -> web.Response:
        futures = [self._engine.submit(prompt, sampling) for sampling in chat.samplings]
        try:
            replies = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()  # a no-op for those that are done
        choices: list[dict[str, Any]] = []
        for index, reply in enumerate(replies):
            message, finish = self._message(chat, reply)
            choice = {
                "index": index,
                "message": message,
                "logprobs": self._logprobs(reply.token_ids, reply.logprobs) if chat.logprobs else None,
                "finish_reason": finish,
            }
            if chat.return_token_ids:
                choice["token_ids"] = reply.token_ids
            choices.append(choice)
        told(_sampled(replies[0], choices[0]["message"], choices[0]["finish_reason"]))
        body = {**self._head("chat.completion"), "choices": choices, "usage": _usage(prompt, replies)}
        body |= _versions(replies[0])
        if chat.return_token_ids:
            body["prompt_token_ids"] = prompt
        return web.json_response(body)

    async def _stream(
        self,
        request: web.Request,
        chat: ChatRequest,
        prompt: tuple[int, ...],
        told: OnSampled,
    ) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        futures = []
        try:
            for index, sampling in enumerate(chat.samplings):

                def put(*item: Any, index: int = index) -> None:
                    loop.call_soon_threadsafe(queue.put_nowait, (index, item))

                def put_end(done: Future[Completion], put: Callable[[Any], None] = put) -> None:
                    if not done.cancelled():
                        put(done)

                future = self._engine.submit(prompt, sampling, on_token=put)
                future.add_done_callback(put_end)
                futures.append(future)
            # From here on the status is sent, so only what fails later is told inside the stream.
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            async for event in self._events(chat, prompt, queue, told):
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        finally:
            for future in futures:
                future.cancel()

    async def _events(
        self,
        chat: ChatRequest,
        prompt: tuple[int, ...],
        queue: asyncio.Queue[tuple[int, Any]],
        told: OnSampled,
    ) -> AsyncIterator[dict[str, Any]]:
        head = self._head("chat.completion.chunk")
        choices = [_StreamedChoice(i, chat, self._engine, self._tool_format) for i in range(len(chat.samplings))]
        for choice in choices:
            first = {**head, "choices": [choice.chunk({"role": "assistant", "content": ""})]}
            if chat.return_token_ids and choice.index == 0:
                first["prompt_token_ids"] = prompt
            yield first
        replies: list[Completion] = []
        while len(replies) < len(choices):
            index, item = await queue.get()
            choice = choices[index]
            if len(item) == 2:
                token, logprob = item
                delta = choice.add(token)
                chunk = choice.chunk(delta, token_ids=[token], logprobs=self._logprobs([token], [logprob]))
                yield {**head, "choices": [chunk]}
                continue
            try:
                reply = item[0].result()
            except EngineError as error:
                told({"error": str(error)})
                yield {"error": {"message": str(error), "type": "server_error", "code": None}}
                return
            replies.append(reply)
            message, finish = self._message(chat, reply)
            told(_sampled(reply, message, finish))
            chunk = choice.chunk(choice.end(message), finish=finish, token_ids=[])
            yield {**head, "choices": [chunk], **_versions(reply)}
        if chat.include_usage:
            yield {**head, "choices": [], "usage": _usage(prompt, replies)}

    def _message(self, chat: ChatRequest, reply: Completion) -> tuple[dict[str, Any], str]:
        """The assistant's message, and why it ended."""
        if not chat.tool_names:
            return {"role": "assistant", "content": reply.text}, reply.finish_reason
        content, calls = self._tool_format.parse(reply.text, chat.tool_names)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        return ({**message, "tool_calls": calls}, "tool_calls") if calls else (message, reply.finish_reason)

    def _head(self, kind: str) -> dict[str, Any]:
        made = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        return {**made, "model": self.model_name}

    def _logprobs(self, token_ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        content = []
        for token, logprob in zip(token_ids, logprobs, strict=True):
            if token not in self._names:
                text = self._engine.tokenizer.decode([token])
                self._names[token] = {"token": text, "bytes": list(text.encode()), "top_logprobs": []}
            content.append({"logprob": logprob, **self._names[token]})
        return {"content": content}


class _StreamedChoice:
    """What has been said of one choice so far, and what may be said without taking it back."""

    def __init__(self, index: int, chat: ChatRequest, engine: Engine, tool_format: ToolFormat) -> None:
        self.index, self._chat, self._engine, self._tools = index, chat, engine, tool_format
        self._tokens: list[int] = []
        self._said = ""
        self._held_chars = max(map(len, (*chat.samplings[0].stop, tool_format.opening if chat.tool_names else " "))) - 1

    def chunk(
        self,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        token_ids: list[int] | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        made = {"index": self.index, "delta": delta, "finish_reason": finish}
        made["logprobs"] = logprobs if self._chat.logprobs else None
        if self._chat.return_token_ids and token_ids is not None:
            made["token_ids"] = token_ids
        return made

    def add(self, token: int) -> dict[str, Any]:
        """The delta after one more token; what the next ones, a stop string or a tool call could change waits."""
        self._tokens.append(token)
        sure = self._engine.detokenize(self._tokens[:-HELD_TOKENS])
        whole = self._engine.detokenize(self._tokens)
        same = next(
            (i for i, (a, b) in enumerate(zip(sure, whole, strict=False)) if a != b), min(len(sure), len(whole))
        )
        same = min(same, len(whole) - self._held_chars)
        if self._chat.tool_names:
            at = whole.find(self._tools.opening)
            same = same if at < 0 else min(same, at)
        more = whole[len(self._said) : max(same, len(self._said))]
        self._said += more
        return {"content": more} if more else {}

    def end(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The last delta of ``message``, which the reply has become."""
        more = (message["content"] or "")[len(self._said) :]
        delta: dict[str, Any] = {"content": more} if more else {}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return delta


def _sampled(reply: Completion, message: Mapping[str, Any], finish: str) -> dict[str, Any]:
    """Fields of the traced call."""
    return {
        "prompt_ids": reply.prompt_ids,
        "response_ids": reply.token_ids,
        "logprobs": reply.logprobs,
        "finish_reason": finish,
        "reply_json": to_json(message),
        **_versions(reply),
    }


def _versions(reply: Completion) -> dict[str, int]:
    first = reply.first_weights_version
    return {"weights_version": reply.weights_version, **({} if first is None else {"first_weights_version": first})}


def _usage(prompt: tuple[int, ...], replies: list[Completion]) -> dict[str, Any]:
    generated = sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": generated,
        "total_tokens": len(prompt) + generated,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }


def _refused(error: ChatRequestError) -> web.Response:
    return _error(error.status, str(error), "invalid_request_error", error.code, error.param)


def _error(status: int, message: str, kind: str, code: str | None, param: str | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "param": param, "code": code}}, status=status)
