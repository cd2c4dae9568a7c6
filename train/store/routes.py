"""The routes of Agent Lightning's store server (0.3): what a request may contain, and the store's method that it calls.

Three routes are added, for our client: ``/spans/batch``, ``/spans/next/batch``, and in the server ``/batch``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import pydantic

from groundwire.train.store.agent_lightning import Config, Request, SpanFields
from groundwire.train.store.health import HEALTH
from groundwire.train.store.intake import SpanIntake
from groundwire.train.store.lightning_store import FIELDS
from groundwire.train.store.limits import MAX_ITEMS, RefusedValueError
from groundwire.train.store.rollout import AttemptStatus, RolloutStatus

_MAX_PAGE = 1000  # items of a list; "total" says how many there are
_NOT_NULL = ("status", "config", "worker_id", "last_heartbeat_time", "heartbeat_stats")

PathParameters = Mapping[str, str]
Call = Callable[[Any, PathParameters, Any], Awaitable[Any]]
"""Calls a store with the parameters of a path and a body that was checked."""
_T = TypeVar("_T")
_Items = Annotated[list[_T], pydantic.Field(max_length=MAX_ITEMS)]


def _body(base: Any = None, **fields: Any) -> Any:
    """A model of a body or a query. A field is a type with None as its default, or a pair of type and default."""
    pairs = {name: field if isinstance(field, tuple) else (field | None, None) for name, field in fields.items()}
    return cast(Any, pydantic.create_model)("Body", __base__=base, **pairs)


_Json = dict[str, Any]
_Mode, _Order, _Logic = Literal["train", "val", "test"], Literal["asc", "desc"], Literal["and", "or"]


class _Resource(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    resource_type: Literal["llm", "proxy_llm", "prompt_template"]


_Worker = _body(worker_id=str)
_UpdateRollout = _body(
    input=(Any, None), mode=_Mode, resources_id=str, status=RolloutStatus, config=Config, metadata=_Json
)
_UpdateAttempt = _body(status=AttemptStatus, worker_id=str, last_heartbeat_time=float, metadata=_Json)
_Wait = _body(rollout_ids=(list[str], ...), timeout=float)
_Query = _body(limit=(int, -1), offset=(int, 0), sort_by=str, sort_order=(_Order, "asc"))
_Filters = _body(_Query, filter_logic=(_Logic, "and"))
_QueryRollouts = _body(_Filters, status_in=list[RolloutStatus], rollout_id_in=list[str], rollout_id_contains=str)
_QueryWorkers = _body(_Filters, status_in=list[Literal["idle", "busy", "unknown"]], worker_id_contains=str)
_QueryResources = _body(_Query, resources_id=str, resources_id_contains=str)
_SPAN_FILTERS = [f"{name}{how}" for name in ("trace_id", "span_id", "parent_id", "name") for how in ("", "_contains")]
_QuerySpans = _body(_Filters, rollout_id=(str, ...), **dict.fromkeys(["attempt_id", *_SPAN_FILTERS], str))


def _with_fields(method: str) -> Call:
    """Call the store's method with the fields that the request sets."""

    async def call(store: Any, path: PathParameters, body: Any) -> Any:
        fields = {name: getattr(body, name) for name in body.model_fields_set} if body is not None else {}
        if method in FIELDS:
            _check_query(fields, FIELDS[method])
            limit = fields.get("limit", -1)
            fields["limit"] = _MAX_PAGE if limit == -1 else min(limit, _MAX_PAGE)
        if method.startswith("update"):
            for name in _NOT_NULL:
                if name in fields and fields[name] is None:
                    raise RefusedValueError(f"{name} is null; leave it out to keep its value")
        return await getattr(store, method)(**path, **fields)

    return call


def _check_query(fields: Mapping[str, Any], names: Sequence[str]) -> None:
    if (sort := fields.get("sort_by")) is not None and sort not in names:
        raise RefusedValueError(f"sort_by is {sort!r}; allowed: {', '.join(names)}")
    if (limit := fields.get("limit", -1)) < 1 and limit != -1:
        raise RefusedValueError(f"limit is {limit}; it must be above 0, or -1 for no limit")
    if fields.get("offset", 0) < 0:
        raise RefusedValueError(f"offset is {fields['offset']}; it must not be negative")


async def _health(store: Any, path: PathParameters, body: Any) -> Any:
    return HEALTH


async def _enqueue(store: Any, path: PathParameters, body: Any) -> Any:
    return list(await store.enqueue_many_rollouts(body.rollouts)) if body.rollouts else []


async def _dequeue(store: Any, path: PathParameters, body: Any) -> Any:
    limit = min(body.limit, _MAX_PAGE)
    return list(await store.dequeue_many_rollouts(limit=limit, worker_id=body.worker_id)) if limit > 0 else []


async def _add_span(store: Any, path: PathParameters, body: Any) -> Any:
    return body if await store.add_many_spans([body.model_dump()]) else None  # None: it is there already


async def _add_spans(store: Any, path: PathParameters, body: Any) -> Any:
    intake = SpanIntake(store)
    await intake.add_json(body)
    if intake.refused:
        raise RefusedValueError(intake.message())
    return intake.new_ids  # the client has the rest


async def _next_sequence_ids(store: Any, path: PathParameters, body: Any) -> Any:
    return await store.get_many_span_sequence_ids(body)


async def _next_sequence_id(store: Any, path: PathParameters, body: Any) -> Any:
    [number] = await store.get_many_span_sequence_ids([(body.rollout_id, body.attempt_id)])
    return {"sequence_id": number}


async def _put_resources(store: Any, path: PathParameters, body: Any) -> Any:
    resources = {name: resource.model_dump() for name, resource in body.items()}
    return await (store.update_resources(*path.values(), resources) if path else store.add_resources(resources))


_ROLLOUT, _ATTEMPTS = "/rollouts/{rollout_id}", "/rollouts/{rollout_id}/attempts"
LISTS: dict[str, tuple[Any, str]] = {
    "/rollouts": (_QueryRollouts, "query_rollouts"),
    _ATTEMPTS: (_Query, "query_attempts"),
    "/workers": (_QueryWorkers, "query_workers"),
    "/resources": (_QueryResources, "query_resources"),
    "/spans": (_QuerySpans, "query_spans"),
}
ROUTES: dict[str, tuple[int, Any, Call]] = {
    # Before the routes with ids, of which "search" would be one.
    **{f"POST {path}/search": (200, model, _with_fields(method)) for path, (model, method) in LISTS.items()},
    **{f"GET {path}": (200, model, _with_fields(method)) for path, (model, method) in LISTS.items()},
    "GET /health": (200, None, _health),
    "POST /queues/rollouts/enqueue": (201, _body(rollouts=(_Items[Request], ...)), _enqueue),
    "POST /queues/rollouts/dequeue": (200, _body(_Worker, limit=(int, 1)), _dequeue),
    "POST /rollouts": (201, _body(Request, worker_id=str), _with_fields("start_rollout")),
    f"GET {_ROLLOUT}": (200, None, _with_fields("get_rollout_by_id")),
    f"POST {_ROLLOUT}": (200, _UpdateRollout, _with_fields("update_rollout")),
    f"POST {_ATTEMPTS}": (201, _Worker, _with_fields("start_attempt")),
    f"GET {_ATTEMPTS}/latest": (200, None, _with_fields("get_latest_attempt")),
    f"POST {_ATTEMPTS}/{{attempt_id}}": (200, _UpdateAttempt, _with_fields("update_attempt")),
    "GET /workers/{worker_id}": (200, None, _with_fields("get_worker_by_id")),
    "POST /workers/{worker_id}": (200, _body(heartbeat_stats=_Json), _with_fields("update_worker")),
    "GET /statistics": (200, None, _with_fields("statistics")),
    "POST /resources": (201, dict[str, _Resource], _put_resources),
    "GET /resources/latest": (200, None, _with_fields("get_latest_resources")),
    "GET /resources/{resources_id}": (200, None, _with_fields("get_resources_by_id")),
    "POST /resources/{resources_id}": (200, dict[str, _Resource], _put_resources),
    "POST /spans": (201, SpanFields, _add_span),
    "POST /spans/batch": (201, _Items[Any], _add_spans),
    "POST /spans/next": (200, _body(rollout_id=(str, ...), attempt_id=(str, ...)), _next_sequence_id),
    "POST /spans/next/batch": (200, _Items[tuple[str, str]], _next_sequence_ids),
    "POST /waits/rollouts": (200, _Wait, _with_fields("wait_for_rollouts")),
}
NOT_BATCHED = {route for route in ROUTES if route.endswith("/search") or "/waits/" in route or route[4:] in LISTS}
"""Lists: a batch of them would hold up all other clients, and its answer would have no limit."""
CHECKS_ITEMS = "POST /spans/batch"
"""The route of which the items of the body are checked one by one, when they are taken in."""
