"""ATIF, the Agent Trajectory Interchange Format (Harbor; ``atif`` on PyPI), versions 1.0 to 1.8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.wire.chat_request import Part, assistant_message, call_part
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.messages import Message, count_of, read_messages, read_tools, result_text, text_of
from groundwire.train.traces.record import chat_rollout, joined, known_facts, seconds

name = "ATIF"


def takes(record: Any) -> bool:
    """Whether ``record`` is a trajectory."""
    return isinstance(record, Mapping) and isinstance(record.get("steps"), list) and "agent" in record


def split(record: Mapping[str, Any], _: str, unread: Counter[str]) -> Iterator[tuple[str, Any]]:
    """The trajectory, with those of its subagents."""
    yield "", record


def build(trace_id: str, items: Sequence[Mapping[str, Any]], unread: Counter[str]) -> Iterator[Rollout]:
    """The rollout of a trajectory."""
    for record in items:
        yield joined([_rollout(inner, trace_id, unread) for inner in _trajectories(record)])


def _trajectories(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield record
    for inner in record.get("subagent_trajectories") or ():
        yield from _trajectories(inner)


def _rollout(record: Mapping[str, Any], trace_id: str, unread: Counter[str]) -> Rollout:
    agent, extra = record["agent"], record.get("extra") or {}
    agent_name = text_of(agent.get("name"))
    messages, facts, reasons = list[Message](), dict[int, Mapping[str, Any]](), list[str]()
    summarized = ""
    for step in record["steps"]:
        results = (step.get("observation") or {}).get("results") or ()
        if step.get("source") == "system" and any(
            name.endswith("agent_trajectory_ref") for result in results for name in result
        ):
            summarized = "steps after another agent summarized the context: what they were asked is not known"
        if step.get("source") == "agent":
            facts[len(messages)] = {**({"unread": summarized} if summarized else {}), **_facts(step, agent)}
            messages.append(_reply(step, reasons))
        elif message := step.get("message"):
            messages += read_messages([{"role": step.get("source"), "content": _content(message)}], reasons)
        for result in results:
            content, call_id = result_text(_content(result.get("content"))), result.get("source_call_id")
            role: Message = {"role": "tool", "tool_call_id": call_id} if call_id else {"role": "user"}
            messages.append({**role, "content": content})
    unread.update(set(reasons))
    reward = {} if extra.get("reward") is None else {"reward": extra["reward"]}
    return chat_rollout(
        messages,
        read_tools(agent.get("tool_definitions")),
        {**facts, -1: {"agent": "" if agent_name == "unknown" else agent_name}},
        unread="; ".join(sorted(set(reasons))),
        rollout_id=text_of(record.get("trajectory_id") or record.get("session_id")) or trace_id,
        source=name,
        scores={**reward, **(extra.get("scores") or {})},
        session=text_of(record.get("session_id")),
        **known_facts(extra),
    )


def _reply(step: Mapping[str, Any], reasons: list[str]) -> Message:
    parts = [Part("thinking", text_of(step.get("reasoning_content")))] if step.get("reasoning_content") else []
    [said] = read_messages([{"role": "assistant", "content": _content(step.get("message")) or ""}], reasons)
    parts += [Part("text", said["content"])] if said["content"] else []
    calls = step.get("tool_calls") or ()
    parts += [
        call_part(call.get("tool_call_id") or None, call.get("function_name"), call.get("arguments")) for call in calls
    ]
    return assistant_message(parts)


def _content(content: Any) -> Any:
    """Text, or parts, whose images have their paths."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        source = part.get("source") or {}
        parts.append({**part, "source": {**source, "url": source.get("path")}} if part.get("type") == "image" else part)
    return parts


def _facts(step: Mapping[str, Any], agent: Mapping[str, Any]) -> dict[str, Any]:
    metrics, time = step.get("metrics") or {}, seconds(step.get("timestamp"))
    known = {"model": text_of(step.get("model_name") or agent.get("model_name")), "started": time, "ended": time}
    known |= {
        "prompt_tokens": count_of(metrics.get("prompt_tokens")),
        "response_tokens": count_of(metrics.get("completion_tokens")),
    }
    ids = {"prompt_ids": "prompt_token_ids", "response_ids": "completion_token_ids", "logprobs": "logprobs"}
    known |= {field: metrics[key] for field, key in ids.items() if metrics.get(key)}
    reasons = [
        "steps copied from another trajectory" if step.get("is_copied_context") else "",
        "steps that no model made" if step.get("llm_call_count") == 0 else "",
        "steps of several LLM calls" if (step.get("llm_call_count") or 0) > 1 else "",
        text_of((step.get("extra") or {}).get("unread")),
    ]
    return known | ({"unread": "; ".join(filter(None, reasons))} if any(reasons) else {})
