"""Sends the LLM calls of an agent, which stays as it is, to the URL of its attempt.

OpenTelemetry's context holds the attempt while its agent runs: tasks inherit it, and threads and jobs of thread pools
get a copy of all context variables when they are started. Hooks on httpx, aiohttp, requests and botocore look for it.
An LLM call in such a context goes to the attempt's own URL, with the endpoint's API key and the name of the calling
agent. So an agent keeps the clients, base URLs and model names of its author, also clients that were made before the
run began, and no other host sees the URL. What would leave for a known provider of models is refused.

A request is an LLM call if it is a POST to the path of a known API, and its path or its body names a model.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from opentelemetry import context

from groundwire.adapters._types import AGENT_HEADER, Endpoint, quoted_name
from groundwire.adapters.agents.agent_names import current_agent, follow_agent_names
from groundwire.adapters.agents.answers import ToolCalls
from groundwire.adapters.agents.changes import skip, undo_later, wrap
from groundwire.adapters.agents.early_runs import EarlyCallError, is_making
from groundwire.adapters.agents.providers import ProviderRefusedError, guard, is_provider
from groundwire.adapters.tracing.emitted_spans import CALL_HEADER, as_job, call_headers
from groundwire.adapters.tracing.wire.exchange import error_code, error_message
from groundwire.adapters.tracing.wire.paths import SERVED, ApiPath, find_api
from groundwire.adapters.tracing.wire.request import ERROR_HEADER

_KEY = context.create_key("groundwire-attempt")
_sending: ContextVar[bool] = ContextVar("groundwire-sending", default=False)
_of_program: AttemptCalls | None = None  # the attempt that has started this process, if it is a program of its own
_MAX_HOSTS = 20
_loops: WeakKeyDictionary[Any, asyncio.AbstractEventLoop] = WeakKeyDictionary()
"""The event loop on which each asynchronous client made its last traced call."""
_CREDENTIALS = (
    "x-api-key", "api-key", "x-goog-api-key", "x-amz-security-token", "cookie", "openai-organization", "openai-project",
)  # fmt: skip
_REPLY_CACHES = (
    ("dspy.clients.cache", "Cache.get"),
    ("litellm.caching.caching", "Cache.get_cache"),
    ("litellm.caching.caching", "Cache.async_get_cache"),
    ("langchain_core.caches", "InMemoryCache.lookup"),
    ("langchain_community.cache", "SQLAlchemyCache.lookup"),
)
"""Module and method that looks for a reply in a cache of a framework, and returns None if there is none. A reply of
earlier weights, or of another rollout, would be an action that the policy did not take."""


class AttemptEndedError(RuntimeError):
    """A call in the context of an attempt that has ended; it is no failure of the policy."""


@dataclass(kw_only=True)
class AttemptCalls:
    """The calls of one attempt. ``train_model`` finds the names of models that are trained; None: all."""

    endpoint: Endpoint
    train_model: re.Pattern[str] | None = None
    redirects: bool = True
    """Whether calls are sent to the endpoint. If not, the agent does it by itself, and its calls are only watched."""
    traced: int = 0
    elsewhere: str = ""
    """The address of the last call that an agent with ``endpoint`` sent to another one."""
    models: Counter[str] = field(default_factory=Counter)
    """The model names of calls that were left to their own provider."""
    hosts: Counter[str] = field(default_factory=Counter)
    """The hosts of all other requests, the first 20."""
    refused_host: str = ""
    refused: str = ""
    """Why the last call to a known provider of models was refused."""
    conversation: ToolCalls = field(default_factory=ToolCalls)
    ended: bool = False
    """Whether the attempt has ended: then a thread or task that it left behind has its context, which is void."""
    error: tuple[int | None, str, str] | None = None
    """Status, code and message of the last traced call, if it failed; the status is None without an answer."""

    def target(self, method: str, url: str, body: Any) -> str | None:
        """The URL that a request is sent to instead of ``url``; None if it is left as it is.

        Raises :class:`AttemptEndedError` for an LLM call after the end of the attempt.
        """
        if not self.redirects and url.startswith(self.endpoint.base_url):
            self.traced, self.error = self.traced + 1, None
            return url
        address, call = urlsplit(url), _read_call(method, url, body)
        host = address.hostname or url
        if call is None:
            if len(self.hosts) < _MAX_HOSTS or host in self.hosts:
                self.hosts[host] += 1
            self.check_host(host)  # its connection may be open
            return None
        called, request = call
        model = request["model"]
        if not self.redirects:
            self.elsewhere = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
            return None
        if self.train_model is not None and not self.train_model.search(model):
            self.models[model] += 1
            return None
        if self.ended:
            raise AttemptEndedError(
                f"a call to model {model!r} comes from a thread or task of a rollout that has ended, so it belongs to "
                "no rollout: start threads and tasks in the rollout that they work for, or hand jobs over as "
                "contextvars.copy_context().run"
            )
        if called.counts:  # samples nothing
            self.hosts[host] += 1
        else:
            self.traced, self.error = self.traced + 1, None
            self.conversation.add(called.api, request)
        return f"{self.endpoint.base_url.rstrip('/')}{called.path}"

    def check_host(self, host: str) -> None:
        """Raise :class:`.ProviderRefusedError` for a provider of models, unless some models are not trained."""
        if self.train_model is None and is_provider(host):
            self.refused_host = host
            self.refused = (
                f"the agent's call to {host} was refused, as that provider would be paid for it: the policy serves "
                f"{SERVED}, through httpx, aiohttp, requests or botocore; or give --train-model REGEX, and all other "
                "models are asked at their providers"
            )
            raise ProviderRefusedError(self.refused)

    def headers(self) -> dict[str, str]:
        """The headers of a traced call that replace the agent's own. To be called once for each."""
        host = urlsplit(self.endpoint.base_url).netloc
        own = {"host": host, "authorization": f"Bearer {self.endpoint.api_key}", "content-type": "application/json"}
        return {**own, **self.own_headers()}

    def own_headers(self) -> dict[str, str]:
        """Those that say which call it is, and whose."""
        name = current_agent()
        return {**call_headers(), **({AGENT_HEADER: quoted_name(name)} if name else {})}

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Record that a traced call has no answer. What is sent meanwhile is this call: httpx may use aiohttp."""
        token = _sending.set(True)
        try:
            yield
        except Exception as error:
            self.error = None, "", f"{type(error).__name__}: {error}"
            raise
        finally:
            _sending.reset(token)

    def failed(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Record that the policy refused a traced call."""
        self.error = status, headers.get(ERROR_HEADER) or error_code(body), error_message(body)


def _read_call(method: str, url: str, body: Any) -> tuple[ApiPath, dict[str, Any]] | None:
    """The API of an LLM call and its request, with the fields in its path; None for any other request."""
    address = urlsplit(url)
    if method.upper() != "POST" or (called := find_api(f"{address.path}?{address.query}")) is None:
        return None
    try:
        request = json.loads(body or "")
    except (ValueError, TypeError, RecursionError):  # the body may be a form or a stream
        return None
    if not isinstance(request, dict) or not any(name in request for name in called.api.fields):
        return None
    request = {**request, **called.fields}
    return (called, request) if isinstance(request.get("model"), str) else None


def _end_if_making(method: str, url: str, body: Any) -> None:
    if is_making() and _read_call(method, url, body):
        raise EarlyCallError(urlsplit(url).hostname)


@contextmanager
def redirected(calls: AttemptCalls) -> Iterator[None]:
    """Send the LLM calls that are made in this block to the endpoint of ``calls``, or watch them."""
    install()
    follow_agent_names()
    token = context.attach(context.set_value(_KEY, calls))
    try:
        yield
    finally:
        calls.ended = True
        context.detach(token)


@cache
def install() -> None:
    """Install the hooks, once in a run; each package is hooked when it is imported."""
    for module, path, wrapper in (
        ("threading", "Thread.start", _start_thread),
        ("concurrent.futures.thread", "ThreadPoolExecutor.submit", _submit_job),
        *((name, "Client.send", _send) for name in ("httpx", "httpx2")),
        *((name, "AsyncClient.send", _send_async) for name in ("httpx", "httpx2")),
        ("aiohttp", "ClientSession._request", _request_aiohttp),
        ("requests", "Session.send", _send),
        ("agents.models.openai_responses", "OpenAIResponsesWSModel._fetch_response", _fetch_over_http),
        ("botocore.httpsession", "URLLib3Session.send", _send),
    ):
        wrap(module, path, wrapper)
    guard(_check_host)
    skip(_REPLY_CACHES, lambda _: _attempt())
    undo_later(install.cache_clear)


def redirect_program() -> None:
    """Send the LLM calls of this process, a program that a rollout has started, to the URL in its variables."""
    global _of_program  # noqa: PLW0603
    key = os.environ.get("OPENAI_API_KEY", "none")
    _of_program = AttemptCalls(endpoint=Endpoint(base_url=os.environ["OPENAI_BASE_URL"], model="", api_key=key))
    install()
    follow_agent_names()


def _attempt() -> Any:
    """The calls of the present attempt; None outside of one."""
    return context.get_value(_KEY) or _of_program


def _check_host(host: str) -> None:
    calls = _attempt()
    if calls is not None:
        calls.check_host(host)


def note_connection() -> None:
    """A connection to the attempt's URL was made, by whatever client: the attempt makes LLM calls."""
    calls = _attempt()
    if calls is not None:
        calls.traced += 1


def _redirect(client: Any, args: Any, kwargs: Any) -> AttemptCalls | None:
    """Change a request of httpx or requests that is an LLM call; None if it is left as it is."""
    request = args[0] if args else kwargs["request"]
    body = request.body if hasattr(request, "body") else getattr(request, "_content", None)  # of requests, of httpx
    calls = _attempt()
    _end_if_making(request.method, str(request.url), body)
    target = calls and calls.target(request.method, str(request.url), body)
    if target is None:
        return None
    if calls.redirects:
        request.url = type(request.url)(target)
        for name in _CREDENTIALS:
            request.headers.pop(name, None)
        request.headers.update(calls.headers())
        if "proxies" in kwargs:  # which requests has found for the agent's own URL
            kwargs["proxies"] = {}
        elif mounts := getattr(client, "_mounts", None):  # proxies that httpx found when the client was made
            host = urlsplit(calls.endpoint.base_url).netloc.rpartition("@")[2]
            direct = type(next(iter(mounts)))(f"all://{host}")
            if direct not in mounts:
                client._mounts = dict(sorted({**mounts, direct: None}.items()))
    elif CALL_HEADER not in request.headers:  # else it is a client of ours
        for name, value in calls.own_headers().items():
            request.headers.setdefault(name, value)
    return calls


def _send(wrapped: Any, client: Any, args: Any, kwargs: Any) -> Any:
    calls = _redirect(client, args, kwargs)
    if calls is None:
        return wrapped(*args, **kwargs)
    with calls.sending():
        response = wrapped(*args, **kwargs)
    if response.status_code >= 400:
        body = response.read() if hasattr(response, "read") else response.content
        calls.failed(response.status_code, body, response.headers)
    return response


async def _send_async(wrapped: Any, client: Any, args: Any, kwargs: Any) -> Any:
    calls = _redirect(client, args, kwargs)
    if calls is None:
        return await wrapped(*args, **kwargs)
    _forget_other_loop(client)
    with calls.sending():
        response = await wrapped(*args, **kwargs)
    if response.status_code >= 400:
        calls.failed(response.status_code, await response.aread(), response.headers)
    return response


def _forget_other_loop(client: Any) -> None:
    """Drop the connections that ``client`` opened on another event loop, which would fail its next call.

    An agent's module makes its client once; each run has an event loop of its own, and so may have each rollout.
    """
    loop = asyncio.get_running_loop()
    last, _loops[client] = _loops.get(client), loop
    if last is not None and last is not loop:
        for transport in (client._transport, *client._mounts.values()):
            pool: Any = getattr(transport, "_pool", None)
            if hasattr(pool, "_connections"):
                pool._connections.clear()


async def _request_aiohttp(wrapped: Any, session: Any, args: Any, kwargs: Any) -> Any:
    calls = _attempt()
    method, url, *rest = args
    body = kwargs.get("data") if kwargs.get("json") is None else json.dumps(kwargs["json"])
    _end_if_making(method, str(url), body)
    sent = dict(kwargs.get("headers") or {})
    if calls is None or not calls.redirects or _sending.get():  # by httpx on top of it
        return await wrapped(*args, **kwargs)
    if (target := calls.target(method, str(url), body)) is None:
        return await wrapped(*args, **kwargs)
    own = {"host", "authorization", "content-type", *_CREDENTIALS, AGENT_HEADER, CALL_HEADER}
    headers = {name: value for name, value in sent.items() if name.lower() not in own}
    raises = session._raise_for_status if kwargs.get("raise_for_status") is None else kwargs["raise_for_status"]
    kwargs = {**kwargs, "headers": {**headers, **calls.headers()}, "params": None, "raise_for_status": False}
    with calls.sending():
        response = await wrapped(method, target, *rest, **kwargs)
    if response.status >= 400:
        calls.failed(response.status, await response.read(), response.headers)
    if callable(raises):
        await raises(response)
    elif raises:
        response.raise_for_status()
    return response


def _fetch_over_http(fetch: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """Let the Agents SDK's model that speaks over a WebSocket ask over HTTP in an attempt, as its base class does."""
    calls = _attempt()
    if calls is None or not calls.redirects:
        return fetch(*args, **kwargs)
    base = sys.modules["agents.models.openai_responses"].OpenAIResponsesModel
    return base._fetch_response(model, *args, **kwargs)


def _start_thread(start: Any, thread: Any, args: Any, kwargs: Any) -> Any:
    thread.run = as_job(thread.run)
    return start(*args, **kwargs)


def _submit_job(submit: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    function, *rest = args
    return submit(as_job(function), *rest, **kwargs)
