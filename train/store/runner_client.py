"""A runner's client of a store: ours or Agent Lightning's, without a dependency on Agent Lightning.

So runners work in the environment of an agent, whose packages need not fit those of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import quote

from groundwire.adapters.tracing.spans import SpanRecord, SpansRefusedError, span_parts
from groundwire.tools.secrets import secret_masker
from groundwire.train.store.connection import StoreConnection
from groundwire.train.store.errors import StoreFailedError
from groundwire.train.store.wire import AttemptedRollout, ResourcesUpdate, RolloutStatus, span_fields

__all__ = ["RunnerClient"]


class RunnerClient:
    """A :class:`groundwire.train.store.wire.RunnerStore` and a store of spans. Call :meth:`start` before use.

    The arguments are those of :class:`StoreConnection`. A reply that is no JSON of Agent Lightning 0.3 is a
    ``ValueError``, and so is a refused request.
    """

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = float("inf")) -> None:
        self.connection = StoreConnection(address, token=token, timeout_s=timeout_s)

    async def start(self) -> None:
        """Check the store. Raises :class:`groundwire.train.store.health.StoreAddressError`."""
        await self.connection.start()

    async def stop(self) -> None:
        """Close the connections; later requests raise ``RuntimeError``."""
        await self.connection.close()

    async def dequeue_many_rollouts(self, *, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        """Take up to ``limit`` rollouts from the queue."""
        request = {"limit": limit, "worker_id": worker_id}
        rollouts = await self.connection.request("post", "/queues/rollouts/dequeue", json=request)
        return [AttemptedRollout.model_validate(rollout) for rollout in rollouts]

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The resources of a run; None if the store does not have them."""
        return _resources(await self.connection.request("get", f"/resources/{quote(resources_id, safe='')}"))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The resources that were changed last; None if there are none."""
        return _resources(await self.connection.request("get", "/resources/latest"))

    async def get_rollout_by_id(self, rollout_id: str) -> RolloutStatus | None:
        """A rollout with its last attempt; None if the store does not have it."""
        found = await self.connection.request("get", f"/rollouts/{quote(rollout_id, safe='')}")
        return None if found is None else RolloutStatus.model_validate(found)

    async def update_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> None:
        """Change an attempt's ``status`` or ``last_heartbeat_time``."""
        path = f"/rollouts/{quote(rollout_id, safe='')}/attempts/{quote(attempt_id, safe='')}"
        await self.connection.request("post", path, json=changes)

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt.

        Raises :class:`SpansRefusedError`, as :meth:`add_spans` does.
        """
        try:
            if self.connection.batches:
                return await self.connection.request("post", "/spans/next/batch", json=attempts)
            return [await self._next_sequence_id(*attempt) for attempt in attempts]
        except (ValueError, StoreFailedError) as error:
            raise SpansRefusedError(str(error)) from error

    async def add_spans(self, spans: Sequence[SpanRecord]) -> None:
        """Store ``spans``; those that are stored already are skipped."""
        try:
            for part in span_parts(spans):
                fields = [span_fields(span, self._mask) for span in part]
                if self.connection.batches:
                    await self.connection.request("post", "/spans/batch", json=fields)
                else:
                    for each in fields:
                        await self.connection.request("post", "/spans", json=each)
        except (ValueError, StoreFailedError) as error:
            raise SpansRefusedError(str(error)) from error

    async def _next_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        request = {"rollout_id": rollout_id, "attempt_id": attempt_id}
        return (await self.connection.request("post", "/spans/next", json=request))["sequence_id"]

    @cached_property
    def _mask(self) -> Callable[[str], str]:
        return secret_masker()


def _resources(found: Any) -> ResourcesUpdate | None:
    return None if found is None else ResourcesUpdate.model_validate(found)
