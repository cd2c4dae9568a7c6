"""What is learned: a domain's gold queries, a file of chats, or the accepted rollouts of a run.

Accepted rollouts are what the policy sampled where the reward was high (rejection sampling). Yuan et al. 2023, "Scaling
Relationship on Learning Mathematical Reasoning" (arXiv:2308.01825): several different correct answers to each question
are learned.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from groundwire import domains
from groundwire.adapters.tracing import LLMCall
from groundwire.tools.files import GivenTwiceError, parse_json, shorten_repr
from groundwire.tools.terminal import counted, progress
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import FORMATS, SFTSettings
from groundwire.train.evaluation.diagnosis import trained_calls
from groundwire.train.evaluation.validation import choose_tasks
from groundwire.train.policy.chat.request import parse_request
from groundwire.train.policy.chat.template import has_tools
from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.report.token_text import TokenDecoder, token_decoder
from groundwire.train.sft.data.examples import Example, Turn, encode
from groundwire.train.sft.data.golds import (
    GoldQuestion,
    GoldTurns,
    answer_turns,
    check_golds,
    gold_is_sql,
    make_questions,
    write_turns,
)
from groundwire.train.store.rollout import Rollout

MakeExamples = Callable[[], list[Example]]
_FROM_RUN = ("model", "domain", "data_dir", "agent_options", "max_model_len")
_COLUMNS = ("mode", "step", "task_id", "status", "reward", "calls", "answer", "agent_steps")
_OTHER_AGENTS = "calls of agents that agent_match does not select"
_REJECTED = "queries that the agent itself rejected and wrote again"
_REJECTING = "calls that rejected the accepted query, which was written again"
_SCHEMA_LOOKUP = re.compile(r"\bsqlite_(master|schema)\b|\binformation_schema\b|^\s*pragma\b", re.IGNORECASE)


class Data(NamedTuple):
    """The data of a run."""

    groups: Callable[[int], list[MakeExamples]]
    """Of an epoch, the groups of examples that belong together; each is made when it is called."""
    held_out: list[Example]
    """For the held-out loss."""
    questions: list[GoldQuestion]
    """For the accuracy of first queries."""
    size: str
    """What there is to learn, for the user."""


def open_source(settings: SFTSettings) -> tuple[str, Callable[[Any], Data]]:
    """The name of the source that the settings name, and what makes its data with a tokenizer.

    Both raise errors derived from :class:`groundwire.tools.errors.UserError`.
    """
    return (_rollouts if settings.rollouts else _chats if settings.chats else _golds)(settings)


def _golds(settings: SFTSettings) -> tuple[str, Callable[[Any], Data]]:
    domain = domains.get(settings.domain)
    data = domains.load_split(domain, None, settings.data_dir)
    check_golds(domain, data)

    def load(tokenizer: Any) -> Data:
        encode(tokenizer, write_turns(_ANY_QUESTION, settings))  # a template that cannot write them is refused now
        with progress("Running the queries", len(data.train)) as on_end:
            questions = make_questions(domain, data.train, settings, wrong=settings.later_turns > 0, on_end=on_end)
        source = GoldTurns(questions, settings)

        def make(group: list[GoldQuestion], epoch: int) -> list[Example]:
            return encode(tokenizer, source.turns(group, epoch))

        def groups(epoch: int) -> list[MakeExamples]:
            return [partial(make, group, epoch) for group in source.groups(epoch)]

        held_out = _held_out_questions(domain, data, settings)
        turns = [turn for asked in held_out for turn in (*write_turns(asked, settings), *answer_turns(asked, settings))]
        size = f"{counted(len(questions), 'question')} to learn, {len(held_out):,} held out"
        return Data(groups, encode(tokenizer, turns), held_out, size)

    return "; ".join((data.source, *data.notes, *domains.shared_notes(data))), load


def _chats(settings: SFTSettings) -> tuple[str, Callable[[Any], Data]]:
    chats = read_chats(Path(str(settings.chats)))

    def load(tokenizer: Any) -> Data:
        held_out = [chat for chat in chats if chat[0].held_out]
        learned = [chat for chat in chats if not chat[0].held_out]
        if not held_out:
            learned, held_out = _split(chats, settings, _first_question)
        if not learned:
            raise ConfigError(f'{settings.chats} has no chat to learn: all have "split": "validation"')
        encode(tokenizer, [turn for chat in chats for turn in chat if turn.tools][:1])
        size = f"{counted(len(learned), 'chat')} to learn, {len(held_out):,} held out"
        turns = [turn for chat in held_out for turn in chat]
        return Data(_shuffled(learned, settings, partial(encode, tokenizer)), encode(tokenizer, turns), [], size)

    return str(settings.chats), load


def _rollouts(settings: SFTSettings) -> tuple[str, Callable[[Any], Data]]:
    run = RunDir.open(str(settings.rollouts))
    tasks, left_out = accepted_rollouts(run, min_reward=settings.min_reward, per_task=settings.max_per_task)

    def load(tokenizer: Any) -> Data:
        if token_decoder(run).vocabulary != tokenizer.get_vocab():
            raise ConfigError(
                f"{run.path} has token ids of another tokenizer than that of {settings.model}: learn with the run's "
                f"own model ({run.config().get('model')})"
            )
        learned, held_out = _split(tasks, settings, lambda calls: calls[0].prompt_ids)
        calls, learned_tasks = counted(sum(map(len, learned)), "call"), counted(len(learned), "task")
        size = f"{calls} of {learned_tasks} to learn, of {counted(len(held_out), 'task')} held out"
        if left_out:
            size += f"; left out: {', '.join(f'{count:,} {reason}' for reason, count in left_out.items())}"
        examples = [example for task in held_out for example in task]
        return Data(_shuffled(learned, settings, list), examples, _questions_of(run, tokenizer, settings), size)

    return str(run.path), load


def _questions_of(run: RunDir, tokenizer: Any, settings: SFTSettings) -> list[GoldQuestion]:
    """Held-out questions with gold queries, if the run's agent is one whose first query can be judged."""
    config = run.config()
    if config.get("backend") not in FORMATS or "tasks" in config.get("objects", {}):
        return []
    domain = domains.get(settings.domain)
    if (config["backend"] != "langgraph" and not has_tools(tokenizer)) or not gold_is_sql(domain):
        return []
    return _held_out_questions(domain, domain.load(settings.data_dir), settings)


def _shuffled(
    items: Sequence[Any], settings: SFTSettings, make: Callable[[Any], list[Example]]
) -> Callable[[int], list[MakeExamples]]:
    """The same groups in each epoch, in another order."""

    def groups(epoch: int) -> list[MakeExamples]:
        order = random.Random(f"{settings.seed}-epoch-{epoch}").sample(items, len(items))
        return [partial(make, item) for item in order]

    return groups


_ANY_QUESTION = GoldQuestion("", "", "How many?", "SELECT 1", "CREATE TABLE t ( a int )")


def _held_out_questions(domain: domains.Domain, data: domains.TaskData, settings: SFTSettings) -> list[GoldQuestion]:
    tasks = choose_tasks(list(data.validation), settings.val_tasks)
    with progress("Reading held-out questions", len(tasks)) as on_end:
        return make_questions(domain, tasks, settings, wrong=False, on_end=on_end)


def _split(groups: Sequence[Any], settings: SFTSettings, question: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    """What is learned, and what is held out: about a tenth, or ``val_tasks`` if those are fewer, by their questions."""
    tenth = len(groups) // 10
    count = min(settings.val_tasks or tenth, tenth)
    if not count:
        return list(groups), []
    rows = [{"id": index, "question": question(group)} for index, group in enumerate(groups)]
    learned, held_out, _ = domains.hold_out(rows, count / len(groups), source="")
    return [groups[row["id"]] for row in learned], [groups[row["id"]] for row in held_out]


def _first_question(chat: Sequence[Any]) -> str:
    return next((str(message.get("content")) for message in chat[0].messages if message["role"] == "user"), "")


def read_chats(file: Path) -> list[list[Turn]]:
    """The turns of each chat: one for each reply of the assistant, but for those with ``"weight": 0``.

    A line has ``messages`` and perhaps ``tools``, as in a request to OpenAI's API. If any has the ``split``
    ``validation``, those are held out.

    Raises :class:`ConfigError`, which names the line.
    """
    try:
        with open(file, "rb") as lines:
            chats = [_read_line(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if not chats:
        raise ConfigError(f"{file} has no chats")
    return chats


def _read_line(line: bytes, source: str) -> list[Turn]:
    try:
        chat = parse_json(line, unique=True)
    except GivenTwiceError as error:
        raise ConfigError(f"{source}: {error}") from error
    except ValueError as error:
        text = shorten_repr(line.decode(errors="replace").strip())
        raise ConfigError(f"{source} is not JSON, but {text}: give an object with messages") from error
    try:
        if not isinstance(chat, dict):
            raise ValueError(f"a chat is a JSON object, not {shorten_repr(chat)}")
        return turns_of(chat, source)
    except (ChatRequestError, ValueError) as error:
        raise ConfigError(f"{source}: {str(error).splitlines()[0]}") from error


def turns_of(chat: Mapping[str, Any], source: str = "") -> list[Turn]:
    """The turns of a chat. Raises ``ValueError`` or :class:`ChatRequestError` if it cannot be learned."""
    messages: Any = chat.get("messages")
    tools = chat.get("tools") or []
    parse_request({"messages": messages, "tools": tools}, served="")
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant" and _is_learned(message, i)]
    if not replies:
        raise ValueError("messages has no reply of the assistant to learn")
    if replies[0] == 0:
        raise ValueError("messages[0] is a reply of the assistant: begin with the message that it answers")
    held_out = chat.get("split") == "validation"
    return [Turn(messages[:i], messages[i], tools, source, held_out) for i in replies]


def _is_learned(reply: dict[str, Any], index: int) -> bool:
    weight = reply.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"messages[{index}].weight is {shorten_repr(weight)}: give 1 to learn the reply, or 0")
    if weight and not any(map(reply.get, ("content", "refusal", "tool_calls"))):
        raise ValueError(
            f"messages[{index}] has neither content nor tool_calls, so there is nothing to learn: give the reply, or "
            'its "weight": 0'
        )
    return bool(weight)


def with_run_settings(settings: SFTSettings, given: Mapping[str, Any]) -> SFTSettings:
    """``settings`` with the model, domain, agent and prompts of the run ``settings.rollouts`` where none are given."""
    config = RunDir.open(str(settings.rollouts)).config()
    stored = {name: config[name] for name in _FROM_RUN if name in config}
    if config.get("backend") in FORMATS:
        stored["backend"] = [config["backend"]]
    return SFTSettings(**{**settings.model_dump(), **stored, **given})


def accepted_rollouts(run: RunDir, *, min_reward: float, per_task: int) -> tuple[list[list[Example]], Counter[str]]:
    """The calls of each task's accepted training rollouts, which differ in their replies, and how many calls are left
    out, by reason: those of agents that the run did not train, and queries that the agent itself rejected.

    At most ``per_task`` (0: all) of a task: those with the highest rewards, of the latest steps. Validation rollouts
    are never learned. Raises :class:`ConfigError` if there is nothing to learn, and for an evaluation.
    """
    if "evaluation" in run.config():
        raise ConfigError(f"{run.path} is an evaluation, which is never learned: give the folder of a groundwire run")
    scored = [
        (rollout.outcome.reward, rollout)
        for rollout in run.rollouts(_COLUMNS)[0]
        if rollout.mode == "train" and rollout.outcome.reward is not None and rollout.trainable_calls
    ]
    rewards = [reward for reward, _ in scored]
    scored = [(reward, rollout) for reward, rollout in scored if reward >= min_reward]
    if not scored:
        best = f"the highest reward of {len(rewards):,} is {max(rewards):g}" if rewards else "it has none with calls"
        raise ConfigError(f"{run.path} has no training rollout with a reward of at least {min_reward:g}: {best}")
    tasks: dict[str, dict[Any, list[Example]]] = {}
    left_out, decoder, config = Counter[str](), token_decoder(run), cache(run.config)
    for _, rollout in sorted(scored, key=lambda pair: (-pair[0], -pair[1].step)):
        accepted = tasks.setdefault(str(rollout.task["id"]), {})
        if per_task and len(accepted) >= per_task:
            continue
        calls, reasons = _learned_calls(rollout, config(rollout.step).get("agent_match"), decoder)
        replies = tuple(tuple(call.response_ids) for call in calls)
        if calls and replies not in accepted:
            accepted[replies] = [Example(call.prompt_ids, call.response_ids) for call in calls]
            left_out.update(reasons)
    learned = [list(chain.from_iterable(accepted.values())) for accepted in tasks.values() if accepted]
    if not learned:
        match = run.config().get("agent_match")
        raise ConfigError(f"{run.path} has no accepted rollout with a call of an agent of agent_match {match!r}")
    return learned, left_out


def _learned_calls(rollout: Rollout, agent_match: str | None, decoder: TokenDecoder) -> tuple[list[LLMCall], list[str]]:
    """The calls of a rollout that are learned, and why each of the others is not."""
    trained = trained_calls(rollout, agent_match)
    reasons = [_OTHER_AGENTS] * (len(rollout.trainable_calls) - len(trained))
    answer = _plain(rollout.outcome.answer)
    steps = (step for step in rollout.outcome.steps if step["kind"] == "tool")
    queries = {_plain(step["input"]) for step in steps if not _SCHEMA_LOOKUP.search(step["input"])}
    if answer not in queries:
        return trained, reasons
    texts = [_plain(decoder.text(call.response_ids)) for call in trained]
    written = [max((query for query in queries if query and query in text), key=len, default="") for text in texts]
    right = [place for place, query in enumerate(written) if query == answer] or [0]
    kept = []
    for place, (call, query) in enumerate(zip(trained, written, strict=True)):
        if query not in ("", answer):
            reasons.append(_REJECTED)
        elif not query and right[0] < place < right[-1]:
            reasons.append(_REJECTING)
        else:
            kept.append(call)
    return kept, reasons


def _plain(text: str) -> str:
    """A query without what its spelling in a reply changes: blanks, quotes, and their escapes in JSON."""
    return re.sub(r"""[\s"'`;\\]+""", "", re.sub(r"\\[nrt]", " ", text))
