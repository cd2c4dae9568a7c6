"""The routes of Agent Lightning's store server (0.3): what a request may contain, and the store's method that it calls.

Three routes are added, for our client: ``/spans/batch``, ``/spans/next/batch``, and in the server ``/batch``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal, cast

import pydantic

from groundwire.train.store.agent_lightning import Config, Open, Request, SpanFields
from groundwire.train.store.health import HEALTH
from groundwire.train.store.intake import store_spans
from groundwire.train.store.lightning_store import FIELDS
from groundwire.train.store.limits import AnyJson, BadRequestError, Count, Id, Items, Seconds, Table, Time
from groundwire.train.store.rollout import AttemptStatus, RolloutStatus

_MAX_PAGE = 1000  # items of a list; "total" says how many there are

PathParameters = Mapping[str, str]
Call = Callable[[Any, PathParameters, Any], Awaitable[Any]]
"""Calls a store with the parameters of a path and a body that was checked."""


def _body(base: Any = None, **fields: Any) -> Any:
    """A model of a body or a query. A field is a type with None as its default, or a pair of type and default; it
    cannot be null if its type is not None's.
    """
    pairs = {name: field if isinstance(field, tuple) else (field | None, None) for name, field in fields.items()}
    return cast(Any, pydantic.create_model)("Body", __base__=base, **pairs)


def _check_limit(limit: int) -> int:
    if limit == 0:
        raise ValueError("it must be above 0, or -1 for no limit")
    return limit


class _Resource(Open):
    resource_type: Literal["llm", "proxy_llm", "prompt_template"]


_Worker = _body(worker_id=Id)
_Mode = Literal["train", "val", "test"]
_UpdateRollout = _body(
    input=(AnyJson, None),
    mode=_Mode,
    resources_id=Id,
    status=(RolloutStatus, None),
    config=(Config, None),
    metadata=Table,
)
_UpdateAttempt = _body(
    status=(AttemptStatus, None), worker_id=(Id, None), last_heartbeat_time=(Time, None), metadata=Table
)
_LOGIC = (Literal["and", "or"], "and")
_SPAN_FILTERS = [f"{name}{how}" for name in ("trace_id", "span_id", "parent_id", "name") for how in ("", "_contains")]


def _with_fields(method: str) -> Call:
    """Call the store's method with the fields that the request sets."""

    async def call(store: Any, path: PathParameters, body: Any) -> Any:
        fields = {name: getattr(body, name) for name in body.model_fields_set} if body is not None else {}
        if method in FIELDS:
            limit = fields.get("limit", -1)
            fields["limit"] = _MAX_PAGE if limit == -1 else min(limit, _MAX_PAGE)
        return await getattr(store, method)(**path, **fields)

    return call


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
    _, refused, reason = await store_spans(store, body)
    if refused:
        raise BadRequestError(reason)


async def _next_sequence_ids(store: Any, path: PathParameters, body: Any) -> Any:
    return await store.get_many_span_sequence_ids(body)


async def _next_sequence_id(store: Any, path: PathParameters, body: Any) -> Any:
    [number] = await store.get_many_span_sequence_ids([(body.rollout_id, body.attempt_id)])
    return {"sequence_id": number}


async def _put_resources(store: Any, path: PathParameters, body: Any) -> Any:
    resources = {name: resource.model_dump() for name, resource in body.items()}
    return await (store.update_resources(*path.values(), resources) if path else store.add_resources(resources))


_ROLLOUT, _ATTEMPTS = "/rollouts/{rollout_id}", "/rollouts/{rollout_id}/attempts"


def _list(method: str, **filters: Any) -> tuple[Any, Call]:
    """The query of a list, which has filters, an order and a page, and its call."""
    limit = Annotated[int, pydantic.Field(ge=-1, le=1 << 53), pydantic.AfterValidator(_check_limit)]
    order = {"sort_by": Literal[tuple(FIELDS[method])], "sort_order": (Literal["asc", "desc"], "asc")}
    return _body(limit=(limit, -1), offset=(Count, 0), after=Count, **order, **filters), _with_fields(method)


LISTS = {
    "/rollouts": _list(
        "query_rollouts",
        filter_logic=_LOGIC,
        status_in=Items[RolloutStatus],
        rollout_id_in=Items[Id],
        rollout_id_contains=str,
    ),
    _ATTEMPTS: _list("query_attempts"),
    "/workers": _list(
        "query_workers",
        filter_logic=_LOGIC,
        status_in=Items[Literal["idle", "busy", "unknown"]],
        worker_id_contains=str,
    ),
    "/resources": _list("query_resources", resources_id=Id, resources_id_contains=str),
    "/spans": _list(
        "query_spans", filter_logic=_LOGIC, rollout_id=(Id, ...), **dict.fromkeys(["attempt_id", *_SPAN_FILTERS], str)
    ),
}
ROUTES: dict[str, tuple[int, Any, Call]] = {
    # Before the routes with ids, of which "search" would be one.
    **{route: (200, *of_list) for path, of_list in LISTS.items() for route in (f"POST {path}/search", f"GET {path}")},
    "GET /health": (200, None, _health),
    "POST /queues/rollouts/enqueue": (201, _body(rollouts=(Items[Request], ...)), _enqueue),
    "POST /queues/rollouts/dequeue": (200, _body(_Worker, limit=(Count, 1)), _dequeue),
    "POST /rollouts": (201, _body(Request, worker_id=Id), _with_fields("start_rollout")),
    f"GET {_ROLLOUT}": (200, None, _with_fields("get_rollout_by_id")),
    f"POST {_ROLLOUT}": (200, _UpdateRollout, _with_fields("update_rollout")),
    f"POST {_ATTEMPTS}": (201, _Worker, _with_fields("start_attempt")),
    f"GET {_ATTEMPTS}/latest": (200, None, _with_fields("get_latest_attempt")),
    f"POST {_ATTEMPTS}/{{attempt_id}}": (200, _UpdateAttempt, _with_fields("update_attempt")),
    "GET /workers/{worker_id}": (200, None, _with_fields("get_worker_by_id")),
    "POST /workers/{worker_id}": (200, _body(heartbeat_stats=(Table, None)), _with_fields("update_worker")),
    "GET /statistics": (200, None, _with_fields("statistics")),
    "POST /resources": (201, dict[str, _Resource], _put_resources),
    "GET /resources/latest": (200, None, _with_fields("get_latest_resources")),
    "GET /resources/{resources_id}": (200, None, _with_fields("get_resources_by_id")),
    "POST /resources/{resources_id}": (200, dict[str, _Resource], _put_resources),
    "POST /spans": (201, SpanFields, _add_span),
    "POST /spans/batch": (201, Items[dict[str, Any]], _add_spans),
    "POST /spans/next/batch": (200, Items[tuple[Id, Id]], _next_sequence_ids),
    "POST /spans/next": (200, _body(rollout_id=(Id, ...), attempt_id=(Id, ...)), _next_sequence_id),
    "POST /waits/rollouts": (
        200,
        _body(rollout_ids=(Items[Id], ...), timeout=Seconds),
        _with_fields("wait_for_rollouts"),
    ),
}
NOT_BATCHED = {route for route in ROUTES if route.endswith("/search") or "/waits/" in route or route[4:] in LISTS}
"""Lists: a batch of them would hold up all other clients, and its answer would have no limit."""
