"""A reply that came as a stream, of OpenAI's two APIs, Anthropic, Google or Ollama, joined to what a whole reply is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.exchange import CallDeltas
from groundwire.tools.files import parse_json


def whole_reply(reply: Any, unread: list[str]) -> Any:
    """A reply that came as a stream, as its text or as a list of its events, as a whole one; any other as it is."""
    events = reply if isinstance(reply, list) and any(map(_is_event, reply)) else []
    events = _events_of(reply) if isinstance(reply, str) else events
    if not any(map(_is_event, events)):  # or a text about streams
        return reply
    joined, ended = _joined([event for event in events if isinstance(event, Mapping)])
    unread += [] if ended else ["streams that were cut off"]
    return joined


def _is_event(event: Any) -> bool:
    if not isinstance(event, Mapping):
        return False
    choices = event.get("choices") if isinstance(event.get("choices"), list) else ()
    named = str(event.get("type")).startswith(("message_", "content_block_", "response."))
    known = named or "candidates" in event or {"message", "done"} <= event.keys()
    return known or any(isinstance(one, Mapping) and "delta" in one for one in choices or ())


def _events_of(text: str) -> list[Any]:
    """The data of server-sent events, or of lines of JSON, as Ollama's; one that is cut off is left out."""
    events = []
    for line in text.splitlines():
        if (data := line.removeprefix("data:").strip()).startswith("{"):
            try:
                events.append(parse_json(data))
            except ValueError:
                break
    return events


def _joined(events: Iterable[Any]) -> tuple[dict[str, Any], bool]:
    """The reply as the API gives whole ones, and whether the stream reached its end."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    blocks: dict[Any, dict[str, Any]] = {}
    deltas, usage, finish, model = CallDeltas(), dict[str, Any](), "", ""
    for event in events:
        kind = event.get("type") or ""
        if kind in ("response.completed", "response.incomplete"):
            return dict(event["response"]), True
        model = model or event.get("model") or (event.get("message") or {}).get("model") or ""
        usage |= event.get("usage") or (event.get("message") or {}).get("usage") or event.get("usageMetadata") or {}
        if kind == "content_block_start":
            blocks[event.get("index")] = {**event["content_block"], "input": ""}
        elif kind == "content_block_delta":
            _add(blocks.setdefault(event.get("index"), {"type": "text"}), event["delta"])
        elif kind == "message_delta":
            finish = event["delta"].get("stop_reason") or finish
        for choice in event.get("choices") or ([_of_ollama(event)] if "done" in event else ()):
            if not choice.get("index"):
                finish = choice.get("finish_reason") or finish
                delta = choice.get("delta") or {}
                for name in ("content", "reasoning_content", "reasoning"):
                    message[name] = (message.get(name) or "") + (delta.get(name) or "")
                for call in delta.get("tool_calls") or ():
                    deltas.add(call)
        for candidate in (event.get("candidates") or ())[:1]:
            finish = candidate.get("finishReason") or finish
            for part in (candidate.get("content") or {}).get("parts") or ():
                blocks[len(blocks)] = dict(part)
    content: Any = [blocks[index] for index in sorted(blocks)] or message["content"]
    choice = {"message": {**message, "content": content, "tool_calls": deltas.calls}, "finish_reason": finish}
    return {"choices": [choice], "usage": usage, "model": model}, bool(finish)


def _of_ollama(event: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(event.get("message") or {})
    functions = [dict(call["function"]) for call in message.pop("tool_calls", None) or ()]
    for function in functions:
        function["arguments"] = to_json(function.get("arguments") or {})
    calls = [{"index": place, "function": function} for place, function in enumerate(functions)]
    return {"delta": {**message, "tool_calls": calls}, "finish_reason": event.get("done_reason")}


def _add(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        field = "input" if name == "partial_json" else name
        if isinstance(value, str) and name != "type":
            block[field] = (block.get(field) or "") + value
