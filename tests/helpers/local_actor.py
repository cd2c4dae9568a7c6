"""An actor of Ray without Ray: methods run on the event loop or in threads, with copies of arguments and results."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from types import SimpleNamespace
from typing import Any


class LocalActor:
    """``LocalActor(thing).method.remote(...)`` is awaited for what ``thing.method(...)`` returns."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            method, copies = getattr(self.actor, name), _copy(arguments)
            if inspect.iscoroutinefunction(method):
                return _copy(await method(*copies))
            return _copy(await asyncio.to_thread(method, *copies))  # it may take long, as in its own process

        def remote(*arguments: Any) -> Any:
            self.calls += 1
            return asyncio.ensure_future(call(*arguments))

        return SimpleNamespace(remote=remote)


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))
