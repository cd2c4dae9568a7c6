"""Requests that go through worker processes get the replies, and the errors, of verl's client."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_actor import LocalActor

from groundwire.train.verl.generation_workers import GenerationClient, GenerationError, GenerationWorker
from groundwire.train.verl.worker_processes import start_actor


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not picklable")


class _Client:
    """Stands in for verl's client. A prompt that begins with a negative number is an error."""

    def __init__(self, opened: bool = True) -> None:
        self.keys: list[str] = []
        self._opened = opened

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.keys.append(request_id)
        if self._opened:
            assert sampling_params == {"temperature": 0.5}
        else:  # verl's client only passes them on to the server
            assert not sampling_params
            assert pickle.loads(pickle.dumps(sampling_params)) == {"temperature": 0.5}
        await asyncio.sleep(0.001 * prompt_ids[1])
        if prompt_ids[0] < 0:
            raise Unpicklable("no such prompt")
        return SimpleNamespace(token_ids=prompt_ids[::-1], log_probs=[-0.1] * len(prompt_ids), extra_fields={"v": 1})


def _client(start: Callable[[], Any]) -> GenerationClient:
    return GenerationClient(_Client(), start, workers=1, reads_params=True)


async def _ask(client: GenerationClient, *prompt: int, key: str = "key") -> Any:
    return await client.generate(key, prompt_ids=list(prompt), sampling_params={"temperature": 0.5})


@pytest.mark.parametrize("reads_params", [False, True])
def test_each_request_gets_its_reply_and_few_calls_carry_them_all(reads_params: bool) -> None:
    async def main() -> None:
        workers: list[LocalActor] = []

        def start() -> LocalActor:
            workers.append(LocalActor(GenerationWorker()))
            return workers[-1]

        client = GenerationClient(_Client(reads_params), start, workers=2, reads_params=reads_params)
        for _ in range(2):
            replies = await asyncio.gather(*(_ask(client, number, number % 7) for number in range(200)))
            assert [list(reply.token_ids) for reply in replies] == [[number % 7, number] for number in range(200)]
            assert all(list(reply.log_probs) == [-0.1, -0.1] for reply in replies)
            assert all(reply.extra_fields == {"v": 1} for reply in replies)
        assert sum(worker.calls for worker in workers) < 100
        assert [len(worker.actor._client.keys) for worker in workers] == [200, 200]

    asyncio.run(main())


def test_an_error_is_that_requests_alone() -> None:
    async def main() -> None:
        client = _client(lambda: LocalActor(GenerationWorker()))
        bad, good = await asyncio.gather(_ask(client, -1, 2), _ask(client, 3, 4), return_exceptions=True)
        assert isinstance(bad, GenerationError)
        assert str(bad) == "Unpicklable: no such prompt"
        assert list(good.token_ids) == [4, 3]

    asyncio.run(main())


def test_a_cancelled_request_does_not_disturb_the_others() -> None:
    async def main() -> None:
        client = _client(lambda: LocalActor(GenerationWorker()))
        cancelled, other = (asyncio.create_task(_ask(client, number, 30)) for number in range(2))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        assert list((await other).token_ids) == [30, 1]
        assert list((await _ask(client, 5, 0)).token_ids) == [0, 5]
        assert cancelled.cancelled()

    asyncio.run(main())


def test_requests_end_with_a_worker_that_ends_and_the_next_ones_go_on() -> None:
    class Ending(GenerationWorker):
        starts = 0

        async def start(self, requests: Any) -> None:
            self.starts += 1
            if self.starts == 2:
                raise OSError("the worker ended")
            await super().start(requests)

    async def main() -> None:
        client = _client(lambda: LocalActor(Ending()))
        assert list((await _ask(client, 1, 0)).token_ids) == [0, 1]
        with pytest.raises(GenerationError, match="sends requests to verl's servers failed: OSError: the worker ended"):
            await _ask(client, 2, 0)
        assert list((await _ask(client, 3, 0)).token_ids) == [0, 3]

    asyncio.run(main())


def test_requests_end_with_the_reason_if_a_worker_cannot_be_connected() -> None:
    class Client(_Client):
        def __reduce__(self) -> Any:
            return _no_module, ()

    async def main() -> None:
        client = GenerationClient(Client(), lambda: LocalActor(GenerationWorker()), workers=1, reads_params=True)
        for _ in range(2):
            with pytest.raises(GenerationError, match="ModuleNotFoundError: no module named verl"):
                await _ask(client, 1, 0)

    asyncio.run(main())


def _no_module() -> None:
    raise ModuleNotFoundError("no module named verl")


class _Ending(_Client):
    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        if prompt_ids[0] == 0:
            os._exit(1)
        return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params)


def test_a_worker_whose_process_ends_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    async def main() -> None:
        client = GenerationClient(_Ending(), partial(start_actor, GenerationWorker), workers=1, reads_params=True)
        assert list((await _ask(client, 1, 0)).token_ids) == [0, 1]
        open_request = asyncio.create_task(_ask(client, 2, 60_000))
        await asyncio.sleep(0.1)
        for request in (_ask(client, 0, 0), open_request):
            with pytest.raises(GenerationError, match="the process that sends requests to verl's servers failed"):
                await request
        assert list((await _ask(client, 3, 0)).token_ids) == [0, 3]

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
