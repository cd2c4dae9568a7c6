"""``groundwire why``: why a rollout, or the rollouts of a whole run, taught the policy nothing.

The rules are in :mod:`groundwire.train.evaluation.diagnosis`. Here are those about prompts that do not begin with an
earlier prompt and its sampled reply. Calls whose prompts do are merged into one trajectory
(:func:`groundwire.adapters.tracing.trajectories`). After a mismatch the call begins a new one: training stays correct
but computes more, and the policy reads a text that it did not write. Token ids show a mismatch; text only tells the
causes apart, so no chat template is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, NamedTuple

import typer

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.trajectories import Contexts, common_tokens, token_bytes
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file, setup_logging
from groundwire.tools.terminal import Version, progress, spinner
from groundwire.train.algorithms.health import warnings_by_step
from groundwire.train.artifacts.run_dir import LAST_RUN, RunDamagedError, RunDir
from groundwire.train.cli.complete import RunDirectory
from groundwire.train.cli.options import REPLAY_OPTIONS, BaseUrl, SettingsCommand, given_settings, takes_settings
from groundwire.train.config.failures import POLICY_FAILURES
from groundwire.train.evaluation.diagnosis import KINDS, credit_lines, diagnose, scored
from groundwire.train.evaluation.run_reader import rollout_named, settings_changes
from groundwire.train.report.token_text import TokenDecoder, token_decoder
from groundwire.train.report.turns import FILE, loss_lines, read_turns
from groundwire.train.store.rollout import Rollout

CAUSES = {
    "new_conversation": "the agent begins a new conversation: the sampled reply is not among its messages",
    "thinking": "the chat template strips thinking from earlier turns",
    "tool_call": "the tool call was read and written again by the framework or the chat template",
    "end_token": "the sampled end token is not the one that the chat template ends a turn with",
    "whitespace": "whitespace around the reply was stripped",
    "retokenized": "the same text was tokenized again, into other tokens",
    "truncated": "earlier messages were left out or cut",
    "edited": "the history was edited by the framework before it was sent again",
}
"""The likely causes of a mismatch."""

_DROPS = 5
_OPTIONS = {name: REPLAY_OPTIONS[name] for name in ("agent", "domain", "reward", "model", "seed")}
_SAME = 8  # tokens that must be equal to recognise a later part of the conversation
_THINKING = re.compile(r"<(think|thinking|reasoning)>|</(think|thinking|reasoning)>")
_TOOL_CALL = re.compile(r"<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|\"arguments\"\s*:|\"parameters\"\s*:")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Settings = Callable[[int], Mapping[str, Any]]

_COLUMNS = (
    *("step", "mode", "temperature", "rollout_id", "task_id", "group", "status", "message", "reward", "attempts"),
    "calls",
)


@app.command(cls=SettingsCommand)
@takes_settings(_OPTIONS, model="the run's own", seed="the run's")
def main(
    settings: dict[str, Any],
    run_dir: RunDirectory = LAST_RUN,
    rollout_id: Annotated[
        str | None,
        typer.Argument(help="A rollout's id, or its beginning; default: count all rollouts", metavar="ROLLOUT_ID"),
    ] = None,
    turns: Annotated[
        bool, typer.Option("--turns", help="At which calls the failed rollouts lost their chance, by sampling")
    ] = False,
    budget: Annotated[int, typer.Option("--budget", help="With --turns: samples at most", metavar="N")] = 400,
    base_url: BaseUrl = None,
    version: Version = False,
) -> None:
    """Explain why a rollout gave no triplets or no gradient.

    Without a rollout, count the reasons in the whole run, and repeat what the run has warned of. With --turns the
    newest failed rollouts go on from each call again, which is answered anew; settings say with which model or agent.
    """
    with exit_on_user_error():
        if turns:
            if rollout_id is not None:
                raise CommandError("--turns is about all failed rollouts of a run: leave out the rollout's id")
            say("\n".join(_lost_chances(run_dir, given_settings(settings, [], names=_OPTIONS), base_url, budget)))
            return
        with spinner("reading the run"):
            lines, damaged = explain(RunDir.open(run_dir), rollout_id)
    say("\n".join(lines))
    for message in damaged:
        say(f"warning: {message}", err=True)


def _lost_chances(run_dir: str, given: Mapping[str, Any], base_url: str | None, budget: int) -> list[str]:
    read_env_file(names=["OPENAI_API_KEY"])
    setup_logging()
    with spinner("starting"):
        from groundwire.train.api.replay import branch_job
        from groundwire.train.api.turns import in_words, lost_chances

        run = RunDir.open(run_dir)
        job = branch_job(run, given, base_url=base_url)
    with progress("Sampling", budget) as on_end:
        lost = lost_chances(job, run, budget=budget, on_end=on_end)
    lines = [
        f"the newest {lost['rollouts']} of {lost['failed']} failed rollouts, {lost['samples']} of {budget} samples by "
        f"{lost['model']} at temperature {lost['temperature']:g}, seed {lost['seed']}",
        f"chance of success before their first trained call: {lost['chance']:.2f}",
        *loss_lines(lost),
        "largest drops:",
        *(f"    {turn['rollout']}: {turn['text']}" for turn in lost["turns"][:_DROPS]),
    ]
    if lost["left_out"]:
        lines.append(f"left out: {in_words(lost['left_out'])}")
    try:
        run.write_json(FILE, lost)
        lines.append(f"drawn by: groundwire report {run_dir}")
    except OSError as error:
        lines.append(f"the report does not draw it: {FILE} cannot be written to the run ({error.strerror})")
    return lines


def explain(run: RunDir, rollout_id: str | None = None) -> tuple[list[str], list[str]]:
    """The explanation, and messages about files that cannot be read."""
    damaged: list[str] = []
    batches, decoder = run.rollout_batches(_COLUMNS, damaged), token_decoder(run)
    if rollout_id is not None:
        rollout_id = rollout_named(run, rollout_id)
        lines = list(_explain(batches, rollout_id, run.config, decoder))
        values = read_turns(run, damaged)[1]
        return [*lines, *values.get(rollout_id, ())], damaged
    lines = [*settings_changes(run), *overview(batches, run.config, decoder)]
    try:
        lines += warnings_by_step(run.metrics())
    except RunDamagedError as error:
        damaged.append(str(error))
    return lines, damaged


def overview(batches: Iterable[Sequence[Rollout]], settings: Settings, decoder: TokenDecoder) -> Iterator[str]:
    """The number of rollouts of each kind, with an example each, then of prefix mismatches.

    Each batch is a whole step or validation; ``settings`` returns those of a step.
    """
    kinds, causes, failures, untrained = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    examples: dict[str, str] = {}
    training = later_prompts = answered = 0
    for rollouts in batches:
        training += sum(rollout.mode == "train" for rollout in rollouts)
        for rollout, reason in zip(rollouts, diagnose(rollouts, settings(rollouts[0].step)), strict=True):
            kinds[reason.kind] += 1
            if failure := rollout.outcome.failure:
                failures[f"{failure} ({scored(rollout)})"] += 1
            examples.setdefault(reason.kind, f"{rollout.rollout_id}: {reason.text}")
            for call in rollout.calls if rollout.mode == "train" else ():
                answered += not call.failed
                if not call.failed and (problem := call.untrainable_reason):
                    untrained[kind := re.sub(r"\d+", "N", problem)] += 1
                    examples.setdefault(kind, f"{rollout.rollout_id}: {problem}")
            later_prompts += max(0, len(rollout.trainable_calls) - 1)
            for mismatch in find_mismatches(rollout.calls, decoder):
                causes[mismatch.cause] += 1
                examples.setdefault(mismatch.cause, f"{rollout.rollout_id}: {mismatch.difference}")
    total, mismatches = kinds.total(), causes.total()
    if not total:
        yield "no rollout has been written yet"
        return
    yield f"{total} rollouts, {training} of them for training"
    yield from _counts(kinds, total, KINDS, examples)
    if failures:
        yield f"failed: {', '.join(f'{count} {kind} {count / total:.0%}' for kind, count in failures.most_common())}"
        policy = sum(count for kind, count in failures.items() if kind.split()[0] in POLICY_FAILURES)
        rest = failures.total() - policy
        yield f"the policy caused {policy} ({policy / total:.0%}), what it runs on {rest} ({rest / total:.0%})"
    if untrained:
        yield f"{untrained.total()} of {answered} answered calls for training cannot be trained on:"
        yield from _counts(untrained, answered, {kind: kind for kind in untrained}, examples)
    if mismatches:
        backend = settings(0).get("backend")
        text = "later prompts do not begin with an earlier prompt and its reply"
        yield f"{mismatches} of {later_prompts} {text} ({backend}):"
        yield from _counts(causes, later_prompts, CAUSES, examples)
    elif later_prompts:
        yield f"each of the {later_prompts} later prompts begins with an earlier prompt and its reply"
    else:
        yield "no later prompts"


def _explain(
    batches: Iterable[Sequence[Rollout]], rollout_id: str, settings: Settings, decoder: TokenDecoder
) -> Iterator[str]:
    """The reason of one rollout, the credit of its calls, then its prefix mismatches."""
    rollouts = next(batch for batch in batches if any(rollout.rollout_id == rollout_id for rollout in batch))
    reasons = diagnose(rollouts, settings(rollouts[0].step))
    rollout, reason = next(p for p in zip(rollouts, reasons, strict=True) if p[0].rollout_id == rollout_id)
    yield f"{rollout.rollout_id} (step {rollout.step}, task {rollout.task['id']}): {reason.text}"
    calls = (f"call {number}{f' ({call.agent})' if call.agent else ''}" for number, call in enumerate(rollout.calls, 1))
    yield from list(credit_lines(rollout)) or calls
    for mismatch in find_mismatches(rollout.calls, decoder):
        yield f"{mismatch.difference}; likely {CAUSES[mismatch.cause]} ({settings(0).get('backend')})"


def _counts(counts: Counter[str], total: int, names: Mapping[str, str], examples: Mapping[str, str]) -> Iterator[str]:
    for kind, count in counts.most_common():
        yield f"{count:7}  {count / total:4.0%}  {names[kind]}"
        yield f"                {examples[kind]}"


class PrefixMismatch(NamedTuple):
    """A call whose prompt begins with no earlier call's prompt and reply."""

    cause: str
    """A key of :data:`CAUSES`."""
    difference: str
    """Its first token that differs from an earlier call with the longest common prefix, in words."""


def find_mismatches(calls: Sequence[LLMCall], decoder: TokenDecoder) -> list[PrefixMismatch]:
    """The mismatches of the calls of one rollout that have token ids.

    Each call's prompt is compared with every earlier call's prompt and reply, like merging into trajectories does.
    """
    mismatches = []
    contexts, places = Contexts(), dict[bytes, int]()
    last, previous = b"", 0
    for index, call in enumerate(calls):
        if call.failed or not call.prompt_ids or not call.response_ids:
            continue
        prompt, asked = call.prompt_ids, token_bytes(call.prompt_ids)
        if places and not call.choice and contexts.longest_prefix(asked) is None:
            compared = [(common_tokens(context, asked), places[context]) for context in contexts.neighbours(asked)]
            position, earlier = max([*compared, (common_tokens(last, asked), previous)])
            before = calls[earlier]
            sampled = position >= len(before.prompt_ids)
            actual = repr(decoder.token(prompt[position])) if position < len(prompt) else "the prompt's end"
            expected = decoder.token([*before.prompt_ids, *before.response_ids][position])
            difference = (
                f"call {index + 1} ({call.agent or 'no name'}) does not begin with call {earlier + 1}: token "
                f"{position} is {actual}, and {expected!r} was {'sampled' if sampled else 'in the earlier prompt'}"
            )
            cause = (_cause_in_reply if sampled else _cause_in_prompt)(before, prompt, position, decoder)
            mismatches.append(PrefixMismatch(cause, difference))
        last = asked + token_bytes(call.response_ids)
        contexts.add(last)
        places[last] = previous = index
    return mismatches


def _cause_in_reply(before: LLMCall, prompt: list[int], position: int, decoder: TokenDecoder) -> str:
    """The cause if the prompt agrees up to some token of the reply."""
    start, reply = len(before.prompt_ids), before.response_ids
    if position == start + len(reply) - 1 and reply[-1] in decoder.special:
        return "end_token"
    sampled = decoder.text(_first_turn(reply, decoder))
    resent = decoder.text(_first_turn(prompt[start:], decoder))
    if sampled == resent:
        return "retokenized" if sampled else "edited"
    if sampled.strip() == resent.strip():
        return "whitespace"
    if len(_THINKING.findall(sampled)) > len(_THINKING.findall(resent)):
        return "thinking"
    if _TOOL_CALL.search(sampled) and _TOOL_CALL.search(resent):
        return "tool_call"
    return "truncated" if resent.strip() and sampled.startswith(resent.strip()) else "edited"


def _cause_in_prompt(before: LLMCall, prompt: list[int], position: int, decoder: TokenDecoder) -> str:
    """The cause if the prompt agrees only with the beginning of the earlier prompt."""
    earlier, reply = before.prompt_ids, before.response_ids
    special = [index for index, token in enumerate(earlier) if token in decoder.special]
    header = earlier[special[-1] :] if special else earlier[-1:]  # the tokens that open the assistant's turn
    if position >= len(earlier) - len(header):  # some templates open the thinking for the model
        return "thinking" if _THINKING.search(decoder.text(header)) else "edited"
    following = prompt[position : position + _SAME]
    if len(following) == _SAME and _count((earlier + reply)[position + 1 :], following):  # it skips what is between
        return "truncated"
    if not decoder:
        return "edited" if _count(prompt, reply[:_SAME]) else "new_conversation"
    if _count(prompt, header) <= _count(earlier, header):
        return "new_conversation"
    thoughts = [len(_THINKING.findall(decoder.text(ids))) for ids in (earlier, prompt)]
    return "thinking" if thoughts[0] > thoughts[1] else "edited"


def _first_turn(ids: Sequence[int], decoder: TokenDecoder) -> list[int]:
    """The tokens before the first special one."""
    return list(takewhile(lambda token: token not in decoder.special, ids))


def _count(ids: Sequence[int], wanted: Sequence[int]) -> int:
    return sum(ids[start : start + len(wanted)] == wanted for start in range(len(ids))) if wanted else 0


if __name__ == "__main__":
    app()
