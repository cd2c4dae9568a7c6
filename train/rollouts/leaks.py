"""State that leaked: a rollout whose first prompt holds what the policy replied in another rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groundwire.tools.text import texts_in
from groundwire.train.store.rollout import Rollout

_TOLD = 12
"""Characters of a reply that is recognised. Shorter ones, such as "yes", are in many conversations."""


def leaked_state(rollouts: Sequence[Rollout]) -> str:
    """A sentence if the first prompt of a rollout holds a reply of another one; else empty.

    Replies are compared, since an author may show other questions as examples. A message that all first prompts hold is
    the author's, and so is a history of the same length in all.
    """
    firsts = [(rollout, min(rollout.calls, key=lambda call: call.sequence)) for rollout in rollouts if rollout.calls]
    prompts = [(rollout, call.messages) for rollout, call in firsts]
    fewest = min((len(messages) for _, messages in prompts), default=0)
    longer = [(rollout, messages) for rollout, messages in prompts if len(messages) > fewest]
    if not longer:
        return ""
    common = set.intersection(*({mark for message in messages for mark in _marks(message)} for _, messages in prompts))
    replies = {mark: rollout for rollout in rollouts for call in rollout.calls for mark in _marks(call.reply)}
    leaked = []
    for rollout, messages in longer:
        marks = (mark for message in messages if message.get("role") == "assistant" for mark in _marks(message))
        others = (replies.get(mark) for mark in marks if mark not in common)
        leaked += [(rollout, other) for other in others if other not in (None, rollout)][:1]
    if not leaked:
        return ""
    rollout, other = leaked[0]
    return (
        f"the first prompt of {len(leaked)} of {len(prompts)} rollouts holds what the policy replied in another one "
        f"(that of task {rollout.task['id']} a reply to task {other.task['id']}): the agent remembers. Make the agent "
        "anew for each task, in a function, or give it by name, so that each rollout is a process of its own"
    )


def _marks(message: Mapping[str, Any]) -> Iterator[str]:
    """What tells a reply from others: the ids of its tool calls, which are random, and a text that is long enough."""
    yield from (str(call["id"]) for call in message.get("tool_calls") or () if call.get("id"))
    text = " ".join(" ".join(texts_in(message.get("content"))).split())
    if len(text) >= _TOLD:
        yield text
