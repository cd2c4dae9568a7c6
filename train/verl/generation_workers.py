"""verl's client in processes of its own, which send requests to verl's inference servers and collect their replies.

For one request verl's client makes three calls with Ray: for a server, for the reply, and for the end. They cost 1.9 ms
of CPU, more than everything else that a rollout of one call costs the trainer's process. Here that process sends all
requests of a few milliseconds in one call, and gets their replies likewise, for 0.15 ms (``benchmarks.ray_calls``).
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["GenerationClient", "GenerationError", "GenerationWorker", "Reply"]

_GATHER_S = 0.003
"""Requests, and replies, of this time are one call."""


class GenerationError(RuntimeError):
    """A request failed in a worker's process, or the process ended; the text names the error."""


class Reply(NamedTuple):
    """What verl's ``TokenOutput`` has: token ids, their log-probabilities, and verl's own figures."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    extra_fields: dict[str, Any]


class _Request(NamedTuple):
    number: int
    key: str
    prompt_ids: array[int]
    params: bytes
    """The sampling parameters, pickled."""


class _Unopened(dict[str, Any]):
    """Sampling parameters that only the server unpickles: they have types of vLLM, whose import takes seconds."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__()
        self._pickled = pickled

    def __reduce__(self) -> Any:
        return pickle.loads, (self._pickled,)


class GenerationWorker:
    """An actor of Ray. It sends requests after :meth:`connect`."""

    def __init__(self) -> None:
        self._client: Any = None
        self._open: Callable[[bytes], Any] = _Unopened
        self._tasks = set[asyncio.Task[None]]()
        self._ended: list[tuple[int, Reply | str]] = []
        self._any_ended = asyncio.Event()

    def load(self) -> None:
        """Import what verl's client needs, which takes seconds."""
        import verl.workers.rollout.llm_server  # noqa: F401

    def connect(self, client: Any, reads_params: bool) -> None:
        """``client`` is verl's; ``reads_params`` if it reads the sampling parameters itself."""
        self._client = client
        if reads_params:
            self._open = pickle.loads

    async def start(self, requests: Sequence[_Request]) -> None:
        """Send the requests; returns at once."""
        for request in requests:
            task = asyncio.create_task(self._generate(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def ended(self) -> list[tuple[int, Reply | str]]:
        """Wait for replies: the number of each request that ended since the last call, and its reply or its error."""
        await self._any_ended.wait()
        await asyncio.sleep(_GATHER_S)
        self._any_ended.clear()
        ended, self._ended = self._ended, []
        return ended

    async def _generate(self, request: _Request) -> None:
        try:
            output = await self._client.generate(
                request.key, prompt_ids=request.prompt_ids.tolist(), sampling_params=self._open(request.params)
            )
            reply: Reply | str = Reply(
                array("q", output.token_ids), array("d", output.log_probs or ()), dict(output.extra_fields)
            )
        except Exception as error:  # of any kind: it may not be picklable
            reply = f"{type(error).__name__}: {error}"
        self._ended.append((request.number, reply))
        self._any_ended.set()


class GenerationClient:
    """Has the method of ``client``, which is verl's, that :class:`.VerlEngine` calls.

    ``workers`` actors take turns; ``start`` starts one, at first and in place of one that failed. ``reads_params`` if
    ``client`` reads the sampling parameters itself.
    """

    def __init__(self, client: Any, start: Callable[[], Any], *, workers: int, reads_params: bool) -> None:
        self._connect = lambda: _Connection(start(), client, reads_params)
        self._connections = [self._connect() for _ in range(workers)]
        self._turns = itertools.cycle(range(workers))

    async def generate(self, key: str, *, prompt_ids: Sequence[int], sampling_params: dict[str, Any]) -> Reply:
        """As verl's ``LLMServerClient``. Raises :class:`GenerationError`."""
        turn = next(self._turns)
        if self._connections[turn].failed:
            self._connections[turn] = self._connect()
        return await self._connections[turn].generate(key, array("q", prompt_ids), pickle.dumps(sampling_params))


class _Connection:
    """The requests that one worker has. After an error of the worker all of them fail, and ``failed`` is true."""

    def __init__(self, worker: Any, *client: Any) -> None:
        self.failed = False
        self._worker, self._client, self._numbers = worker, client, itertools.count()
        self._waiting: list[_Request] = []
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[None] | None = None

    async def generate(self, key: str, prompt_ids: array[int], params: bytes) -> Reply:
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self._waiting.append(_Request(number, key, prompt_ids, params))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        if self._receiver is None or self._receiver.done():
            self._receiver = asyncio.create_task(self._receive())
        try:
            return await reply
        finally:
            self._replies.pop(number, None)

    async def _send(self) -> None:
        while self._waiting:
            await asyncio.sleep(_GATHER_S)
            requests, self._waiting = self._waiting, []
            try:
                if self._client:
                    await self._worker.connect.remote(*self._client)
                    self._client = ()
                await self._worker.start.remote(requests)
            except Exception as error:
                self._fail(error)

    async def _receive(self) -> None:
        while self._replies and not self.failed:
            try:
                ended = await self._worker.ended.remote()
            except Exception as error:
                self._fail(error)
                return
            for number, reply in ended:
                future = self._replies.get(number)
                if future is None or future.done():  # cancelled
                    continue
                if isinstance(reply, str):
                    future.set_exception(GenerationError(reply))
                else:
                    future.set_result(reply)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        text = f"the process that sends requests to verl's servers failed: {type(error).__name__}: {error}"
        for future in self._replies.values():
            if not future.done():
                future.set_exception(GenerationError(text))
