"""The store with the methods of Agent Lightning's ``LightningStore``, in JSON, as its HTTP API names them.

They are for foreign clients: dashboards, runners and algorithms of Agent Lightning. Ours use few of them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partialmethod
from typing import Any

from pydantic_core import from_json, to_json

from groundwire.tools import clock
from groundwire.train.store.agent_lightning import (
    ATTEMPT_FIELDS,
    REQUESTED,
    Request,
    RolloutFields,
    SpanFields,
    attempt_json,
    read_request,
    request_json,
    rollout_json,
)
from groundwire.train.store.base import attempt_of
from groundwire.train.store.rollout import Attempt, AttemptStatus, Rollout
from groundwire.train.store.sqlite import ROLLOUT_COLUMNS, SqliteStore

Json = dict[str, Any]
_NO_ATTEMPT: Mapping[str, Any] = {"current_rollout_id": None, "current_attempt_id": None}
_TIMES = ("last_heartbeat_time", "last_dequeue_time", "last_busy_time", "last_idle_time")
_WORKER: Mapping[str, Any] = {
    **{"worker_id": "", "status": "unknown", "heartbeat_stats": None},
    **dict.fromkeys(_TIMES),
    **_NO_ATTEMPT,
}
FIELDS: Mapping[str, Sequence[str]] = {
    "query_rollouts": [name for name in RolloutFields.model_fields if name != "attempt"],
    "query_attempts": ["rollout_id", *ATTEMPT_FIELDS.values(), "metadata"],
    "query_spans": list(SpanFields.model_fields),
    "query_resources": ["resources_id", "create_time", "update_time", "version", "resources"],
    "query_workers": list(_WORKER),
}
"""The fields by which each list can be sorted."""
_COLUMNS: Mapping[str, Sequence[str]] = {
    "rollouts": ("rollout_id", "status", "mode", "resources_id", "start_time", "end_time"),
    "spans": ("rollout_id", "attempt_id", "span_id", "sequence_id"),
    "resources": ("resources_id", "update_time"),
    "workers": ("worker_id",),
}
_OPERATORS = {"_in": "{} IN (SELECT value FROM json_each(?))", "_contains": "instr({}, ?) > 0", "": "{} = ?"}
_MISSING_LAST = ("end_time", "last_heartbeat_time")


class LightningStore(SqliteStore):
    """A :class:`SqliteStore` that Agent Lightning's clients can use. Methods raise ``ValueError`` for an unknown
    rollout or attempt; their arguments have been checked.
    """

    _launched = clock.now()

    async def enqueue_many_rollouts(self, rollouts: Sequence[Request]) -> list[Json]:
        records = [read_request(request) for request in rollouts]
        await self.enqueue(records)
        return [rollout_json(rollout) for rollout in records]

    async def dequeue_many_rollouts(self, *, limit: int = 1, worker_id: str | None = None) -> list[Json]:
        with self._transaction():
            taken = await self.dequeue(limit, worker_id)
            if worker_id is not None:
                self._change_worker(worker_id, last_dequeue_time=clock.now())
                if not taken:
                    self._change_worker(worker_id, status="idle", last_idle_time=clock.now())
            return [rollout_json(rollout) for rollout in taken]

    async def start_rollout(self, *, worker_id: str | None = None, **fields: Any) -> Json:
        rollout = read_request(Request(**fields))
        with self._transaction():
            rollout.started = clock.now()
            self._insert(rollout)
            return await self.start_attempt(rollout.rollout_id, worker_id=worker_id)

    async def start_attempt(self, rollout_id: str, *, worker_id: str | None = None) -> Json:
        with self._transaction():
            rollout = self._known(rollout_id)
            self._start_attempt(rollout, worker_id)
            return rollout_json(rollout)

    async def get_rollout_by_id(self, rollout_id: str) -> Json | None:
        rollout = await self.get(rollout_id, with_calls=False)
        return None if rollout is None else rollout_json(rollout)

    async def update_rollout(self, rollout_id: str, *, status: Any = None, **fields: Any) -> Json:
        with self._transaction():
            rollout = self._known(rollout_id)
            if fields:
                changed = read_request(Request(**{**request_json(rollout), **fields}))
                for name in REQUESTED:
                    setattr(rollout, name, getattr(changed, name))
                change = "UPDATE rollouts SET mode = ?, resources_id = ?, request = ? WHERE rollout_id = ?"
                request = to_json(request_json(rollout)).decode()
                self._conn.execute(change, (rollout.mode, rollout.resources_id, request, rollout_id))
            if status == "queuing":
                rollout.status, rollout.ended = "queuing", None
                self._push(rollout_id)
            elif status is not None:
                self._set_status(rollout, status)
            self._save(rollout)
            return rollout_json(rollout)

    async def update_attempt(
        self, rollout_id: str, attempt_id: str, *, status: AttemptStatus | None = None, **fields: Any
    ) -> Json:
        with self._transaction():
            rollout = self._known(rollout_id)
            if attempt_id == "latest" and not rollout.attempts:
                raise ValueError(f"No attempts found for rollout {rollout_id}")
            attempt = rollout.attempts[-1] if attempt_id == "latest" else attempt_of(rollout, attempt_id)
            attempt.worker_id = fields.get("worker_id", attempt.worker_id)
            attempt.heartbeat = fields.get("last_heartbeat_time", attempt.heartbeat)
            if status in ("preparing", "running"):
                if attempt.status in ("preparing", "unresponsive"):
                    attempt.status = status
                if attempt is rollout.attempts[-1]:
                    self._set_status(rollout, status)
            elif status is not None:
                self._end(rollout, attempt, status)
            self._save(rollout)
            self._note_worker(rollout, attempt)
        if status in ("succeeded", "failed"):
            self._tell_end(rollout_id)
        return attempt_json(rollout, attempt)

    async def get_latest_attempt(self, rollout_id: str) -> Json | None:
        rollout = self._find(rollout_id)
        return attempt_json(rollout, rollout.attempts[-1]) if rollout is not None and rollout.attempts else None

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Json]:
        rollouts = map(self._find, await self.ended(rollout_ids))
        return [rollout_json(rollout) for rollout in rollouts if rollout is not None]

    get_many_span_sequence_ids = SqliteStore.reserve_sequence_ids

    async def add_many_spans(self, spans: Sequence[Json]) -> list[str]:
        return self.add_span_rows(spans[0]["rollout_id"], spans[0]["attempt_id"], spans)

    async def add_resources(self, resources: Json) -> Json:
        return await self.update_resources(f"rs-{secrets.token_hex(6)}", resources)

    async def update_resources(self, resources_id: str, resources: Json) -> Json:
        with self._transaction():
            return self._put_resources(resources_id, resources)

    async def get_resources_by_id(self, resources_id: str) -> Json | None:
        return self._resources(resources_id)

    async def get_latest_resources(self) -> Json | None:
        return self._resources(None)

    async def get_worker_by_id(self, worker_id: str) -> Json | None:
        row = self._conn.execute("SELECT body FROM workers WHERE worker_id = ?", (worker_id,)).fetchone()
        return None if row is None else self._parsed("workers", row[0])

    async def signs_of_life(self) -> Mapping[str, Any]:
        return dict(self._conn.execute("SELECT worker_id, body FROM workers").fetchall())

    async def update_worker(self, worker_id: str, **stats: Any) -> Json:
        with self._transaction():
            return self._change_worker(worker_id, last_heartbeat_time=clock.now(), **stats)

    async def statistics(self) -> Json:

        def count(table: str, what: str = "count(*)") -> int:
            return self._conn.execute(f"SELECT {what} FROM {table}").fetchone()[0]  # noqa: S608 - our own names

        counts = {f"total_{table}": count(table) for table in _COLUMNS}
        attempts = count("rollouts", "coalesce(sum(json_array_length(attempts)), 0)")
        uptime = clock.now() - self._launched
        return {"name": type(self).__name__, **counts, "total_attempts": attempts, "uptime": uptime}

    async def query_attempts(
        self, rollout_id: str, *, sort_by: str | None = "sequence_id", sort_order: str = "asc", **page: Any
    ) -> Json:
        """The attempts of a rollout."""
        rollout = self._find(rollout_id)
        items = [] if rollout is None else [attempt_json(rollout, attempt) for attempt in rollout.attempts]
        if sort_by is not None:  # a missing value is the last
            items.sort(key=lambda item: (item[sort_by] is None, item[sort_by] or 0), reverse=sort_order == "desc")
        limit, offset = page.get("limit", -1), page.get("offset", 0)
        end = None if limit == -1 else offset + limit
        return {"items": items[offset:end], "limit": limit, "offset": offset, "total": len(items)}

    async def query_spans(self, rollout_id: str, *, attempt_id: str | None = None, **query: Any) -> Json:
        if attempt_id == "latest":
            rollout = self._find(rollout_id)
            attempt_id = rollout.attempts[-1].attempt_id if rollout is not None and rollout.attempts else ""
        of_attempt = {"rollout_id": rollout_id, "attempt_id": attempt_id}
        return await self._query("spans", of_attempt, **{"sort_by": "sequence_id", **query})

    async def _query(
        self,
        table: str,
        required: Mapping[str, Any] | None = None,
        *,
        filter_logic: str = "and",
        sort_by: str | None = None,
        sort_order: str = "asc",
        limit: int = -1,
        offset: int = 0,
        after: int | None = None,
        **filters: Any,
    ) -> Json:
        """A page of a table. Filters are ``FIELD``, ``FIELD_in`` and ``FIELD_contains``; None is no filter.

        With ``after`` (0 for the first page) the items are in the order in which they were added, and ``next`` is what
        to give for the next page, if there are more. Unlike with an ``offset``, its time does not grow with what comes
        before; it has no ``total``.
        """
        with self._transaction():
            self._give_up_overdue()
        json_column, values = "request" if table == "rollouts" else "body", list[Any]()

        def expression(field: str) -> str:
            return field if field in _COLUMNS[table] else f"json_extract({json_column}, '$.{field}')"

        def conditions(chosen: Mapping[str, Any]) -> Iterable[str]:
            for name, value in chosen.items():
                if value is not None:
                    suffix = next(suffix for suffix in _OPERATORS if name.endswith(suffix))
                    values.append(json.dumps(list(value)) if suffix == "_in" else value)
                    yield _OPERATORS[suffix].format(expression(name.removesuffix(suffix)))

        where = list(conditions(required or {}))
        if optional := list(conditions(filters)):
            where.append(f"({f' {filter_logic.upper()} '.join(optional)})")
        order = "id"
        if after is not None:
            where.append("id > ?")
            values.append(after)
        elif sort_by is not None:
            last = f"{expression(sort_by)} IS NULL {sort_order}, " if sort_by in _MISSING_LAST else ""
            order = f"{last}{expression(sort_by)} {sort_order}, id"
        from_ = f"FROM {table}" + (f" WHERE {' AND '.join(where)}" if where else "")
        columns = ROLLOUT_COLUMNS if table == "rollouts" else "body"
        select = f"SELECT id, {columns} {from_} ORDER BY {order}"
        rows, has_more = self._page(select, values, limit, offset)
        items = [
            rollout_json(self._of_row(row[1:])) if table == "rollouts" else self._parsed(table, row[1]) for row in rows
        ]
        result: Json = {"items": items, "limit": limit, "offset": offset}
        if after is None:
            result["total"] = self._conn.execute(f"SELECT count(*) {from_}", values).fetchone()[0]
        elif has_more:
            result["next"] = rows[-1][0]
        return result

    query_rollouts = partialmethod(_query, "rollouts")
    query_resources = partialmethod(_query, "resources")
    query_workers = partialmethod(_query, "workers")

    def _start_attempt(self, rollout: Rollout, worker_id: str | None) -> Attempt:
        attempt = super()._start_attempt(rollout, worker_id)
        self._note_worker(rollout, attempt)
        return attempt

    def _end(self, rollout: Rollout, attempt: Attempt, status: AttemptStatus) -> None:
        super()._end(rollout, attempt, status)
        self._note_worker(rollout, attempt)

    def _note_worker(self, rollout: Rollout, attempt: Attempt) -> None:
        """A worker is busy with the attempt that it took last."""
        if attempt.worker_id is None:
            return
        if attempt.status in ("preparing", "running"):
            ids = {"current_rollout_id": rollout.rollout_id, "current_attempt_id": attempt.attempt_id}
            self._change_worker(attempt.worker_id, status="busy", last_busy_time=clock.now(), **ids)
        else:
            status = "idle" if attempt.status in ("succeeded", "failed") else "unknown"
            self._change_worker(attempt.worker_id, status=status, last_idle_time=clock.now(), **_NO_ATTEMPT)

    def _change_worker(self, worker_id: str, **changes: Any) -> Json:
        row = self._conn.execute("SELECT body FROM workers WHERE worker_id = ?", (worker_id,)).fetchone()
        before = _WORKER if row is None else from_json(row[0])
        worker = {**before, "worker_id": worker_id, **changes}
        self._conn.execute(
            "INSERT INTO workers (worker_id, body) VALUES (?, ?) "
            "ON CONFLICT (worker_id) DO UPDATE SET body = excluded.body",
            (worker_id, to_json(worker).decode()),
        )
        return worker
