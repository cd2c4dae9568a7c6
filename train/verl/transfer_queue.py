"""Writes rows into TransferQueue, verl's store of training data.

verl registers each prompt under its ``uid`` and reads two things: the prompt's status (``finished``: take its rows;
``failure``: replace the prompt) and its rows. TransferQueue's calls block, so those with statuses run in a thread. Rows
are written by processes of their own, since two GPUs sample thousands of rows in a few seconds. A call has a cost of
its own, so everything that arrives while no writer is idle is written by the next call together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from groundwire.tools.startup import freeze_objects
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.verl.rows import TrainingRow, row_fields, row_tag

T = TypeVar("T")
_MAX_WRITE_S = 300.0  # a write takes milliseconds, and verl's trainer waits for a lost one without end


class WriteCoalescer(Generic[T]):
    """Passes items to one of ``stores``, called as ``store(items, partition)``; what arrives meanwhile, together."""

    def __init__(self, stores: Iterable[Callable[[list[T], str], Awaitable[None]]]) -> None:
        self._idle = list(stores)
        self._waiting: dict[str, list[tuple[Sequence[T], asyncio.Future[None]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop does not keep them

    async def put(self, items: Sequence[T], partition: str) -> None:
        """Returns when ``items`` are stored; raises what the store raised."""
        stored = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(partition, []).append((items, stored))
        if self._idle:
            task = asyncio.create_task(self._write(self._idle.pop()), name="write-rows")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await stored

    async def _write(self, store: Callable[[list[T], str], Awaitable[None]]) -> None:
        while self._waiting:
            partition, waiting = self._waiting.popitem()
            failure: Exception | None = None
            try:
                await store([item for items, _ in waiting for item in items], partition)
            except Exception as error:
                failure = error
            for stored in (stored for _, stored in waiting if not stored.done()):  # its task was not cancelled
                stored.set_exception(failure) if failure else stored.set_result(None)
        self._idle.append(store)  # not in a callback of the task: what arrives before it runs would wait forever


class RowWriter:
    """An actor of Ray that stores rows."""

    def __init__(self) -> None:
        import transfer_queue
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        transfer_queue.init()  # the one of the trainer's process
        self._queue, self._to_fields = transfer_queue, list_of_dict_to_tensordict
        freeze_objects()

    def put(self, rows: Sequence[TrainingRow], partition: str, source: str) -> None:
        """Store ``rows``; ``source`` groups verl's metrics. A second call with the same rows changes nothing."""
        self._queue.kv_batch_put(
            keys=[row.key for row in rows],
            partition_id=partition,
            fields=self._to_fields([row_fields(row, source) for row in rows]),
            tags=[row_tag(row) for row in rows],
        )


class TransferQueueRows:
    """The queue in which verl's trainer finds groups and rows; ``partition`` is ``train`` or ``val``.

    TransferQueue must be initialized in this process. ``writers`` are :class:`RowWriter` in others.
    """

    def __init__(self, writers: Sequence[Any], source: str) -> None:
        import transfer_queue

        self._queue, self._source = transfer_queue, source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transfer-queue")
        self._rows = WriteCoalescer[TrainingRow](partial(self._put_rows, writer) for writer in writers)
        self._statuses = WriteCoalescer[tuple[str, str]]([self._put_statuses])

    async def set_status(self, uid: str, partition: str, status: str) -> None:
        """Set the status of a prompt's group: ``running``, ``finished`` or ``failure``. Raises as :meth:`put` does."""
        await _written(self._statuses.put([(uid, status)], partition), f"the status {status!r} of a group")

    async def put(self, rows: Sequence[TrainingRow], partition: str) -> None:
        """Store the rows of a group. Raises :class:`RolloutsFailedError` without an answer after some minutes."""
        await _written(self._rows.put(rows, partition), "the rows of a group")

    async def _put_statuses(self, statuses: Sequence[tuple[str, str]], partition: str) -> None:
        keys, tags = [uid for uid, _ in statuses], [{"status": status} for _, status in statuses]
        await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._queue.kv_batch_put(keys=keys, partition_id=partition, tags=tags)
        )

    async def _put_rows(self, writer: Any, rows: Sequence[TrainingRow], partition: str) -> None:
        await writer.put.remote(rows, partition, self._source)


async def _written(write: Awaitable[None], what: str) -> None:
    try:
        await asyncio.wait_for(write, _MAX_WRITE_S)
    except asyncio.TimeoutError:
        raise RolloutsFailedError(
            f"verl's TransferQueue has not stored {what} for {_MAX_WRITE_S:g} s: the messages before may say why; "
            "--resume continues from the last checkpoint"
        ) from None
