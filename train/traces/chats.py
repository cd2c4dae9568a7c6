"""Conversations as chat completions have them: a line with ``messages``, or a request of any API with its response, as
logs and the two files of a batch have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.messages import (
    finish_of,
    first,
    read_messages,
    read_reply,
    read_tools,
    system_messages,
    text_of,
)
from groundwire.train.traces.record import chat_rollout, joined, known_facts, seconds
from groundwire.train.traces.streams import whole_reply

name = "OpenAI chats"
_MESSAGES = ("messages", "conversations", "conversation")
_ASKED = (*_MESSAGES, "input", "contents")
_SCORES = ("reward", "score", "rating", "label", "feedback")


def takes(record: Any) -> bool:
    """Whether ``record`` is a conversation."""
    return isinstance(record, Mapping) and (
        any(isinstance(record.get(key), list) for key in _MESSAGES)
        or isinstance(_request(record), Mapping)
        or {"custom_id", "response"} <= record.keys()
    )


def _request(record: Mapping[str, Any]) -> Any:
    """The request of a record with a request and a response: a log, a line of a batch, or one of Responses."""
    request = next((record[key] for key in ("request", "body") if isinstance(record.get(key), Mapping)), None)
    request = request.get("body", request) if isinstance(request, Mapping) else None
    request = record if {"model", "input", "output"} <= record.keys() else request
    return request if isinstance(request, Mapping) and not request.keys().isdisjoint(_ASKED) else None


def split(record: Mapping[str, Any], _: str, unread: Counter[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The conversation; of those that we exported, the conversations of one trace."""
    metadata = record.get("metadata")
    if "custom_id" in record:
        yield f"batch {text_of(record['custom_id'])}", record
        return
    yield text_of(metadata.get("trace_id")) if isinstance(metadata, Mapping) else "", record


def build(trace_id: str, items: Sequence[Mapping[str, Any]], unread: Counter[str]) -> Iterator[Rollout]:
    """The rollout of conversations."""
    if rollouts := list(_rollouts(trace_id, _of_batch(items, unread), unread)):
        yield joined(rollouts)


def _of_batch(items: Sequence[Mapping[str, Any]], unread: Counter[str]) -> Sequence[Mapping[str, Any]]:
    """The request and the response of a batch with one ``custom_id`` as one record."""
    if not items or "custom_id" not in items[0]:
        return items
    requests, responses = ([item for item in items if name in item] for name in ("body", "response"))
    if len(requests) == len(responses) == 1:
        return [{**requests[0], **responses[0]}]
    several = "lines of batches whose custom_id came several times: read one batch at a time"
    alone = "lines of a batch without the other one: give its input file and its output file"
    unread[several if len(items) > 1 else alone] += len(items)
    return []


def _rollouts(trace_id: str, items: Sequence[Mapping[str, Any]], unread: Counter[str]) -> Iterator[Rollout]:
    for record in items:
        request, reasons = _request(record) or record, list[str]()
        asked = first(request, *_ASKED) or ()
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        listed = [_from_value(item) if isinstance(item, Mapping) and "from" in item else item for item in asked]
        messages = read_messages(listed, reasons)
        system = first(request, "system", "instructions", "system_instruction") if messages else None
        before = system_messages(system, reasons) if system and messages[0]["role"] != "system" else []
        facts_of = _not_learned(listed, messages, len(before))
        messages = [*before, *messages]
        response = first(record, "response", "choices", "output")
        response = whole_reply(response.get("body", response) if isinstance(response, Mapping) else response, reasons)
        if isinstance(response, list) and any("message" in one for one in response if isinstance(one, Mapping)):
            response = {"choices": response}
        reply = read_reply(response, reasons)
        messages += [reply] if reply else []
        if reply and (end := finish_of(response)):
            facts_of[len(messages) - 1] = {"finish_reason": end}
        if not any(message["role"] == "assistant" for message in messages[1:]):
            unread["chats without a reply"] += 1
            continue
        unread.update(set(reasons))
        metadata: Any = record.get("metadata") if isinstance(record.get("metadata"), Mapping) else {}
        given: Any = metadata.get("scores") if isinstance(metadata.get("scores"), Mapping) else {}
        scores = {key: holder[key] for holder in (metadata, record) for key in _SCORES if holder.get(key) is not None}
        scores = {**given, **scores}
        started = seconds(first(record, "created", "created_at", "timestamp") or metadata.get("started"))
        facts: dict[str, Any] = {
            "model": text_of(request.get("model") or record.get("model") or metadata.get("model")),
            "wire_api": "chat",
        }
        facts |= {"started": started, "ended": started}
        yield chat_rollout(
            messages,
            read_tools(request.get("tools") or request.get("functions")),
            {**facts_of, -1: {**facts, "agent": text_of(metadata.get("agent"))}},
            unread="; ".join(sorted(set(reasons))),
            rollout_id=text_of(record.get("id")) or trace_id,
            source=name,
            scores={key: value for key, value in scores.items() if isinstance(value, int | float | str)},
            session=text_of(metadata.get("session_id")),
            **known_facts(metadata),
        )


def _not_learned(items: Sequence[Any], messages: Sequence[Any], start: int) -> dict[int, dict[str, Any]]:
    """Facts of the replies that are in a conversation for what follows them."""
    if len(items) > len(messages):
        return {}
    weights = [item.get("weight", 1) if isinstance(item, Mapping) else 1 for item in items]
    return {place: {"unread": "its weight is 0"} for place, weight in enumerate(weights, start) if weight == 0}


def _from_value(item: Mapping[str, Any]) -> dict[str, Any]:
    """A message of ShareGPT."""
    role = {"gpt": "assistant", "human": "user", "function_response": "tool", "observation": "tool"}
    return {"role": role.get(str(item["from"]), item["from"]), "content": item.get("value")}
