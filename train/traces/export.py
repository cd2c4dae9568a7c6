"""Rollouts in the formats of others: conversations as OpenAI's fine-tuning takes them, and trajectories of ATIF."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from groundwire.adapters.tracing.calls import to_json
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.messages import value_of
from groundwire.train.traces.record import TracedCall, plain

_ATIF, _UNKNOWN = "ATIF-v1.8", "unknown"


class ExportedChat(NamedTuple):
    """Calls that go on with each other: all messages are those of the last one, and its reply."""

    calls: Sequence[TracedCall]
    messages: Sequence[Mapping[str, Any]]
    replies: Mapping[int, TracedCall]
    """The calls by the places of their replies in the messages."""


def conversations(rollout: Rollout) -> list[ExportedChat]:
    """The conversations of a trace, in the order in which they begin.

    A call goes on with one whose messages and reply begin its own messages. Another order, a message that was changed
    or left out, or other tools begin another conversation, so that nothing is learned after what the model did not see.
    """
    found: list[tuple[list[TracedCall], list[str], dict[int, TracedCall]]] = []
    for call in rollout.calls:
        if not isinstance(call, TracedCall) or not call.reply:
            continue
        texts = [*map(to_json, call.messages), to_json(call.reply)]
        for calls, known, replies in found:
            same = (calls[-1].agent, calls[-1].tools_json) == (call.agent, call.tools_json)
            if same and len(known) < len(texts) and texts[: len(known)] == known:
                calls.append(call)
                known[:] = texts
                replies[len(texts) - 1] = call
                break
        else:
            found.append(([call], texts, {len(texts) - 1: call}))
    return [ExportedChat(calls, [*calls[-1].messages, calls[-1].reply], replies) for calls, _, replies in found]


def to_chats(
    rollout: Rollout, is_trained: Callable[[TracedCall], bool] = lambda call: True
) -> Iterator[dict[str, Any]]:
    """A line for each conversation, as ``groundwire sft --chats`` and OpenAI's fine-tuning read it.

    Replies that are not to be learned have ``"weight": 0``: those of other calls, of calls that are not whole, and of
    those that are not trained.
    """
    for calls, messages, replies in conversations(rollout):
        learned = {place for place, call in replies.items() if not call.untrainable_reason and is_trained(call)}
        weighted = [
            {**message, "weight": 0} if message["role"] == "assistant" and place not in learned else message
            for place, message in enumerate(messages)
        ]
        if learned:
            facts = {
                "trace_id": rollout.rollout_id,
                "agent": calls[-1].agent,
                "model": calls[-1].model,
                **_outcome(rollout),
            }
            yield {"messages": weighted, **({"tools": calls[-1].tools} if calls[-1].tools else {}), "metadata": facts}


def to_atif(rollout: Rollout) -> dict[str, Any] | None:
    """The trajectory of the first conversation, with the others as subagents; None if there is none."""
    trajectories = [
        _trajectory(conversation, f"{rollout.rollout_id}{f'#{number}' if number else ''}", rollout)
        for number, conversation in enumerate(conversations(rollout))
    ]
    if not trajectories:
        return None
    first, *others = trajectories
    first["session_id"] = rollout.metadata.get("session") or rollout.rollout_id
    first["extra"] = _outcome(rollout)
    return first | ({"subagent_trajectories": others} if others else {})


def _outcome(rollout: Rollout) -> dict[str, Any]:
    """What formats of messages alone have no place for; a run's tasks are left out, as they have their golds."""
    outcome, task = rollout.outcome, rollout.task
    scores = rollout.scores
    facts = {"reward": scores.pop("reward", None), "scores": scores, "failure": outcome.failure}
    facts |= {"question": task.get("question"), "answer": outcome.answer, "started": rollout.started}
    return facts | ({"inputs": dict(task["inputs"])} if task.get("inputs") else {})


def _trajectory(conversation: ExportedChat, name: str, rollout: Rollout) -> dict[str, Any]:
    calls, messages, replies = conversation
    steps: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        role, content = message["role"], plain(message.get("content"))
        if role == "tool" and steps and steps[-1]["source"] == "agent":
            result = {"source_call_id": message.get("tool_call_id"), "content": content}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"assistant": "agent", "tool": "user"}.get(role, role)
        parts = message["content"] if isinstance(message.get("content"), list) else ()
        step: dict[str, Any] = {
            "step_id": len(steps) + 1,
            "source": source,
            "message": list(map(_part, parts)) or content,
        }
        if role == "assistant":
            call = replies.get(place)
            step |= {"tool_calls": list(map(_tool_call, message["tool_calls"]))} if message.get("tool_calls") else {}
            thought = message.get("reasoning_content") or message.get("reasoning")
            step |= {"reasoning_content": thought} if thought else {}
            step |= _facts(call) if call is not None else {"is_copied_context": True}
        steps.append(step)
    agent: dict[str, Any] = {"name": calls[-1].agent or _UNKNOWN, "version": _UNKNOWN}
    agent |= {"model_name": calls[-1].model} if calls[-1].model else {}
    agent |= {"tool_definitions": calls[-1].tools} if calls[-1].tools else {}
    return {"schema_version": _ATIF, "trajectory_id": name, "agent": agent, "steps": steps}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a message's content, which is an image or a text."""
    if part.get("type") == "image_url":
        return {"type": "image", "source": {"media_type": "image/*", "path": part["image_url"]["url"]}}
    return {"type": "text", "text": str(part.get("text"))}


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = value_of(function.get("arguments"))
    arguments = arguments if isinstance(arguments, dict) else {"input": arguments} if arguments else {}
    return {
        "tool_call_id": str(call.get("id") or ""),
        "function_name": str(function.get("name")),
        "arguments": arguments,
    }


def _facts(call: TracedCall) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(call.prompt_ids) or call.prompt_tokens,
        "completion_tokens": len(call.response_ids) or call.response_tokens,
        "prompt_token_ids": call.prompt_ids,
        "completion_token_ids": call.response_ids,
        "logprobs": call.logprobs,
    }
    known = {name: value for name, value in metrics.items() if value}
    facts: dict[str, Any] = {"metrics": known, "model_name": call.model}
    facts |= {"extra": {"unread": call.untrainable_reason}} if call.untrainable_reason else {}
    if call.started:
        facts["timestamp"] = datetime.fromtimestamp(call.started, timezone.utc).isoformat()
    return {name: value for name, value in facts.items() if value}
