"""The LLM proxy: it stands between any agent and the policy, records every call and changes none.

The URL says which rollout and attempt a call belongs to, so an agent in any language is traced by giving it a base URL.
It may use several APIs (:mod:`groundwire.adapters.tracing.wire`). The policy is in this process, or behind HTTP
(:mod:`groundwire.adapters.tracing.upstreams`). Replies are parsed and stored afterwards
(:mod:`groundwire.adapters.tracing.call_writer`), so tracing costs an agent one local hop, or none if the policy is in
this process.

Only attempts that run may call the policy (:mod:`groundwire.adapters.tracing.open_attempts`).

The proxy runs on one event loop. Each choice of a request for several (``n``) is recorded as a call of its own. A reply
whose agent leaves the stream is recorded up to the last token that was sent.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import quote

from aiohttp import web

from groundwire.adapters.tracing.call_writer import CallWriter, Place
from groundwire.adapters.tracing.emitted_spans import CALL_HEADER
from groundwire.adapters.tracing.open_attempts import CALLS_PATH, OpenAttempts
from groundwire.adapters.tracing.replay import Replay
from groundwire.adapters.tracing.sampling import SamplingRule
from groundwire.adapters.tracing.spans import CallSink
from groundwire.adapters.tracing.upstreams import Upstreams
from groundwire.adapters.tracing.wire.apis import LocalPolicy, answer, answer_refusals
from groundwire.adapters.tracing.wire.call import Conversations, WireCall
from groundwire.adapters.tracing.wire.exchange import CLIENT_GONE, HttpExchange, read_exchange
from groundwire.adapters.tracing.wire.paths import ApiPath, find_api
from groundwire.adapters.tracing.wire.request import RefusedError, calling_agent, choices_of, read_request, require
from groundwire.tools import clock
from groundwire.tools.errors import CommandError
from groundwire.tools.http.guard import Guard
from groundwire.tools.http.listening import listen_problem
from groundwire.tools.http.server import HttpServer

_ROLLOUT = "/rollout/{rollout_id}/attempt/{attempt_id}"
_MAX_REQUEST_BYTES = 16 << 20
_BODY_S = 60.0
_OK = 200
_NOT_SERVED = {
    "embed": "the policy only writes text; ask an embedding model of your own",
    "/audio/": "the policy only writes text; ask an audio model of your own",
    "/images/": "the policy only writes text; ask an image model of your own",
    "/responses/": "a response is not stored for retrieval; its previous_response_id works within the rollout",
    "/invoke": "the body of invoke_model is each model's own; use Bedrock's Converse API",
    "/api/generate": "use Ollama's /api/chat",
    "/interactions": "use Google's generateContent",
    "/v2/chat": "Cohere's own API is not served; its /compatibility/v1/chat/completions is",
}
"""What to do instead, by a part of the path."""


class LLMProxy(HttpServer):
    """Traces every chat completion of every rollout into ``sink``.

    Args:
        sink: where calls are written.
        policy: a policy in this process; the alternative to ``upstreams`` and the options below.
        upstreams: OpenAI base URLs that end in ``/v1``. ``proxy.upstreams.urls`` and ``.model`` may be
            replaced while calls are running. All calls of a rollout go to one of the servers, whose prefix cache then
            holds the growing prompt.
        model: replaces the model's name in requests.
        api_key: replaces the agent's API key, so that agents need not know it. It is removed from replies.
        ids: whether to ask for token ids, which some servers refuse.
        max_calls: most calls of an attempt; further ones are refused. 0: any number.
        host: the address to listen on.
        port: the port to listen on; 0 takes any free one.
        timeout_s: how long a server may be silent, in seconds.
        drain_timeout_s: how long :meth:`stop` waits for calls and for the store, in seconds.
        replay: the rollouts whose calls are answered from records.
        token: needed to listen to other machines. Agents need none: the address of their attempt is theirs alone.
    """

    def __init__(
        self,
        *,
        sink: CallSink,
        policy: LocalPolicy | None = None,
        upstreams: Sequence[str] = (),
        model: str | None = None,
        api_key: str | None = None,
        ids: bool = True,
        max_calls: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 600.0,
        drain_timeout_s: float = 30.0,
        token: str | None = None,
        replay: Replay | None = None,
    ) -> None:
        super().__init__(host=host, port=port, drain_timeout_s=drain_timeout_s, token=token)
        if policy is not None and upstreams:
            raise TypeError("give either the upstreams or a policy in this process, not both")
        self._policy, self._sink, self._max_calls, self._replay = policy, sink, max_calls, replay
        self.upstreams = Upstreams(upstreams, model=model, api_key=api_key, ids=ids, timeout_s=timeout_s)
        self._conversations = Conversations()
        self._sampling_rule = SamplingRule()
        self._writer: CallWriter
        self._open_attempts = OpenAttempts(sink)

    def guard(self) -> Guard:
        """The routes of an attempt need no token."""
        return Guard(token=self.token, public=["/rollout/"], hosts=[self.host])

    def application(self) -> web.Application:
        """The routes of the proxy."""
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES, middlewares=[answer_refusals])
        app.router.add_post(f"{_ROLLOUT}/v1/{CALLS_PATH}", self._summary)
        app.router.add_post(f"{_ROLLOUT}/{{path:.*}}", self._post)
        for prefix in (f"{_ROLLOUT}/v1", _ROLLOUT):
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", _not_found)
        return app

    async def start(self) -> None:
        """Listen; ``port`` is the real one afterwards. Raises :class:`CommandError` if the address cannot be used."""
        try:
            await super().start()
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise CommandError(
                    f"cannot listen on {self.host}, which is no address of this machine: give one of its own with "
                    "--proxy-host"
                ) from error
            remedy = "give another one with --proxy-host HOST:PORT, or leave it out for any free port"
            raise CommandError(listen_problem(self.host, self.port, error, remedy), exit_code=1) from error
        self.upstreams.start()
        self._writer = CallWriter(self._sink, self._sink.add_calls)

    async def stop(self) -> None:
        """Take no more calls, wait for those that are running, write every one, and close.

        Calls still running after ``drain_timeout_s`` are cut off and recorded as failed. Raises
        :class:`CallsNotStoredError` if the store does not accept the calls within the same time.
        """
        if self._runner is None:
            return
        try:
            await super().stop()
            await self._writer.close(timeout_s=self.drain_timeout_s)
        finally:
            await self.upstreams.close()

    def base_url(self, rollout_id: str, attempt_id: str) -> str:
        """The base URL for the agent of an attempt; any OpenAI client takes it."""
        rollout, attempt = quote(rollout_id, safe=""), quote(attempt_id, safe="")
        return f"{self.url}/rollout/{rollout}/attempt/{attempt}/v1"

    def attempt_ended(self, rollout_id: str) -> None:
        """An attempt of the rollout has ended: ask the store before its next call, which is refused if it is late."""
        self._open_attempts.forget(rollout_id)
        self._conversations.forget(rollout_id)

    async def flush(self, rollout_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until every call answered so far (of one rollout) is in the store.

        Raises :class:`CallsNotStoredError` if the store refused one, or has not accepted all after ``timeout_s``.
        """
        await self._writer.flush(rollout_id, timeout_s=timeout_s)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        called = find_api(request.rel_url.raw_path_qs)
        if called is None:
            return await _not_found(request)
        return await (self._count_tokens if called.counts else self._call)(request, called)

    async def _call(self, request: web.Request, called: ApiPath) -> web.StreamResponse:
        exchange = HttpExchange(
            rollout_id=request.match_info["rollout_id"],
            attempt_id=request.match_info["attempt_id"],
            agent=calling_agent(request.headers),
            call_id=request.headers.get(CALL_HEADER, "")[:64],
            wire_api=called.api.name,
            started=clock.now(),
        )
        attempt = await self._open_attempts.check(exchange.rollout_id, exchange.attempt_id)
        if self._max_calls and attempt.calls >= self._max_calls:
            attempt.at_limit = True
            raise RefusedError(400, f"the rollout has made {self._max_calls} calls, as many as max_calls allows")
        attempt.add_call(exchange)
        reserve = partial(self._writer.reserve, exchange.rollout_id, exchange.attempt_id)
        places = [reserve()]
        try:
            body = await _read_body(request)
            fields = {**read_request(body), **called.fields}
            call = called.api(fields, self._conversations.of(exchange.rollout_id, len(body)))
            call.exchange, exchange.request = exchange, call.chat
            exchange.prompt_key = self._sampling_rule.apply(call.chat, attempt)
            exchange.choices = choices_of(call.chat)
            places += (reserve() for _ in range(exchange.choices - 1))
            if self._replay is not None:
                await self._replay.find(exchange)
            exchange.reply_id = call.reply_id
            return await self._answer(request, call, exchange, places)
        except RefusedError as refused:
            exchange.status, exchange.error = refused.status, str(refused)
            raise
        except BaseException as error:  # a cancelled handler, or a fault of ours: the call is recorded all the same
            if not exchange.ended:
                gone = isinstance(error, (asyncio.CancelledError, ConnectionResetError))
                exchange.status = CLIENT_GONE if gone else 500
                left = "the client left before the reply was complete"
                exchange.error = left if gone else f"the proxy failed: {error!r}"
            raise
        finally:
            self._record(exchange, places)
            if self._replay is not None:
                self._replay.ended(exchange)

    async def _answer(
        self, request: web.Request, call: WireCall, exchange: HttpExchange, places: Sequence[Place]
    ) -> web.StreamResponse:
        # A retry is a conversation of its own.
        session = "/".join(quote(each, safe="") for each in (exchange.rollout_id, exchange.attempt_id))
        policy = self._policy
        if exchange.recorded and self._replay is not None:
            policy = None if exchange.recorded[0].reply_body else self._replay.policy or policy
        if policy is None:
            record = partial(self._record, exchange, places)
            return await self.upstreams.answer(request, call, exchange, session=session, record=record)

        def on_sampled(choice: int, sampled: Mapping[str, Any]) -> None:
            exchange.sampled[choice], exchange.ended = sampled, exchange.ended or clock.now()
            self._writer.finish(places[choice], partial(read_exchange, exchange, choice))

        call.chat = {**call.chat, "model": policy.model_name}
        return await answer(request, call, policy, session=session, on_sampled=on_sampled)

    async def _count_tokens(self, request: web.Request, called: ApiPath) -> web.StreamResponse:
        rollout_id = request.match_info["rollout_id"]
        await self._open_attempts.check(rollout_id, request.match_info["attempt_id"])
        fields = {**read_request(await _read_body(request)), **called.fields}
        chat = called.api(fields, self._conversations.of(rollout_id)).chat
        if self._policy is None:
            count = await self.upstreams.count_tokens(request, chat)
        else:
            count = await self._policy.count_tokens({**chat, "model": self._policy.model_name})
        return web.json_response({called.api.count_field: count})

    async def _summary(self, request: web.Request) -> web.StreamResponse:
        names = require(list, read_request(await _read_body(request)).get("names"), "names")
        attempt = await self._open_attempts.check(**request.match_info)
        return web.json_response(asdict(attempt.summary([str(name) for name in names])))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._policy is not None:
            return web.json_response(self._policy.models())
        return await self.upstreams.forward(request, "models")

    def _record(self, exchange: HttpExchange, places: Sequence[Place]) -> None:
        """Record a call that has ended: every choice of its reply, or the first alone if it failed as a whole."""
        exchange.ended = exchange.ended or clock.now()
        if exchange.sampled:  # by the policy in this process, which has recorded each choice when it was complete
            return
        failed = exchange.status != _OK and not exchange.streamed
        for choice, place in enumerate(places[:1] if failed else places):
            self._writer.finish(place, partial(read_exchange, exchange, choice))


async def _read_body(request: web.Request) -> bytes:
    try:
        reading = request.read()
        return await (reading if request.content.is_eof() else asyncio.wait_for(reading, _BODY_S))
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(413, f"the request is larger than {_MAX_REQUEST_BYTES >> 20} MiB") from error
    except asyncio.TimeoutError as error:
        raise RefusedError(408, f"the request was not complete after {_BODY_S:g} s") from error


async def _not_found(request: web.Request) -> web.StreamResponse:
    path = request.path.lower()
    advice = next((advice for fragment, advice in _NOT_SERVED.items() if fragment in path), None)
    advice = advice or (
        "use the base URL of a rollout, http://HOST:PORT/rollout/ID/attempt/ID/v1, and its "
        "chat/completions, responses, messages or completions, or the API of Gemini, Bedrock's Converse or Ollama"
    )
    raise RefusedError(404, f"{request.method} {request.path:.200} is not traced: {advice}")
