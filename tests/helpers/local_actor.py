"""An actor of Ray's without Ray: its methods run on the caller's event loop, with copies of arguments and results."""

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
            result = getattr(self.actor, name)(*_copy(arguments))
            return _copy(await result if inspect.isawaitable(result) else result)

        def remote(*arguments: Any) -> Any:
            self.calls += 1
            return asyncio.ensure_future(call(*arguments))

        return SimpleNamespace(remote=remote)


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))
