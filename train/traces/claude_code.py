"""Claude Code's session files. They have neither the system prompt nor the tools, so their calls are not whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.messages import Message, count_of, read_messages, result_text, text_of
from groundwire.train.traces.record import chat_rollout, seconds

name = "Claude Code"
_TURNS = ("user", "assistant")
_INCOMPLETE = "session files have neither the system prompt nor the tools"


def takes(record: Any) -> bool:
    """Whether ``record`` is a line of a session: a turn, or a note of the program."""
    if not isinstance(record, Mapping) or not isinstance(record.get("type"), str):
        return False
    return not {"sessionId", "leafUuid", "snapshot"}.isdisjoint(record)


def split(record: Mapping[str, Any], _: str, unread: Counter[str]) -> Iterator[tuple[str, Any]]:
    """A turn with its session, or with the subagent of the session."""
    if record["type"] in _TURNS and isinstance(record.get("message"), Mapping):
        side = (record.get("agentId") or "side") if record.get("isSidechain") else ""
        yield f"{record.get('sessionId')}/{side}".rstrip("/"), record


def build(trace_id: str, items: Sequence[Mapping[str, Any]], unread: Counter[str]) -> Iterator[Rollout]:
    """A rollout for each conversation: a session begins anew where it was compacted; subagents have their own."""
    conversations, of_line = list[list[Mapping[str, Any]]](), dict[str, int]()
    for line in items:
        parent = of_line.get(text_of(line.get("parentUuid")))
        if line.get("isCompactSummary") or (parent is None and (line.get("isSidechain") or not conversations)):
            parent = len(conversations)
            conversations.append([])
        parent = len(conversations) - 1 if parent is None else parent
        of_line[text_of(line.get("uuid"))] = parent
        conversations[parent].append(line)
    for number, lines in enumerate(conversations):
        known = {"rollout_id": f"{trace_id}#{number}" if number else trace_id, "session": trace_id}
        yield from _conversation(lines, unread, **known)


def _conversation(lines: Sequence[Mapping[str, Any]], unread: Counter[str], **known: Any) -> Iterator[Rollout]:
    turns, places = list[dict[str, Any]](), dict[str, int]()
    """Turns, and the places of their lines: a reply has a line for each of its blocks."""
    for line in lines:
        message, parent = line["message"], places.get(text_of(line.get("parentUuid")))
        content = message.get("content") if isinstance(message.get("content"), list) else [message.get("content")]
        place = places.get(f"message {message.get('id')}", len(turns))
        if line.get("isApiErrorMessage"):
            unread["Claude Code: replies that are errors of the API"] += 1
            continue
        if line["type"] == "user" and parent is not None and parent + 1 < len(turns) and not _results(content):
            unread["Claude Code: turns that the user took back"] += len(turns) - parent - 1
            del turns[parent + 1 :]
            place = parent + 1
        if place == len(turns):
            turns.append({**message, "role": line["type"], "content": [], "time": seconds(line.get("timestamp"))})
        turns[place] |= {"content": [*turns[place]["content"], *content], "usage": message.get("usage") or {}}
        places[text_of(line.get("uuid"))] = place
        if message.get("id"):
            places[f"message {message['id']}"] = place
    messages, facts, reasons, results = list[Message](), dict[int, dict[str, Any]](), list[str](), dict[Any, Any]()
    for turn in turns:
        if turn["role"] == "assistant":
            usage = turn["usage"]
            read = sum(count_of(usage.get(key)) for key in usage if key.endswith("input_tokens"))
            facts[len(messages)] = {"model": text_of(turn.get("model")), "started": turn["time"], "ended": turn["time"]}
            facts[len(messages)] |= {"prompt_tokens": read, "response_tokens": count_of(usage.get("output_tokens"))}
        results |= _results(turn["content"])
        messages += read_messages([{"role": turn["role"], "content": turn["content"]}], reasons)
    unread.update(set(reasons))
    if facts:
        agent = "subagent" if lines[0].get("isSidechain") else "claude-code"
        facts[-1] = {"agent": agent, "wire_api": "messages"}
        metadata = {"continues": True} if lines[0].get("isCompactSummary") else {}
        known |= {"source": name, "results": results, "metadata": metadata, "unread": _INCOMPLETE}
        yield chat_rollout(messages, (), facts, **known)


def _results(content: Sequence[Any]) -> dict[Any, tuple[str, bool]]:
    blocks = [block for block in content if isinstance(block, Mapping) and block.get("type") == "tool_result"]
    return {
        block.get("tool_use_id"): (result_text(block.get("content")), not block.get("is_error")) for block in blocks
    }
