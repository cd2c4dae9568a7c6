"""Codex's session files (``rollout-….jsonl``). They have no tools, so their calls are not whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.messages import (
    Message,
    count_of,
    first,
    read_messages,
    read_reply,
    system_messages,
    text_of,
    value_of,
)
from groundwire.train.traces.record import chat_rollout, plain, seconds

name = "Codex"
_LINES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_REPLIES = ("function_call", "reasoning", "custom_tool_call", "local_shell_call", "web_search_call")
_ITEMS = ("message", "function_call_output", "custom_tool_call_output", *_REPLIES)
_ADDED = ("<", "# AGENTS.md")
"""How messages begin that the program adds to the user's."""
_INCOMPLETE = "session files have no tools"


def takes(record: Any) -> bool:
    """Whether ``record`` is a line of a session, also of the first versions, which had bare items."""
    if not isinstance(record, Mapping):
        return False
    is_bare = record.get("type") in _ITEMS and not {"sessionId", "message", "messages", "body"} & record.keys()
    return (record.get("type") in _LINES and "payload" in record) or is_bare or "record_type" in record


def split(record: Mapping[str, Any], file: str, _: Counter[str]) -> Iterator[tuple[str, Any]]:
    """The line with the session, which is the file."""
    yield file, record if "payload" in record else {"type": "response_item", "payload": record}


def build(trace_id: str, items: Sequence[Mapping[str, Any]], unread: Counter[str]) -> Iterator[Rollout]:
    """A rollout for each context: one begins anew where it was compacted."""
    contexts: list[list[Mapping[str, Any]]] = [[]]
    for line in items:
        if line["type"] == "compacted":
            history = line["payload"].get("replacement_history") or ()
            contexts.append([{"type": "response_item", "payload": item} for item in history])
        else:
            contexts[-1].append(line)
    meta: Mapping[str, Any] = next((line["payload"] for line in items if line["type"] == "session_meta"), {})
    session = text_of(meta.get("id")) or trace_id
    for number, lines in enumerate(contexts):
        known = {"rollout_id": f"{session}#{number}" if number else session, "session": session}
        yield from _context(lines, meta, unread, metadata={"continues": True} if number else {}, **known)


def _context(
    lines: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], unread: Counter[str], **known: Any
) -> Iterator[Rollout]:
    reasons, results, reply, model = list[str](), dict[Any, tuple[str, bool]](), list[Any](), ""
    instructions = first(meta, "base_instructions", "instructions")
    text = instructions.get("text") if isinstance(instructions, Mapping) else instructions
    messages: list[Message] = system_messages(text, reasons)
    facts: dict[int, dict[str, Any]] = {}
    for line in [*lines, {"type": "end", "payload": {}}]:
        payload = line["payload"]
        kind, is_message = payload.get("type"), payload.get("type") == "message"
        if line["type"] == "turn_context":
            model = text_of(payload.get("model"))
        elif kind == "token_count":
            usage = (payload.get("info") or {}).get("last_token_usage") or {}
            counts = {
                "prompt_tokens": count_of(usage.get("input_tokens")),
                "response_tokens": count_of(usage.get("output_tokens")),
            }
            facts.get(len(messages) if reply else max(facts, default=-1), {}).update(counts)
        elif kind in _REPLIES or (is_message and payload.get("role") == "assistant"):
            time = seconds(line.get("timestamp"))
            facts.setdefault(len(messages), {"model": model, "started": time, "ended": time})
            reply.append(payload)
        elif kind in _ITEMS or line["type"] == "end":
            messages += [read_reply(reply, reasons) or {"role": "assistant", "content": ""}] if reply else []
            reply = []
            messages += read_messages([payload], reasons) if payload else []
            output = value_of(payload.get("output"))
            inner = output if isinstance(output, Mapping) else {}
            code = (inner.get("metadata") or {}).get("exit_code")
            results[payload.get("call_id")] = text_of(inner.get("output", output)), code in (None, 0)
    unread.update(set(reasons))
    if facts:
        asked = (plain(message.get("content")) for message in messages if message["role"] == "user")
        facts[-1] = {"agent": "codex", "wire_api": "responses"}
        known |= {"source": name, "results": results, "unread": "; ".join(sorted({*reasons, _INCOMPLETE}))}
        yield chat_rollout(
            messages, (), facts, question=next((text for text in asked if not text.startswith(_ADDED)), ""), **known
        )
