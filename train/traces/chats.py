"""Conversations as chat completions have them: a line with ``messages``, or a logged request with its response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.messages import first, read_messages, read_reply, read_tools, text_of
from groundwire.train.traces.record import chat_rollout, joined, known_facts, seconds
from groundwire.train.traces.streams import whole_reply

name = "OpenAI chats"
_MESSAGES = ("messages", "conversations", "conversation")
_SCORES = ("reward", "score", "rating", "label", "feedback")


def takes(record: Any) -> bool:
    """Whether ``record`` is a conversation."""
    return isinstance(record, Mapping) and (
        any(isinstance(record.get(key), list) for key in _MESSAGES) or isinstance(_request(record), Mapping)
    )


def _request(record: Mapping[str, Any]) -> Any:
    """The request of a record with a request and a response: a log, or a line of a batch."""
    request = next((record[key] for key in ("request", "body") if isinstance(record.get(key), Mapping)), None)
    request = request.get("body", request) if isinstance(request, Mapping) else None
    return request if isinstance(request, Mapping) and "messages" in request else None


def split(record: Mapping[str, Any], _: str, unread: Counter[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The conversation; of those that we exported, the conversations of one trace."""
    metadata = record.get("metadata")
    yield text_of(metadata.get("trace_id")) if isinstance(metadata, Mapping) else "", record


def build(trace_id: str, items: Sequence[Mapping[str, Any]], unread: Counter[str]) -> Iterator[Rollout]:
    """The rollout of conversations."""
    if rollouts := list(_rollouts(trace_id, items, unread)):
        yield joined(rollouts)


def _rollouts(trace_id: str, items: Sequence[Mapping[str, Any]], unread: Counter[str]) -> Iterator[Rollout]:
    for record in items:
        request, reasons = _request(record) or record, list[str]()
        listed = [
            _from_value(item) if isinstance(item, Mapping) and "from" in item else item
            for item in first(request, *_MESSAGES) or ()
        ]
        messages = read_messages(listed, reasons)
        response = first(record, "response", "choices", "output")
        response = whole_reply(response.get("body", response) if isinstance(response, Mapping) else response, reasons)
        if isinstance(response, list) and any("message" in one for one in response if isinstance(one, Mapping)):
            response = {"choices": response}
        reply = read_reply(response, reasons)
        messages += [reply] if reply else []
        if not any(message["role"] == "assistant" for message in messages[1:]):
            unread["chats without a reply"] += 1
            continue
        unread.update(set(reasons))
        metadata: Any = record.get("metadata") if isinstance(record.get("metadata"), Mapping) else {}
        given: Any = metadata.get("scores") if isinstance(metadata.get("scores"), Mapping) else {}
        scores = {key: holder[key] for holder in (metadata, record) for key in _SCORES if holder.get(key) is not None}
        scores = {**given, **scores}
        started = seconds(first(record, "created", "created_at", "timestamp") or metadata.get("started"))
        facts: dict[str, Any] = {"model": text_of(request.get("model") or record.get("model")), "wire_api": "chat"}
        facts |= {"started": started, "ended": started}
        yield chat_rollout(
            messages,
            read_tools(request.get("tools") or request.get("functions")),
            {**_not_learned(listed, messages), -1: {**facts, "agent": text_of(metadata.get("agent"))}},
            unread="; ".join(sorted(set(reasons))),
            rollout_id=text_of(record.get("id")) or trace_id,
            source=name,
            scores={key: value for key, value in scores.items() if isinstance(value, int | float | str)},
            session=text_of(metadata.get("session_id")),
            **known_facts(metadata),
        )


def _not_learned(items: Sequence[Any], messages: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """Facts of the replies that are in a conversation for what follows them."""
    if len(items) > len(messages):
        return {}
    weights = [item.get("weight", 1) if isinstance(item, Mapping) else 1 for item in items]
    return {place: {"unread": "its weight is 0"} for place, weight in enumerate(weights) if weight == 0}


def _from_value(item: Mapping[str, Any]) -> dict[str, Any]:
    """A message of ShareGPT."""
    role = {"gpt": "assistant", "human": "user", "function_response": "tool", "observation": "tool"}
    return {"role": role.get(str(item["from"]), item["from"]), "content": item.get("value")}
