"""Prints rollouts in the terminal: every call, its tools, the answer beside the gold answer, and the reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from groundwire.adapters.tracing import LLMCall, calls_of_agents
from groundwire.train.evaluation.metrics import format_accuracy
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.store.rollout import Rollout

_SHOWN_IDS = 8


def show_rollouts(console: Console, results: Sequence[Rollout], view: AgentView, *, agent_match: str | None) -> None:
    """Print what happened in ``results``."""

    def show(label: str, text: object) -> None:
        console.print(f"{label:<12}{text}", markup=False, highlight=False, soft_wrap=True)

    for result in results:
        task, outcome = result.task, result.outcome
        console.rule(f"{task['id']}: {outcome.status}, reward {outcome.reward}")
        show("input", outcome.input or task["question"])
        shown: list[Mapping[str, Any]] = []
        for call in result.calls:
            console.print(
                f"call {call.sequence}: {call.agent or 'agent'}, model {call.model}, "
                f"{f'{call.wire_api} API, ' if call.wire_api else ''}"
                f"{call.ended - call.started:.3f} s, {call.finish_reason}, weights {call.weights_version}"
                f"{f' (not trained: {call.untrainable_reason})' if call.untrainable_reason else ''}",
                style="bold",
                markup=False,
            )
            _show_call(show, call, shown)
        for call in calls_of_agents(result.trainable_calls, agent_match):
            emitted = "" if call.reward is None else f", emitted for this call {call.reward}"
            show("triplet", f"{call.sequence}: {call.agent or 'agent'}, reward {outcome.reward}{emitted}")
            show("", f"prompt ids   {_shorten(call.prompt_ids)}")
            show("", f"response ids {_shorten(call.response_ids)}")
        _show_reward(show, result, view)
    rewards = [result.outcome.reward for result in results if result.outcome.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    calls = sum(len(result.calls) for result in results)
    console.rule()
    console.print(f"{len(results)} rollouts, {calls} calls, mean reward {format_accuracy(mean)}")


def _show_call(show: Any, call: LLMCall, shown: list[Mapping[str, Any]]) -> None:
    """The offered tools, the messages that no call before has shown, and the reply."""
    if call.tools:
        show("  tools", ", ".join(str((tool.get("function") or tool).get("name")) for tool in call.tools))
    for message in [*call.messages, call.reply]:
        if message in shown:
            continue
        shown.append(message)
        role = f"  {message.get('role', 'assistant')}"
        if message.get("content") or not message.get("tool_calls"):
            show(role, message.get("content"))
        for tool_call in message.get("tool_calls") or ():
            function = tool_call.get("function") or {}
            show(role, f"calls {function.get('name')}({function.get('arguments')})")


def _show_reward(show: Any, result: Rollout, view: AgentView) -> None:
    """The gold answer and the agent's, each with its details, such as the rows of a query, and the reward."""
    task, outcome = result.task, result.outcome
    if outcome.judged_field:
        show("judged", outcome.judged_field)
    for label, text in [("gold", view.gold(task)), ("answer", outcome.answer or outcome.message)]:
        show(label, text or "(empty)")
        is_answer = text and (label == "gold" or outcome.answer)
        if is_answer and (details := view.answers.details(text, view.domain.database(task))):
            show("", details)
    components = ", ".join(f"{name} {value:.4g}" for name, value in outcome.reward_components.items())
    show("reward", f"{outcome.reward}{f' ({components})' if components else ''}")


def _shorten(ids: Sequence[int]) -> str:
    if len(ids) <= 2 * _SHOWN_IDS:
        return json.dumps(list(ids))
    first, last = (", ".join(map(str, part)) for part in (ids[:_SHOWN_IDS], ids[-_SHOWN_IDS:]))
    return f"[{first}, ... {last}] ({len(ids)})"
