"""Agent Lightning's MongoDB store, kept across restarts. Only its limit of spans is our rule.

``agl store`` uses a new partition at each start, so a restarted store is empty. Here the partition is constant, and the
URI names the database. MongoDB is checked at once: Agent Lightning would report a problem only after 30 seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from agentlightning.store.mongo import MongoLightningStore
from agentlightning.types import EnqueueRolloutRequest, NamedResources, RolloutConfig, Span
from cachetools import LRUCache
from pydantic import TypeAdapter
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from groundwire.adapters.tracing.spans import TraceLimit
from groundwire.train.store.agent_lightning import outcome_span, outcome_span_id, read_request, read_rollout, span_json
from groundwire.train.store.errors import MongoStoreError
from groundwire.train.store.rollout import Attempt, Outcome

_log = logging.getLogger(__name__)
_TIMEOUT_MS = 2000
_ATTEMPTS = 10_000
"""Attempts whose spans are counted in memory; of others they are counted again."""
_DATABASE, _PARTITION = "agentlightning", "groundwire"


class MongoStore:
    """A store in the database that ``uri`` names (default: ``agentlightning``), for our server: some methods take JSON.
    Raises :class:`MongoStoreError`, within about two seconds.
    """

    def __init__(self, uri: str) -> None:
        name = _database_name(uri)
        self._store = MongoLightningStore(mongo_uri=uri, database_name=name, partition_id=_PARTITION)
        self._counted: LRUCache[tuple[str, str], tuple[TraceLimit, Attempt]] = LRUCache(maxsize=_ATTEMPTS)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def query(*values: Any, after: int | None = None, **fields: Any) -> Any:
            return await method(*values, **fields)  # a page begins at an offset only

        return query if name.startswith("query_") else method

    async def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> Sequence[Any]:
        for request in rollouts:
            read_request(request)
        requests = [EnqueueRolloutRequest.model_validate(request.model_dump()) for request in rollouts]
        return await self._store.enqueue_many_rollouts(requests)

    async def start_rollout(self, *, config: Any = None, **fields: Any) -> Any:
        return await self._store.start_rollout(config=_config(config), **fields)

    async def update_rollout(self, rollout_id: str, **fields: Any) -> Any:
        config = {"config": _config(fields["config"])} if "config" in fields else {}
        return await self._store.update_rollout(rollout_id, **{**fields, **config})

    async def add_many_spans(self, spans: Sequence[Any]) -> list[str]:
        """Store spans of one attempt. Those beyond its limit are taken out again."""
        ids = (spans[0]["rollout_id"], spans[0]["attempt_id"])
        limit, attempt = self._counted.get(ids) or await self._attempt(*ids)
        by_id = {span["span_id"]: span for span in spans}  # one that is there twice would hide that it is new
        wanted = [span for name, span in by_id.items() if not attempt.is_full or name == outcome_span_id(*ids)]
        if not wanted:
            return []
        kept, lost, reason = list[str](), list[Span](), ""
        for span in await self._store.add_many_spans([Span.model_validate(span) for span in wanted]):
            limited = span.span_id != outcome_span_id(*ids)
            problem = attempt.refuses(len(span.model_dump_json()), limit) if limited else None
            if problem is None:
                kept.append(span.span_id)
            else:
                lost.append(span)
                reason = reason or problem
        await self._store.collections.spans.delete(lost)
        if reason:
            _log.warning("rollout %.100r: %s", ids[0], reason)
            [number] = await self._store.get_many_span_sequence_ids([ids])
            outcome = outcome_span(Outcome(failure="trace_limit", message=reason), *ids, number)
            await self._store.add_many_spans([Span.model_validate(span_json(outcome))])
            await self._store.update_attempt(*ids, status="failed" if limit.retry else "succeeded")
        return kept

    async def _attempt(self, rollout_id: str, attempt_id: str) -> tuple[TraceLimit, Attempt]:
        """The limit of an attempt, and how many spans it has; their bytes since this store was opened."""
        rollout = await self._store.get_rollout_by_id(rollout_id)
        limit = read_rollout(rollout.model_dump()).trace_limit if rollout is not None else TraceLimit()
        spans = await self._store.query_spans(rollout_id, attempt_id, limit=1)
        attempt = Attempt(attempt_id=attempt_id, number=1, started=0.0, spans=spans.total)
        attempt.is_full = bool(limit.exceeded_by(attempt.spans, 0))
        return self._counted.setdefault((rollout_id, attempt_id), (limit, attempt))

    async def add_resources(self, resources: Any) -> Any:
        return await self._store.add_resources(TypeAdapter(NamedResources).validate_python(resources))

    async def update_resources(self, resources_id: str, resources: Any) -> Any:
        named = TypeAdapter(NamedResources).validate_python(resources)
        return await self._store.update_resources(resources_id, named)


def _config(config: Any) -> Any:
    return None if config is None else RolloutConfig.model_validate(config.model_dump())


def _database_name(uri: str) -> str:
    """Check that MongoDB answers and supports transactions; returns the name of the database."""
    try:
        client: MongoClient[dict[str, Any]] = MongoClient(
            uri, serverSelectionTimeoutMS=_TIMEOUT_MS, connectTimeoutMS=_TIMEOUT_MS
        )
        with client:
            server = client.admin.command("hello")
            name = client.get_default_database(_DATABASE).name
            client[name].command("ping")  # unlike hello, this needs a valid login
    except (PyMongoError, ValueError, TypeError) as error:
        # Without the URI, which may contain a password, and without the driver's description of the topology.
        reason = str(error).partition(" (configured timeouts")[0].partition(", Timeout:")[0]
        raise MongoStoreError(f"--mongo: MongoDB cannot be used: {reason}") from error
    if "setName" not in server and server.get("msg") != "isdbgrid":
        raise MongoStoreError(
            "--mongo: this MongoDB is a single server, but transactions need a replica set: start mongod with "
            "--replSet rs0, run rs.initiate() in its shell, and give mongodb://HOST:PORT/?replicaSet=rs0"
        )
    return name
