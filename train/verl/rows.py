"""A trajectory as verl stores it: a row under ``{uid}_{session}_{index}`` (prompt, rollout, trajectory).

verl's estimators know no calls, so the advantages are those of :func:`.training_items`. Rows have them, and the
sampler's log-probabilities as the old ones, from the start: verl's trainer would write them while the GPUs wait
(:mod:`.patches`). Its workers would read all columns, and each costs time for each row: they read half of them, and
derive what follows from these.

Rows are written into TransferQueue, verl's store of training data. verl registers each prompt there under its ``uid``
and reads two things: the prompt's status (``finished``: take its rows; ``failure``: replace the prompt) and its rows.
TransferQueue's calls block, so those with statuses run in a thread. Rows are written by processes of their own, since
two GPUs sample thousands of rows in a few seconds. A call has a cost of its own, so everything that arrives while no
writer is idle is written by the next call together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from groundwire.tools.startup import freeze_objects
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.verl.shared_prefixes.prefixes import prefix_hashes

if TYPE_CHECKING:  # verl's workers import this module and need none of these
    from torch import Tensor

    from groundwire.adapters.tracing import LLMCall
    from groundwire.train.algorithms.credit import TrainingGroup

T = TypeVar("T")
_MAX_WRITE_S = 300.0  # a write takes milliseconds, and verl's trainer waits for a lost one without end
PADDED_COLUMNS = ("old_log_probs", "advantages", "returns")
"""Our columns with a value per token: in verl's rows of padding they need the length of its reply."""
GRAMMARS = "grammars"
"""Our column with :attr:`TrainingRow.grammars`; "" in verl's rows of padding."""
READ_COLUMNS = (
    "input_ids", "response_mask", "old_log_probs", "ref_log_prob", "rollout_is_weights", "advantages", GRAMMARS
)  # fmt: skip
"""What a pass for log-probabilities or an update needs of a row, if the row has it."""
DERIVED_COLUMNS = ("prompts", "responses", "position_ids", "loss_mask")
"""What verl's engine also reads; ours calls :func:`add_derived_columns`."""


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One trajectory as verl stores it. All lists but ``prompt_ids`` have the length of ``response_ids``."""

    uid: str
    session: int
    index: int = 0
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    advantages: list[float] | None = None
    """Those that the tokens are trained with; None if verl computes them."""
    logprobs: list[float]
    reward: float
    turns: int = 0
    """LLM calls of the whole rollout."""
    first_version: int
    last_version: int
    """Versions of the weights at the first and at the last sampled token."""
    step: int
    info: Mapping[str, float] = field(default_factory=dict)
    grammars: str = ""
    """JSON of :attr:`.TrainingItem.constrained`; "" without a trained reply to a grammar."""

    @property
    def key(self) -> str:
        """verl's key of the row."""
        return f"{self.uid}_{self.session}_{self.index}"

    @property
    def has_gradient(self) -> bool:
        """Whether an advantage is not 0. Rows whose advantages verl computes are taken to have one."""
        return self.advantages is None or any(self.advantages)


def training_rows(
    group: TrainingGroup, sessions: Iterable[int], step: int, agent_match: str | None, *, own_advantages: bool
) -> list[TrainingRow]:
    """The rows of a group, whose rollouts have these ``sessions``. A rollout of which nothing is trained has none.

    Without ``own_advantages`` verl computes them.
    """
    rows: list[TrainingRow] = []
    for session, trained in zip(sessions, group.rollouts, strict=True):
        # The trajectory with the last call comes last: verl takes a session's reward from its row with the highest
        # index.
        items = sorted(trained.items, key=lambda item: item.trajectory.calls[-1].sequence)
        for index, item in enumerate(items):
            versions = [_weights_versions(call, step) for call in item.trajectory.calls]
            rows.append(
                TrainingRow(
                    uid=trained.rollout.group,
                    session=session,
                    index=index,
                    prompt_ids=item.trajectory.prompt_ids,
                    response_ids=item.trajectory.response_ids,
                    mask=item.mask,
                    advantages=item.advantages if own_advantages else None,
                    logprobs=item.trajectory.logprobs,
                    reward=trained.reward,
                    turns=len(trained.rollout.trained_calls(agent_match)),
                    first_version=min(first for first, _ in versions),
                    last_version=max(last for _, last in versions),
                    step=step,
                    info={name: float(value) for name, value in trained.rollout.outcome.reward_components.items()},
                    grammars=json.dumps(item.constrained) if item.constrained else "",
                )
            )
    return rows


def _weights_versions(call: LLMCall, step: int) -> tuple[int, int]:
    """Versions of the weights at a call's first and last token; a missing one counts as this step's."""
    last = call.weights_version if call.weights_version is not None else max(0, step - 1)
    first = call.first_weights_version if call.first_weights_version is not None else last
    return first, last


def row_tag(row: TrainingRow) -> dict[str, Any]:
    """The tag of a row: what verl's sampler and :func:`.divide_rows` know of it."""
    return {
        "status": "success",
        "prompt_len": len(row.prompt_ids),
        "response_len": len(row.response_ids),
        "seq_len": len(row.prompt_ids) + len(row.response_ids),
        "global_steps": row.step,
        "min_global_steps": row.first_version,
        "max_global_steps": row.last_version,
        "has_gradient": row.has_gradient,
        "prefix_hashes": prefix_hashes(row.prompt_ids),
    }


def row_fields(row: TrainingRow, source: str) -> dict[str, Any]:
    """A row's fields under verl's names (``verl/trainer/ppo/v1/agent_loop_tq.py``); ``source`` groups verl's metrics.

    Tensors are int64 [tokens], but log-probabilities, ``rm_scores``, advantages and returns float32 [response tokens].
    """
    import torch

    prompts = torch.tensor(row.prompt_ids, dtype=torch.int64)
    responses = torch.tensor(row.response_ids, dtype=torch.int64)
    mask = torch.tensor(row.mask, dtype=torch.int64)
    logprobs = torch.tensor(row.logprobs, dtype=torch.float32)
    scores = torch.zeros_like(logprobs)
    scores[-1] = row.reward
    advantages = {}
    if row.advantages is not None:  # else verl computes them
        advantages = dict.fromkeys(("advantages", "returns"), torch.tensor(row.advantages, dtype=torch.float32) * mask)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": logprobs,
        "old_log_probs": logprobs,  # until verl computes others
        **advantages,
        "rm_scores": scores,
        GRAMMARS: row.grammars,
        "multi_modal_inputs": {},
        "uid": row.uid,
        "session_id": row.session,
        "num_turns": row.turns,
        "data_source": source,
        # verl reads "acc" as accuracy and counts missing rollouts as 0, which infrastructure failures are not.
        "extra_fields": {"reward_extra_info": {name: value for name, value in row.info.items() if name != "acc"}},
    }


def add_derived_columns(data: Any) -> None:
    """Add the columns that a worker did not read: each is jagged, int64 [rows, tokens] or [rows, reply's tokens]."""
    import torch

    if "loss_mask" in data:
        return
    ids, mask = data["input_ids"], data["response_mask"]
    lengths, replies = ids.offsets().diff(), mask.offsets().diff()
    position = torch.arange(len(ids.values())) - ids.offsets()[:-1].repeat_interleave(lengths)
    of_reply = position >= (lengths - replies).repeat_interleave(lengths)
    data["prompts"] = _jagged(ids.values()[~of_reply], lengths - replies)
    data["responses"] = _jagged(ids.values()[of_reply], replies)
    data["position_ids"] = _jagged(position, lengths)
    data["loss_mask"] = mask


def _jagged(values: Tensor, lengths: Tensor) -> Tensor:
    import torch

    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


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
