"""What is learned: a domain's gold queries, a file of chats, or the accepted rollouts of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from groundwire import domains
from groundwire.tools.files import GivenTwiceError, parse_json, shorten_repr
from groundwire.tools.terminal import counted, progress
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import FORMATS, SFTSettings
from groundwire.train.evaluation.validation import choose_tasks
from groundwire.train.policy.chat.request import parse_request
from groundwire.train.policy.chat.template import has_tools
from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.report.token_text import token_decoder
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
from groundwire.train.sft.data.rollouts import accepted_rollouts

MakeExamples = Callable[[], list[Example]]


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
