"""From a chat request to the token ids of its prompt.

A prompt continues an earlier call of its session: it is that call's prompt ids, the ids that were sampled, and the
tokens of what the agent has added. Nothing that was sampled is tokenized again, so the calls of a conversation are one
row of training, and the engine's cache has the beginning. The rule:

- The messages begin with those of the earlier call and its reply, word for word: roles, texts (a reply's without the
  spaces around it), reasoning, names and arguments of calls. The ids of calls, the order of fields, and null in place
  of "" do not count. Tools and variables of the template are the same.
- The model's chat template still writes everything before the reply as it did for the earlier call, and the reply's
  reasoning, if it has any. A template that drops reasoning at the next question (Qwen3's and later ones), or moves the
  tools there (Mistral's), gets a new prompt then: this is what a server gives the trained model. An empty block of
  reasoning does not count.

Every other prompt is rendered and tokenized as a whole. For what is new the template renders all messages with a mark
in place of the replies: it begins after the end token that follows the last mark, or with that token if the reply was
cut off before it. So this works with every template that ends its turns with a token.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
import secrets
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.call import Conversations
from groundwire.train.policy.chat.messages import ChatMessage
from groundwire.train.policy.chat.request import ChatRequest
from groundwire.train.policy.chat.template import (
    TemplateLimitError,
    TemplateRefusedError,
    has_tools,
    render,
    with_arguments,
)
from groundwire.train.policy.chat.tool_formats import END_THINK, FORMATS, THINK
from groundwire.train.policy.errors import ChatRequestError, ContextLengthError
from groundwire.train.policy.types import Engine

CACHED_PARTS = 1024
"""Parts of prompts whose ids are cached: all rollouts on a database begin with the same schema, which takes more than a
millisecond to tokenize, and all calls of a conversation with the same messages."""
CHARACTERS_PER_TOKEN = 32
"""A prompt with more characters for each token of the context is refused without tokenizing it, which could take a
minute and gigabytes; text has 3 to 5 characters a token."""
_CONTENT, _ARGUMENTS, _REASONING, _TEXT = (secrets.token_hex(12) for _ in range(4))
"""The marks in a reply, and within the text of a special token. No agent can know them."""
_REPLY_TOKENS = {THINK, END_THINK, *(token for each in FORMATS.values() for token in each.special)}
"""What may be a special token within a reply."""
_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")

Tokenize = Callable[[str], tuple[int, ...]]


class KeptReply(NamedTuple):
    """A reply that later prompts may continue."""

    ids: array[int]
    """What its call added to the prompt and reply of ``before``, and the reply itself."""
    before: KeptReply | None
    place: int
    """The index of the reply among the messages."""
    shown: tuple[int, bytes]
    """Length and digest of the text before the reply."""

    def chain(self) -> Iterator[KeptReply]:
        """This reply and those that it continues, the last one first."""
        each: KeptReply | None = self
        while each:
            yield each
            each = each.before

    def all_ids(self) -> list[int]:
        """The prompt and the reply."""
        return sum((each.ids for each in reversed([*self.chain()])), array("I")).tolist()


class ChatPrompt(NamedTuple):
    """A prompt, with what is needed to continue its replies."""

    request: ChatRequest
    ids: tuple[int, ...]
    words: Any = None
    """A hash object of the messages, if the request has a session."""
    shown: tuple[int, bytes] = (0, b"")
    before: KeptReply | None = None
    continued: int = 0
    """The number of first ids that are those of ``before``."""


class Prompts:
    """Makes the prompts for an engine's tokenizer and its chat template, with further ``variables``. For any thread."""

    def __init__(self, engine: Engine, variables: Mapping[str, Any]) -> None:
        self._engine, self._variables = engine, dict(variables)
        self._special = _special_tokens(engine.tokenizer)
        self._starts = _part_starts(engine.tokenizer)
        self._part_ids = functools.lru_cache(maxsize=CACHED_PARTS)(self._tokenize)
        self._opening = functools.lru_cache(maxsize=64)(self._read_opening)
        self._sampled = Conversations()

    def make(self, chat: ChatRequest, *, long: bool = False) -> ChatPrompt:
        """The prompt of a request. Raises errors derived from :class:`RefusedError`."""
        tokenize = self._tokenize if long else self._tokenize_parts
        prompt = self._raw(chat, tokenize) if chat.raw_prompt else self._chat(chat, tokenize)
        if not prompt.ids:
            raise ChatRequestError("the chat template makes an empty prompt of these messages", param="messages")
        return prompt

    def keep(self, prompt: ChatPrompt, token_ids: Sequence[int], reply: Mapping[str, Any]) -> None:
        """Keep what was sampled for ``prompt``, of which the agent gets the message ``reply``."""
        session = prompt.request.session
        if not session or not token_ids:
            return
        ids = array("I", [*prompt.ids[prompt.continued :], *token_ids])
        sampled = KeptReply(ids, prompt.before, len(prompt.request.messages), prompt.shown)
        if isinstance(prompt.request.raw_prompt, str):
            key: Any = prompt.request.raw_prompt + self._engine.tokenizer.decode(token_ids)
        elif prompt.words:
            words = prompt.words.copy()
            words.update(_words(ChatMessage.model_validate(reply)))
            key = words.digest()
        else:
            return
        self._sampled.of(session, len(ids) * ids.itemsize + len(key)).add(key, sampled)

    def _chat(self, chat: ChatRequest, tokenize: Tokenize) -> ChatPrompt:
        words, replies = _hashed(chat)
        kept = self._kept(chat)
        for place, key in reversed(replies if kept else []):
            if key in kept and (prompt := self._continued(chat, place, kept[key][0], words, tokenize)):
                return prompt
        text = self._render(chat, chat.template_messages)
        return ChatPrompt(chat, tokenize(text), words, self._shown(chat, text))

    def _continued(
        self, chat: ChatRequest, place: int, sampled: KeptReply, words: Any, tokenize: Tokenize
    ) -> ChatPrompt | None:
        """The prompt that continues a reply, which is the message at ``place``; None if the template does not."""
        messages: list[Any] = chat.template_messages
        for each in sampled.chain():
            messages[each.place] = _marked(messages[each.place])
        try:
            text = self._render(chat, messages)
            end = self._end_of_turn(chat, messages, text, place, sampled)
        except ChatRequestError:
            return None
        new = tokenize(text[end:]) if end is not None else ()
        if not new or new[0] not in self._special:
            return None
        ids = sampled.all_ids()
        new = new[1:] if new[0] == ids[-1] else new
        return ChatPrompt(chat, (*ids, *new), words, self._shown(chat, text), before=sampled, continued=len(ids))

    def _end_of_turn(
        self, chat: ChatRequest, messages: list[dict[str, Any]], text: str, place: int, sampled: KeptReply
    ) -> int | None:
        """Where the end token of the marked reply at ``place`` is in ``text``; None if it is not to be continued."""
        before, found, after = text.rpartition(_ARGUMENTS if "tool_calls" in messages[place] else _CONTENT)
        seen, (length, digest) = _EMPTY_REASONING.sub("", before), sampled.shown
        dropped = _REASONING in to_json(messages[place]) and seen.find(_REASONING, length) < 0
        if not found or dropped or _CONTENT in after or _digest(seen[:length]) != digest:
            return None
        ends = {self._engine.tokenizer.eos_token_id, sampled.ids[-1]} & self._special.keys()
        if not (places := [at for end in ends if (at := after.find(self._special[end])) >= 0]):
            return None
        end = len(text) - len(after) + min(places)
        if place + 1 < len(messages) and any(token in after[: min(places)] for token in self._special.values()):
            # The template may write the next messages before it ends the turn.
            added = messages[place + 1]
            changed = [
                *messages[: place + 1],
                {**added, "content": added["content"] + _CONTENT},
                *messages[place + 2 :],
            ]
            if self._render(chat, changed)[:end] != text[:end]:
                return None
        return end

    def _raw(self, chat: ChatRequest, tokenize: Tokenize) -> ChatPrompt:
        text = chat.raw_prompt or []
        if isinstance(text, list):
            size = len(self._engine.tokenizer)
            if not 0 <= min(text) <= max(text) < size:
                raise ChatRequestError(f"the prompt's token ids must be from 0 to {size - 1}", param="prompt")
            return ChatPrompt(chat, tuple(text))
        self._check_length(text)
        kept = self._kept(chat)
        key = max((key for key in list(kept) if isinstance(key, str) and text.startswith(key)), key=len, default=None)
        if key is not None:
            ids = kept[key][0].all_ids()
            whole = (*ids, *tokenize(text[len(key) :]))
            if self._engine.tokenizer.decode(whole) == text:
                return ChatPrompt(chat, whole, before=kept[key][0], continued=len(ids))
        return ChatPrompt(chat, tokenize(text))

    def _kept(self, chat: ChatRequest) -> dict[Any, Any]:
        return self._sampled.kept.get(chat.session, {}) if chat.session else {}

    def _shown(self, chat: ChatRequest, text: str) -> tuple[int, bytes]:
        """Length and digest of a rendered prompt before the reply begins."""
        if not chat.session:
            return 0, b""
        seen = _EMPTY_REASONING.sub("", text.removesuffix(self._opening(json.dumps(chat.chat_template_kwargs))))
        return len(seen), _digest(seen)

    def _read_opening(self, variables: str) -> str:
        """What the template writes where a reply begins."""
        options, user = {**self._variables, **json.loads(variables)}, [{"role": "user", "content": "a"}]
        try:
            whole, before = (
                render(self._engine.tokenizer, user, add_generation_prompt=x, **options) for x in (True, False)
            )
        except (TemplateRefusedError, TemplateLimitError):
            return ""
        return whole.removeprefix(before) if whole.startswith(before) else ""

    def _render(self, chat: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> str:
        if chat.offered_tools and not has_tools(self._engine.tokenizer):
            remedy = "use a model whose template has tools, or an agent without them"
            never_seen = f"the model's chat template has no tools, so it would never see them: {remedy}"
            raise ChatRequestError(never_seen, param="tools")
        options = {**self._variables, **chat.chat_template_kwargs}
        try:
            text = write(self._engine.tokenizer, messages, tools=chat.offered_tools or None, **options)
        except TemplateRefusedError as error:
            raise ChatRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except TemplateLimitError as error:
            raise ChatRequestError(f"the chat template cannot be used: {error}", param="messages") from error
        self._check_length(text)
        return text

    def _check_length(self, text: str) -> None:
        if len(text) > CHARACTERS_PER_TOKEN * self._engine.max_model_len:
            raise ContextLengthError(len(text), self._engine.max_model_len, unit="characters")

    def _tokenize_parts(self, text: str) -> tuple[int, ...]:
        places = [0, *(match.start() for match in self._starts.finditer(text)), len(text)]
        return tuple(chain.from_iterable(self._part_ids(text[start:end]) for start, end in pairwise(places)))

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tokenize(self._engine.tokenizer, text)


def _words(message: ChatMessage) -> bytes:
    """What a client cannot change without changing the conversation, as JSON."""
    if message.role != "assistant":
        return to_json([message.role, message.content, message.name]).encode()
    calls = [(call.function.name, _fields(to_json(call.function.arguments))) for call in message.tool_calls or ()]
    return to_json([message.content.strip(), (message.reasoning or "").strip(), calls]).encode()


@functools.lru_cache(maxsize=CACHED_PARTS)
def _fields(arguments: str) -> str:
    """JSON in one order, with whole numbers as a client in JavaScript writes them: 1.0 as 1."""
    value = json.loads(arguments, parse_float=lambda number: int(f) if (f := float(number)).is_integer() else f)
    return json.dumps(value, sort_keys=True)


def _hashed(chat: ChatRequest) -> tuple[Any, list[tuple[int, bytes]]]:
    """A hash object of the prompt's words, and the place and digest of each assistant's message; for a session only."""
    if not chat.session:
        return None, []
    replies, words = [], hashlib.blake2b(to_json([chat.offered_tools, chat.chat_template_kwargs]).encode())
    for place, message in enumerate(chat.messages):
        words.update(_words(message))
        if message.role == "assistant":
            replies.append((place, words.digest()))
    return words, replies


def write(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, **options: Any) -> str:
    """As :func:`render`, for :func:`tokenize`: what messages and tools have of a special token's text is marked there.

    It is ordinary text to the model: only the template writes special tokens, and a reply those of its calls.
    """
    text, special = render(tokenizer, messages, tools=tools, **options), _special_texts(tokenizer)
    if not special.search(to_json([messages, tools])):
        return text

    def marked(value: Any, own: Collection[str] = ()) -> Any:
        if isinstance(value, str):
            return special.sub(
                lambda found: found[0] if found[0] in own else f"{found[0][:1]}{_TEXT}{found[0][1:]}", value
            )
        if isinstance(value, dict):
            return {marked(key): marked(item) for key, item in value.items()}
        return list(map(marked, value)) if isinstance(value, list) else value

    replies = [_REPLY_TOKENS if message["role"] == "assistant" else () for message in messages]
    split = [
        {name: marked(value, own if isinstance(value, str) else ()) for name, value in message.items()}
        for message, own in zip(messages, replies, strict=True)
    ]
    try:
        whole = render(tokenizer, split, tools=marked(tools), **options)
    except TemplateRefusedError:
        return text
    return whole if whole.replace(_TEXT, "") == text else text  # else the template has read what was marked


def tokenize(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids of what :func:`write` has written."""
    if _TEXT not in text:
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    special, ordinary, ids = _special_texts(tokenizer), _without_special_tokens(tokenizer), list[int]()
    for part in re.split(f"({special.pattern})", text):
        if special.fullmatch(part):
            ids.append(tokenizer.convert_tokens_to_ids(part))
        elif part:
            ids += ordinary(part.replace(_TEXT, ""), add_special_tokens=False)["input_ids"]
    return tuple(ids)


@functools.lru_cache(maxsize=8)
def _special_texts(tokenizer: Any) -> re.Pattern[str]:
    longest_first = sorted(_special_tokens(tokenizer).values(), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first if len(text) > 1) or r"(?!)")


@functools.lru_cache(maxsize=2)
def _without_special_tokens(tokenizer: Any) -> Any:
    """A copy that reads special tokens as text: this is a state of a tokenizer, which other threads use."""
    ordinary = copy.deepcopy(tokenizer)
    ordinary.split_special_tokens = True
    return ordinary


def _marked(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """An assistant's message with the marks in place of its content, its reasoning, and the arguments of its calls."""
    marked = {**message, "content": _CONTENT}
    inline, thinks, _ = message["content"].partition(END_THINK)
    if message.get("reasoning", "").strip():
        marked |= {name: _REASONING for name in ("reasoning", "reasoning_content", "thinking") if name in message}
    elif thinks and inline.replace(THINK, "").strip():
        marked["content"] = f"<think>\n{_REASONING}\n</think>\n\n{_CONTENT}"
    return with_arguments(marked, lambda _: {_ARGUMENTS: ""})


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens by their ids; none of a tokenizer that is not transformers'."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: each.content for token, each in added.items() if each.special}


def _part_starts(tokenizer: Any) -> re.Pattern[str]:
    """Finds where the parts of a prompt begin, at special tokens: the tokens of the parts are those of the whole.

    A fast tokenizer cuts text at its special tokens before it does anything else. One that takes the spaces before it
    does not begin a part.
    """
    tokens = tokenizer.added_tokens_decoder.values() if getattr(tokenizer, "is_fast", False) else ()
    special = [t.content for t in tokens if t.special and not (t.normalized or t.lstrip or t.single_word)]
    return re.compile("|".join(map(re.escape, special)) or r"(?!)")
