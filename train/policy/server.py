"""An OpenAI-compatible server for the policy, inside the process that trains it.

Responses are those of vLLM 0.24, so agents cannot tell the two apart: with ``return_token_ids`` they have
``prompt_token_ids``, and ``token_ids`` in each choice, including a sampled end token. Three differences:

- ``weights_version`` is the training step whose weights wrote the reply.
- ``logprobs`` are those of the sampled tokens *at the sampling temperature*, which training recomputes. Those of
  a constrained reply are over the allowed tokens, and its choice has the ``grammar``. ``top_logprobs`` stays empty.
- a ``max_tokens`` beyond the context is not an error: the reply ends with the context.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.apis import answer, answer_refusals
from groundwire.adapters.tracing.wire.call import Conversations
from groundwire.adapters.tracing.wire.exchange import CANCELLED, HttpExchange, OnSampled
from groundwire.adapters.tracing.wire.paths import find_api
from groundwire.adapters.tracing.wire.request import SESSION_HEADER, RefusedError, read_request
from groundwire.tools.http.access_token import access_token
from groundwire.tools.http.guard import Guard
from groundwire.tools.http.server import HttpServer
from groundwire.train.policy.chat.prompt import ChatPrompt, Prompts
from groundwire.train.policy.chat.request import parse_request
from groundwire.train.policy.chat.response import ChatResponse, StreamedChoice, versions
from groundwire.train.policy.chat.template import is_trusted
from groundwire.train.policy.chat.tool_formats import FORMATS, written_format
from groundwire.train.policy.errors import ContextLengthError, EngineError
from groundwire.train.policy.recorded import recorded_reply
from groundwire.train.policy.types import Completion, Engine, OnToken

_log = logging.getLogger(__name__)

MAX_BODY = 16 << 20
"""Largest request, in bytes."""
LONG_REQUEST = 128 << 10
"""From this size on, in bytes, a prompt is tokenized in a thread and not cached: it would block the other requests."""


def _ignore(choice: int, sampled: Mapping[str, Any]) -> None:
    """For callers over HTTP, who get what was sampled in the reply."""


class PolicyServer(HttpServer):
    """An OpenAI-compatible server in front of an engine, on the running event loop.

    It is a :class:`groundwire.adapters.tracing.wire.apis.LocalPolicy`, which the proxy asks without HTTP; started, it
    answers over HTTP.

    Args:
        engine: samples the replies; it is not closed with the server.
        host: the address to listen on, at ``port``; 0 takes any free one.
        model_name: the name of the one served model; another name is answered with 404, unless ``any_model``.
        tool_format: how the model writes tool calls, one of :data:`groundwire.train.policy.chat.tool_formats.FORMATS`;
            by default as its chat template does, which is ``hermes`` where it writes none. A warning names another one.
        template_options: further variables of the chat template.
        token: the API key of its clients; without it, the token of the environment or the user.
        score: computes the log-probabilities of token ids but the first, for completions with ``prompt_logprobs``;
            called by several threads at once.

    Raises:
        OSError: from :meth:`start`, if the port is in use.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "policy",
        any_model: bool = False,
        tool_format: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        token: str | None = None,
        score: Callable[[Sequence[int]], list[float]] | None = None,
    ) -> None:
        super().__init__(host=host, port=port, token=token)
        self._engine, self.model_name, self._any_model = engine, model_name, any_model
        written = written_format(str(engine.tokenizer.chat_template))
        self._tool_format = FORMATS[tool_format or written or "hermes"]
        if tool_format and written and FORMATS[written].read is not self._tool_format.read:
            _log.warning("the chat template writes tool calls as %s, but they are read as %s", written, tool_format)
        self._prompts = Prompts(engine, template_options or {})
        self._one_long_request, self._score = asyncio.Semaphore(), score
        self._decoded = functools.lru_cache(len(engine.tokenizer))(lambda token: engine.tokenizer.decode([token]))
        self._created = int(time.time())
        self._conversations = Conversations()

    def guard(self) -> Guard:
        """All requests but the health check need the token."""
        return Guard(token=self.token or access_token(), public=["/health"])

    def application(self) -> web.Application:
        """The routes of the server."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[answer_refusals])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        return app

    async def count_tokens(self, body: Any) -> int:
        """The length of the prompt of a chat request. Raises :class:`RefusedError`."""
        return len(await self.prompt_ids(body))

    async def prompt_ids(self, body: Any) -> tuple[int, ...]:
        """The prompt of a chat request. Raises :class:`RefusedError`."""
        return (await self._prepare(body, ""))[0].prompt_ids

    def models(self) -> dict[str, Any]:
        """OpenAI's list of models, with the served one."""
        model = {"id": self.model_name, "object": "model", "created": self._created, "owned_by": "groundwire"}
        return {"object": "list", "data": [{**model, "max_model_len": self._engine.max_model_len}]}

    async def complete(
        self, body: Any, *, session: str = "", on_sampled: OnSampled = _ignore, exchange: HttpExchange | None = None
    ) -> dict[str, Any]:
        """The chat completion for a request of ``session``. Raises :class:`RefusedError`."""
        response, finish = await self._prepare(body, session, on_sampled, exchange)
        futures = [self._submit(response, choice, exchange) for choice in range(response.request.n)]
        try:
            replies = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()  # has no effect on finished ones
        messages = [response.message(reply, choice) for choice, reply in enumerate(replies)]
        for choice, (reply, message) in enumerate(zip(replies, messages, strict=True)):
            finish(choice, reply, *message)
        return response.body(replies, messages)

    async def stream(
        self, body: Any, *, session: str = "", on_sampled: OnSampled = _ignore, exchange: HttpExchange | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the completion. Raises :class:`RefusedError`, before the first chunk unless sampling fails."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        def put(index: int, item: tuple[int, float] | Future[Completion]) -> None:
            """Note a choice's (token, logprob), at last its finished future."""
            if isinstance(item, tuple) or not item.cancelled():
                loop.call_soon_threadsafe(queue.put_nowait, (index, item))

        response, finish = await self._prepare(body, session, on_sampled, exchange)
        request, futures = response.request, list[Future[Completion]]()
        choices = [StreamedChoice(index, response) for index in range(request.n)]
        unfinished = dict(enumerate(choices))
        try:
            for index in range(request.n):
                future = self._submit(response, index, exchange, on_token=lambda *token, index=index: put(index, token))
                future.add_done_callback(functools.partial(put, index))
                futures.append(future)
            for index, choice in enumerate(choices):
                with_prompt = request.return_token_ids and index == 0
                yield response.event(
                    choice.start(), **({"prompt_token_ids": response.prompt_ids} if with_prompt else {})
                )
            replies: list[Completion] = []
            while unfinished:
                index, item = await queue.get()
                if isinstance(item, tuple):
                    yield response.event(choices[index].add(*item))
                    continue
                del unfinished[index]
                try:
                    reply = item.result()
                except EngineError as error:
                    on_sampled(index, {"error": str(error)})
                    raise
                replies.append(reply)
                message, finish_reason = response.message(reply, index)
                finish(index, reply, message, finish_reason)
                last = {**choices[index].end(message, finish_reason), **response.stop_reason(reply)}
                yield response.event(last, **versions(reply))
            if request.stream_options.include_usage:
                yield response.event(usage=response.usage(replies))
        except (GeneratorExit, asyncio.CancelledError):  # the agent left
            for index, choice in unfinished.items():
                reply = choice.cut_short(self._engine.weights_version)
                if reply.token_ids:
                    finish(index, reply, response.message(reply, index)[0], CANCELLED)
            raise
        finally:
            for future in futures:
                future.cancel()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        called = find_api(request.rel_url.raw_path_qs)
        if called is None:
            raise web.HTTPNotFound
        session = request.headers.get(SESSION_HEADER, "")
        body = {**called.fields, **await self._read_body(request)}
        if body.get("prompt_logprobs") is not None:
            return web.json_response(await self._prompt_logprobs(body))
        call = called.api(body, self._conversations.of(session, len(await request.read())))
        call.exchange = HttpExchange(rollout_id="", attempt_id=session, started=time.time())
        if called.counts:
            return web.json_response({called.api.count_field: await self.count_tokens(call.chat)})
        return await answer(request, call, self, session=session, on_sampled=_ignore)

    async def _prompt_logprobs(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The log-probabilities of a prompt's tokens, in the form of vLLM. Nothing is sampled."""
        ids, size = body.get("prompt"), len(self._engine.tokenizer)
        if self._score is None or not isinstance(ids, list) or len(ids) < 2:
            raise RefusedError(
                400, "prompt_logprobs needs token ids as prompt of /v1/completions, and groundwire serve"
            )
        if not all(type(token) is int and 0 <= token < size for token in ids):
            raise RefusedError(400, f"a token of the prompt is no number from 0 to {size - 1}")
        if len(ids) > self._engine.max_model_len:
            raise ContextLengthError(len(ids), self._engine.max_model_len)
        scores = await asyncio.to_thread(self._score, ids)
        entries = [
            {str(token): {"logprob": score, "decoded_token": self._decoded(token)}}
            for token, score in zip(ids[1:], scores, strict=True)
        ]
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": [None, *entries]}
        return {"object": "text_completion", "model": self.model_name, "choices": [choice]}

    async def _read_body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = read_request(await request.read())
        except web.HTTPRequestEntityTooLarge as error:
            raise RefusedError(413, f"the body is larger than {MAX_BODY} bytes", code="request_too_large") from error
        return {**body, "model": self.model_name} if self._any_model else body

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(self.models())

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "weights_version": self._engine.weights_version})

    def _submit(
        self, response: ChatResponse, choice: int, exchange: HttpExchange | None, on_token: OnToken | None = None
    ) -> Future[Completion]:
        """The reply of a choice: sampled, or from the record."""
        sampling = response.request.samplings[choice]
        if exchange is not None and exchange.recorded:
            recorded = exchange.recorded
            return recorded_reply(self._engine, response.prompt_ids, sampling, recorded, choice, on_token)
        return self._engine.submit(response.prompt_ids, sampling, on_token=on_token)

    async def _prepare(
        self, body: Any, session: str, on_sampled: OnSampled = _ignore, exchange: HttpExchange | None = None
    ) -> tuple[ChatResponse, Callable[[int, Completion, Mapping[str, Any], str], None]]:
        """The response to a request, and what is called with each choice that is complete."""
        read = functools.partial(self._read, body, session)
        if len(to_json(body)) > LONG_REQUEST:
            async with self._one_long_request:
                prompt = await asyncio.to_thread(read, long=True)
        elif is_trusted(self._engine.tokenizer):
            prompt = read()
        else:
            prompt = await asyncio.to_thread(read)  # the template waits for another process
        exchange = exchange or HttpExchange(rollout_id="", attempt_id="", started=time.time())
        response = ChatResponse(
            prompt.request,
            tuple(exchange.origin.prompt_ids) or prompt.ids,
            model=self.model_name,
            tokenizer=self._engine.tokenizer,
            tool_format=self._tool_format,
            exchange=exchange,
        )

        def finish(choice: int, reply: Completion, message: Mapping[str, Any], finish_reason: str) -> None:
            self._prompts.keep(prompt, reply.token_ids, message)
            on_sampled(choice, response.sampled(reply, message, finish_reason))

        return response, finish

    def _read(self, body: Any, session: str, *, long: bool = False) -> ChatPrompt:
        """The prompt of a request, which is checked first."""
        tool_format = self._tool_format.name
        return self._prompts.make(
            parse_request(body, served=self.model_name, tool_format=tool_format, session=session), long=long
        )
