"""The verdict on an agent's first rollouts: can training work? For ``--dev``, and for a run before its first step.

Each rule is one function of the rollouts, which returns a sentence that says what is wrong and what to do, or "".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from groundwire.adapters.tracing import LLMCall
from groundwire.tools.text import texts_in
from groundwire.train.evaluation.diagnosis import is_too_long
from groundwire.train.evaluation.metrics import scores_by_question
from groundwire.train.evaluation.notes import (
    failed_by_policy,
    first_failure,
    mostly_unscored,
    never_called,
    nothing_judged,
    nothing_to_train,
    share,
    without_call,
    words,
)
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.store.rollout import Rollout

_MIN_ANSWERS = 5
"""Fewer equal answers may be right."""
_MIN_RESULTS = 3
"""Of a tool: fewer errors may be chance."""
_SHOWN = 300
_EXCERPT = 8
"""Words of a question that are looked for: an agent may wrap or shorten it."""
_TOLD = 12
"""Characters of a reply that is recognised. Shorter ones, such as "yes", are in many conversations."""
_MAX_CALLS = "max_calls allows"
_NOT_REFUSED = (408, 409, 410, 425, 429, 499)
"""Statuses of calls that failed for no fault of the request."""
_ERROR = re.compile(
    r"\W*(?:an? |the |tool |unexpected |internal |exception: )*(?:error|exception|traceback|fail(?:ed|ure))\b"
    r"|\W*\w*(?:Error|Exception)\b",
    re.IGNORECASE,
)
"""How results of tools begin that are errors, in all frameworks."""
_OF_ARGUMENTS = re.compile(r"argument|parameter|field|valid|missing|required|schema|json|unknown tool", re.IGNORECASE)
"""Words of errors about what the policy wrote, which training may repair."""


class AgentVerdict(NamedTuple):
    """What is wrong with an agent: ``problems``, with which training cannot work, and ``notes``."""

    problems: list[str]
    notes: list[str]
    advice: str = ""
    """What helps a model whose sampled rollouts teach nothing."""


def cannot_begin(rollouts: Sequence[Rollout], *, ids: bool = True, agent_match: str | None = None) -> str:
    """Why rollouts give nothing to train on, now or later; empty if they do, or the policy alone keeps them from it.

    ``ids``: whether calls need token ids, as they do for a model that is trained.
    """
    reason = nothing_judged(rollouts)
    reason = reason or (nothing_to_train(rollouts, agent_match=agent_match) if ids else never_called(rollouts))
    return reason or ("" if failed_by_policy(rollouts) else mostly_unscored(rollouts))


def verdict(
    rollouts: Sequence[Rollout],
    view: AgentView,
    *,
    ids: bool = True,
    agent_match: str | None = None,
    updates_model: bool = True,
) -> AgentVerdict:
    """The verdict on the first rollouts of an agent, which sees of its tasks what ``view`` shows.

    With ``updates_model`` False prompts are searched, which equal answers do not keep from working.
    """
    if reason := cannot_begin(rollouts, ids=ids, agent_match=agent_match):
        return AgentVerdict([reason], [])
    findings = [
        (failed_before_calls(rollouts), True),
        (mostly_silent(rollouts), True),
        (leaked_state(rollouts), True),
        refused_calls(rollouts),
        own_question(rollouts, view),
        *broken_tools(rollouts),
    ]
    if not any(text and ends for text, ends in findings):  # of which equal answers may be the consequence
        as_before = view.compares and len({rollout.group for rollout in rollouts}) == len(rollouts)
        text, ends = equal_answers(rollouts, as_before=as_before)
        findings.append((text, ends and updates_model))
    problems, notes = ([text for text, ends in findings if text and ends == kind] for kind in (True, False))
    return AgentVerdict(problems, notes)


def pass_rate(rollouts: Sequence[Rollout], *, max_tokens: int) -> tuple[str, str]:
    """What sampled rollouts, several of each task, say of a training with this model: their mean reward, how many tasks
    have rollouts that differ, and how many replies were cut off; and the advice where no task teaches, else empty.
    """
    rewards = scores_by_question(rollouts)
    scores = [reward for group in rewards.values() for reward in group]
    if not scores:
        return "", ""
    differ = sum(len(set(group)) > 1 for group in rewards.values())
    mean, unjudged = sum(scores) / len(scores), len(rollouts) - len(scores)
    more = f" ({unjudged} more could not be judged)" if unjudged else ""
    text = (
        f"sampled {len(scores)} answers{more} to {len(rewards)} tasks: mean reward {mean:.3f}; the rewards of {differ} "
        f"of {len(rewards)} tasks differ, and only such tasks teach"
    )
    calls = [call for rollout in rollouts for call in rollout.trainable_calls]
    cut = [call for call in calls if call.truncated]
    if cut:
        text += f"; {len(cut)} of {len(calls)} replies were cut off at max_tokens ({max_tokens})"
    if differ:
        return text, ""
    if max(scores) > 0 or len(set(scores)) > 1:
        return text, "every answer to a task gets the same reward: take harder or other tasks, or a finer reward"
    advice = [
        "give more max_tokens" if cut else "",
        "show the model right answers first: --warm-start FILE of chats, or --warm-start RUN of a better model's "
        "rollouts, of which the best are taken",
        "take a larger model, easier tasks, or a reward that also scores parts of an answer",
    ]
    return text, f"the model got nothing right here, so it learns late or never. {'; or '.join(filter(None, advice))}"


def failed_before_calls(rollouts: Sequence[Rollout]) -> str:
    """That the agent raised before its first call in most rollouts; else empty."""
    failed = [rollout for rollout in rollouts if rollout.outcome.failure == "setup"]
    if 2 * len(failed) <= len(rollouts):
        return ""
    return f"{share(failed, rollouts)} failed before any result of the policy; {first_failure(failed)}"


def mostly_silent(rollouts: Sequence[Rollout]) -> str:
    """That most rollouts made no LLM call; else empty: :class:`.RolloutNotes` tells of a few."""
    silent = [rollout for rollout in rollouts if rollout.made_no_call]
    return without_call(silent, rollouts) if 2 * len(silent) > len(rollouts) else ""


def leaked_state(rollouts: Sequence[Rollout]) -> str:
    """That the first prompt of a rollout holds what the policy replied in another one: state leaked; else empty.

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


def refused_calls(rollouts: Sequence[Rollout]) -> tuple[str, bool]:
    """The calls that were refused for what the agent asked, by reason, also those whose errors it swallowed; and
    whether most rollouts had one of the same reason.
    """
    reasons: defaultdict[str, list[tuple[Rollout, LLMCall]]] = defaultdict(list)
    for rollout in rollouts:
        for call in filter(_is_refused, rollout.calls):
            reasons[re.sub(r"\d+", "0", call.error)[:_SHOWN]].append((rollout, call))
    if not reasons:
        return "", False
    calling = [rollout for rollout in rollouts if rollout.calls]
    refused = sorted(reasons.values(), key=len, reverse=True)
    listed = "; ".join(f"{len(calls)} with {calls[0][1].status}: {calls[0][1].error[:_SHOWN]}" for calls in refused[:3])
    made = sum(len(rollout.calls) for rollout in rollouts)
    text = (
        f"{sum(map(len, refused))} of {made} LLM calls were refused: {listed}. "
        "Change what the agent asks for, or training teaches it to do without these replies"
    )
    most = max(len({rollout.rollout_id for rollout, _ in calls}) for calls in refused)
    return text, 2 * most > len(calling)


def _is_refused(call: LLMCall) -> bool:
    by_policy = is_too_long(call.error) or _MAX_CALLS in call.error
    return 400 <= call.status < 500 and call.status not in _NOT_REFUSED and not by_policy


def own_question(rollouts: Sequence[Rollout], view: AgentView) -> tuple[str, bool]:
    """That the questions of most rollouts are in none of their prompts; and whether all prompts are the same."""
    calling = [rollout for rollout in rollouts if any(call.messages for call in rollout.calls)]
    without = [rollout for rollout in calling if not _asks_its_question(rollout, view)]
    if len(set(map(_question, without))) < 2 or 2 * len(without) <= len(calling):
        return "", False
    text = f"the question of its task is in no prompt of {share(without, calling)}"
    if len({" ".join(texts_in(rollout.calls[0].messages)) for rollout in calling}) > 1:
        return f"{text}: right only where the agent puts it into other words", False
    return (
        f"{text}, and all begin with the same prompt: the agent asks a question of its own. Let it read its task: a "
        "parameter of the function, the fields of the graph's input (--agent-input), or standard input"
    ), True


def _asks_its_question(rollout: Rollout, view: AgentView) -> bool:
    """Whether the question, or another column that the agent sees, is in a prompt."""
    asked = words(_question(rollout)).split()
    starts = {0, max(0, len(asked) - _EXCERPT) // 2, max(0, len(asked) - _EXCERPT)}
    excerpts = [f" {' '.join(asked[start : start + _EXCERPT])} " for start in starts]
    columns = (words(str(value)) for value in view.columns(rollout.task).values())
    excerpts += [text for text in columns if len(text) > _EXCERPT]
    excerpts = [text if text.isascii() else text.strip() for text in excerpts]  # many scripts do not divide words
    for call in rollout.calls:
        prompt = words(" ".join(texts_in(call.messages)).replace("\\n", " "))
        if any(excerpt in prompt for excerpt in excerpts):
            return True
    return False


def _question(rollout: Rollout) -> str:
    """Tasks of a LitAgent need none."""
    return str(rollout.task.get("question", ""))


def equal_answers(rollouts: Sequence[Rollout], *, as_before: bool = False) -> tuple[str, bool]:
    """That all answers to different tasks are empty or equal, or all rewards (unless ``as_before``); whether both."""
    ended = [rollout for rollout in rollouts if not rollout.outcome.failure]
    tasks, answers = set(map(_question, ended)), {rollout.outcome.answer.strip() for rollout in ended}
    rewards = {rollout.outcome.reward for rollout in rollouts if rollout.outcome.reward is not None}
    if len(tasks) < _MIN_ANSWERS or (len(answers) > 1 and (as_before or len(rewards) > 1)):
        return "", False
    equal = f"all rewards are {rewards.pop():g}: there is nothing to learn" if len(rewards) == 1 else ""
    if len(answers) > 1:
        return f"{equal} until rollouts of one task differ (other tasks, a better model, or partial rewards)", False
    [answer] = answers
    same = f"the same: {answer[:_SHOWN]!r}" if answer else "empty"
    text = (
        f"the answers to all {len(tasks)} tasks are {same}{f', and {equal}' if equal else ''}. If the agent answers in "
        "another form, name a function that reads the answer from its result: --agent-output module:name"
    )
    scored_itself = not any(rollout.outcome.input or rollout.outcome.answer for rollout in ended)  # a LitAgent
    return text, bool(equal) and not scored_itself


def broken_tools(rollouts: Sequence[Rollout]) -> Iterator[tuple[str, bool]]:
    """The tools whose every result is an error; and whether that is no matter of what the policy wrote."""
    results: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for rollout in rollouts:
        for name, arguments, result in _tool_results(rollout):
            results[name].append((arguments, result))
    for name, pairs in results.items():
        if len(pairs) < _MIN_RESULTS or not all(_ERROR.match(result) for _, result in pairs):
            continue
        text = f"every result of the tool {name} is an error, {len(pairs)} of {len(pairs)}: {pairs[0][1][:_SHOWN]}"
        errors = {re.sub(r"\d+", "0", result) for _, result in pairs}
        written = [set(re.findall(r"\w{3,}", arguments.lower())) for arguments, _ in pairs]
        repeated = set.intersection(*written) & set(re.findall(r"\w{3,}", pairs[0][1].lower()))
        varied = len({arguments for arguments, _ in pairs}) > 1 or not any(written)
        ends = len(errors) == 1 and varied and not repeated and not _OF_ARGUMENTS.search(pairs[0][1])
        yield f"{text}. {'Repair it' if ends else 'Repair it, unless the policy calls it wrongly'}", ends


def _tool_results(rollout: Rollout) -> Iterator[tuple[str, str, str]]:
    """The name, the arguments and the result of each tool call whose result the policy read."""
    called, results = dict[str, tuple[str, str]](), dict[str, str]()
    for message in (message for call in rollout.calls for message in call.messages):
        for tool_call in message.get("tool_calls") or ():
            function = tool_call.get("function") or {}
            called[str(tool_call.get("id"))] = str(function.get("name")), str(function.get("arguments"))
        if message.get("role") == "tool":
            results[str(message.get("tool_call_id"))] = " ".join(texts_in(message.get("content")))
    for call_id, result in results.items():
        if call_id in called:
            yield *called[call_id], result
