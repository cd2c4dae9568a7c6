"""Rows into TransferQueue, verl's store of training data.

verl registers each prompt under its ``uid`` and reads two things: the prompt's status (``finished``: take its rows;
``failure``: replace it) and the rows under ``{uid}_{session}_{index}``. The calls are TransferQueue's blocking ones,
in a thread: they run on its own event loop, as the trainer's do.

A call costs a millisecond of CPU to mark a prompt and ten to put rows, however few it brings, in the process that also
serves the agents: what comes while one is under way goes into the next one together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from groundwire.train.verl.credit_assignment import TrainingRow

__all__ = ["RowQueue", "TransferQueueRows", "WriteCoalescer", "fields", "tag"]


T = TypeVar("T")


class RowQueue(Protocol):
    """Where rollouts leave their rows. ``partition`` is ``train`` or ``val``."""

    async def mark(self, uid: str, partition: str, status: str) -> None:
        """Say what a prompt's group is: ``running``, ``finished`` or ``failure``."""

    async def put(self, rows: Sequence[TrainingRow], partition: str) -> None:
        """Store rows of one rollout; they are there when this returns."""

    async def clear(self, keys: Sequence[str], partition: str) -> None:
        """Take rows out again."""


def tag(row: TrainingRow) -> dict[str, Any]:
    """What verl's sampler reads of a row without reading the row."""
    return {
        "status": "success",
        "prompt_len": len(row.prompt_ids),
        "response_len": len(row.response_ids),
        "seq_len": len(row.prompt_ids) + len(row.response_ids),
        "global_steps": row.step,
        "min_global_steps": row.first_version,
        "max_global_steps": row.last_version,
    }


def fields(row: TrainingRow, source: str) -> dict[str, Any]:
    """A row's tensors, as verl's workers and metrics name them (``verl/trainer/ppo/v1/agent_loop_tq.py``).

    int64 [tokens] each, ``rollout_log_probs`` and ``rm_scores`` float32; the reward stands on the last token.
    """
    import torch

    prompts = torch.tensor(row.prompt_ids, dtype=torch.int64)
    responses = torch.tensor(row.response_ids, dtype=torch.int64)
    mask = torch.tensor(row.mask, dtype=torch.int64)
    scores = torch.zeros(len(row.response_ids), dtype=torch.float32)
    scores[-1] = row.reward
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.tensor(row.logprobs, dtype=torch.float32),
        "rm_scores": scores,
        "multi_modal_inputs": {},
        "uid": row.uid,
        "session_id": row.session,
        "num_turns": row.turns,
        "data_source": source,
        # verl takes "acc" for the accuracy, counting what is missing as 0: a failure of the infrastructure is no 0.
        "extra_fields": {"reward_extra_info": {name: value for name, value in row.info.items() if name != "acc"}},
    }


class WriteCoalescer(Generic[T]):
    """Hands ``store(items, partition)`` all that came while its last call was under way, in one call."""

    def __init__(self, store: Callable[[list[T], str], Awaitable[None]]) -> None:
        self._store = store
        self._waiting: dict[str, list[tuple[Sequence[T], asyncio.Future[None]]]] = {}
        self._writer: asyncio.Task[None] | None = None

    async def put(self, items: Sequence[T], partition: str) -> None:
        """Returns when ``items`` are stored; raises what ``store`` raised."""
        stored = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(partition, []).append((items, stored))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name="together")
        await stored

    async def _write(self) -> None:
        while self._waiting:
            partition, waiting = self._waiting.popitem()
            try:
                await self._store([item for items, _ in waiting for item in items], partition)
            except Exception as error:
                _end(waiting, error)
            else:
                _end(waiting, None)


def _end(waiting: Sequence[tuple[Any, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, stored in waiting:
        if stored.done():  # nobody waits any more
            continue
        if error is None:
            stored.set_result(None)
        else:
            stored.set_exception(error)


class TransferQueueRows:
    """The real one; TransferQueue has been initialized in this process. ``source`` is what verl groups metrics by."""

    def __init__(self, source: str) -> None:
        import transfer_queue

        self._queue, self._source = transfer_queue, source
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="transfer-queue")
        self._rows = WriteCoalescer[TrainingRow](
            lambda rows, partition: self._call(self._store, rows=rows, partition=partition)
        )
        self._marks = WriteCoalescer[tuple[str, str]](self._mark)

    async def mark(self, uid: str, partition: str, status: str) -> None:
        """See :class:`RowQueue`."""
        await self._marks.put([(uid, status)], partition)

    async def put(self, rows: Sequence[TrainingRow], partition: str) -> None:
        """See :class:`RowQueue`."""
        await self._rows.put(rows, partition)

    async def clear(self, keys: Sequence[str], partition: str) -> None:
        """See :class:`RowQueue`."""
        await self._call(self._queue.kv_clear, keys=list(keys), partition_id=partition)

    async def _mark(self, marks: Sequence[tuple[str, str]], partition: str) -> None:
        keys, tags = [uid for uid, _ in marks], [{"status": status} for _, status in marks]
        await self._call(self._queue.kv_batch_put, keys=keys, partition_id=partition, tags=tags)

    def _store(self, rows: Sequence[TrainingRow], partition: str) -> None:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        self._queue.kv_batch_put(
            keys=[row.key for row in rows],
            partition_id=partition,
            fields=list_of_dict_to_tensordict([fields(row, self._source) for row in rows]),
            tags=[tag(row) for row in rows],
        )

    async def _call(self, work: Callable[..., Any], **arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(**arguments))
