"""Scripted conversations with a gateway, the policy behind it, and what the gateway did to the tokens.

Each token that the policy samples has an id that no other one has, so it is known again wherever it comes out.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from groundwire.adapters.gateways.sdks import APIS, SdkReply, Thread
from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.scripted_server import Reply as Scripted
from groundwire.adapters.tracing.scripted_server import ReplyIds, message_key
from groundwire.adapters.tracing.trajectories import common_tokens, token_bytes
from groundwire.adapters.tracing.wire.request import is_constrained
from groundwire.tools.errors import CommandError
from groundwire.tools.secrets import mask_secrets

_TOKENS, _CUT = 8, 3  # the tokens of a reply, and of one that is cut off
_LIMIT_S = 300.0
_WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
_TOOL = {"name": "look_up", "description": "Look a word up", "parameters": _WORD}
_SCHEMA = {**_WORD, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class SampledReply:
    """A reply as the policy sampled it."""

    conversation: str
    prompt_ids: list[int]
    response_ids: list[int]
    message: str = ""
    """Its :func:`groundwire.adapters.tracing.scripted_server.message_key`."""

    @property
    def context(self) -> list[int]:
        """Prompt and reply."""
        return self.prompt_ids + self.response_ids


@dataclass(frozen=True)
class ExportedRow:
    """What is trained on: ``loss_mask`` has a 1 for each of ``response_ids`` that gets a loss."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Counts of one conversation.

    ``lost``: sampled, and in no row's response after the tokens that they were sampled after. ``masked_wrongly``: there
    and not trained, trained more than once, or trained though the policy read them. ``invented``: in a row, at a place
    where the policy neither read nor sampled them.
    """

    lost: int = 0
    masked_wrongly: int = 0
    invented: int = 0


class Policy:
    """Replies for a :class:`ScriptedPolicyServer`: two parallel calls of a tool if there is one, JSON for a schema."""

    def __init__(self) -> None:
        self.conversation = ""
        """The one that is played; "" between them."""
        self.sampled: list[SampledReply] = []
        self._ids = ReplyIds()

    def reply(self, body: dict[str, Any]) -> list[Scripted]:
        """A reply for each choice."""
        return [self._choice(body, self._ids.prompt_ids(body["messages"])) for _ in range(body.get("n") or 1)]

    def _choice(self, body: dict[str, Any], prompt_ids: list[int]) -> Scripted:
        number = len(self.sampled)
        limit = min(body.get("max_completion_tokens") or body.get("max_tokens") or _TOKENS, _TOKENS)
        text, calls = f"{number} is\n  the reply."[: limit if limit < _TOKENS else None], list[dict[str, Any]]()
        if is_constrained(body):
            text = json.dumps({"word": text})
        elif body.get("tools") and body["messages"][-1]["role"] != "tool":
            for i in range(2):
                function = {"name": _TOOL["name"], "arguments": json.dumps({"word": f"{number} {i}"})}
                calls.append({"id": f"call_{number}_{i}", "type": "function", "function": function})
        key = message_key({"role": "assistant", "content": text, "tool_calls": calls})
        ids = self._ids[key] = [1000 + _TOKENS * number + i for i in range(limit)]
        self.sampled.append(
            SampledReply(conversation=self.conversation, prompt_ids=prompt_ids, response_ids=ids, message=key)
        )
        return Scripted(
            text=text,
            tool_calls=calls,
            prompt_ids=prompt_ids,
            token_ids=ids,
            finish_reason="length" if limit < _TOKENS else None,
            grammar="of the script" if is_constrained(body) else "",
        )


@dataclass(kw_only=True)
class Played:
    """A conversation and what became of its tokens."""

    api: str
    name: str
    stream: bool
    sampled: int = 0
    """Tokens that the policy sampled; where it is not ours, those that the gateway counts."""
    tokens: Tokens | None = None
    """None if the gateway gave nothing to compare."""
    later: int = 0
    """Prompts that go on with a conversation."""
    broken: int = 0
    """Of these, those that do not begin with the earlier prompt and reply as sampled."""
    refused: str = ""
    """Why the gateway does not serve it: an error 4xx or 501."""
    problems: Counter[str] = field(default_factory=Counter)
    rows: list[ExportedRow] = field(default_factory=list)
    """Of the replies."""

    @property
    def key(self) -> str:
        """A name that no other conversation has, for a URL."""
        return f"{self.api}-{self.name}{'-stream' if self.stream else ''}"

    @property
    def wrong(self) -> bool:
        """Whether anything is."""
        return bool(self.problems or self.tokens not in (None, Tokens()))


class _Player:
    """Plays one conversation, and notes what is wrong in the replies."""

    def __init__(
        self, played: Played, connect: Callable[[str], Thread], policy: Policy | None, ids_in_replies: bool
    ) -> None:
        self._played, self._connect, self._policy, self._ids_in_replies = played, connect, policy, ids_in_replies
        self._last: dict[Thread, SampledReply] = {}

    def thread(self, role: str = "assistant") -> Thread:
        """A conversation with an agent's own system prompt."""
        return self._connect(f"{self._played.key}: you are the {role}.")

    def compact(self, thread: Thread) -> None:
        """Replace the history with a summary."""
        thread.history.clear()
        thread.say("What was said: two questions were answered.")
        self._last.pop(thread, None)

    async def talk(self, thread: Thread, **asked: Any) -> None:
        """Three questions."""
        for text in ("What is a word?", "And a letter?", "And a number?"):
            await self.say(thread, text, **asked)

    async def say(self, thread: Thread, text: str, **asked: Any) -> None:
        """The user's message and the reply; if that calls tools, their results and the next reply."""
        thread.say(text)
        reply = await self._ask(thread, **asked)
        if reply.tools:
            thread.add_results(reply, "It means nothing.")
            await self._ask(thread, **asked)

    async def _ask(self, thread: Thread, *, limit: int = 64, n: int = 1, **asked: Any) -> SdkReply:
        played, known = self._played, self._policy.sampled if self._policy else []
        before = len(known)
        reply = await thread.ask(stream=played.stream, limit=limit, n=n, **asked)
        rows = [(call.prompt_ids, call.response_ids) for call in reply.calls if call.prompt_ids and call.response_ids]
        played.rows += [ExportedRow(prompt, ids, [1] * len(ids)) for prompt, ids in rows]
        sampled = known[before:] or [SampledReply(conversation="", prompt_ids=p, response_ids=r) for p, r in rows]
        if self._policy and reply.key not in {each.message for each in sampled}:
            played.problems["the agent got another reply than was sampled"] += 1
        for call in reply.calls if self._ids_in_replies else ():
            self._check(call, limit)
        if sampled:
            first = sampled[-n] if len(sampled) >= n else sampled[0]
            context = self._last[thread].context if thread in self._last else []
            played.later += bool(context)
            if first.prompt_ids[: len(context)] != context:
                played.broken += 1
                if self._policy:  # whose tokenizer keeps the prefix; another's may break it by itself
                    played.problems["a prompt does not begin with the earlier one and what was sampled"] += 1
            self._last[thread] = first
        return reply

    def _check(self, call: LLMCall, limit: int) -> None:
        """Whether a choice agrees with itself and with its usage."""
        played, ids = self._played, len(call.response_ids)
        if reason := call.untrainable_reason:
            only = "" if call.prompt_ids or not ids or call.failed else " for the prompt"
            played.problems[reason + only] += 1
        if ids > limit or (self._policy and ids == limit and not call.truncated):
            played.problems["a reply that max_tokens cut off has more ids, or does not end with length"] += 1
        if self._policy is None:
            count, so_far = call.response_tokens or ids, played.tokens or Tokens()
            lost, invented = so_far.lost + max(0, count - ids), so_far.invented + max(0, ids - count)
            played.tokens, played.sampled = Tokens(lost=lost, invented=invented), played.sampled + count


async def _cut_off(player: _Player) -> None:
    thread = player.thread()
    await player.say(thread, "Tell me a story.", limit=_CUT)
    await player.say(thread, "Go on.")


async def _sub_agents(player: _Player) -> None:
    threads = [player.thread("planner"), player.thread("writer")]
    for text in ("What comes first?", "And then?"):
        for thread in threads:
            await player.say(thread, text)


async def _compaction(player: _Player) -> None:
    thread = player.thread()
    await player.talk(thread)
    player.compact(thread)
    await player.talk(thread)


_CONVERSATIONS: Mapping[str, Callable[[_Player], Awaitable[None]]] = {
    "text": lambda player: player.talk(player.thread()),
    "choices": lambda player: player.talk(player.thread(), n=2),
    "cut-off": _cut_off,
    "tools": lambda player: player.talk(player.thread(), tool=_TOOL),
    "schema": lambda player: player.talk(player.thread(), schema=_SCHEMA),
    "sub-agents": _sub_agents,
    "compaction": _compaction,
}


async def play(
    url: str,
    *,
    key: str,
    model: str,
    policy: Policy | None = None,
    export: Callable[[], Awaitable[Sequence[ExportedRow]]] | None = None,
    apis: Sequence[str] = tuple(APIS),
) -> list[Played]:
    """Play every conversation with the gateway at ``url``, one after the other.

    Args:
        url: an OpenAI base URL that ends in ``/v1``. ``{conversation}`` in it or in ``key`` becomes each conversation's
            own :attr:`Played.key`.
        key: the API key.
        model: the name in requests.
        policy: answers the server behind the gateway; None compares the replies with themselves only.
        export: what the gateway gives to training, asked for at the end; None takes the ids in its replies.
        apis: those to use.
    """
    results = []
    for api, name, stream in ((a, c, s) for a in apis for c in _CONVERSATIONS for s in (False, True)):
        if name == "choices" and not APIS[api].several:
            continue
        played = Played(api=api, name=name, stream=stream)
        url_, key_ = (text.replace("{conversation}", played.key) for text in (url, key))
        player = _Player(played, partial(APIS[api], url_, key_, model), policy, export is None)
        if policy:
            policy.conversation = played.key
        try:
            await asyncio.wait_for(_CONVERSATIONS[name](player), _LIMIT_S)
        except Exception as error:  # each SDK has its own
            status = getattr(error, "status_code", None) or getattr(error, "code", None)
            text = mask_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:160]
            if isinstance(status, int) and (400 <= status < 500 or status == 501):
                played.refused = text
            else:
                played.problems[text] += 1
        results.append(played)
    if policy:
        policy.conversation = ""
        known = [each for each in policy.sampled if each.conversation]
        tokens = compare(known, await export() if export else [row for played in results for row in played.rows])
        for played in results:
            played.sampled = sum(len(each.response_ids) for each in known if each.conversation == played.key)
            if export or played.api == "chat":  # other APIs have no ids in replies
                played.tokens = tokens.get(played.key)
    return results


def read_row(fields: Mapping[str, Any]) -> ExportedRow:
    """The row with these fields; ``loss_mask`` may be missing if all is trained. Raises :class:`CommandError`."""
    try:
        prompt, response = list(fields["prompt_ids"]), list(fields["response_ids"])
        mask = list(fields.get("loss_mask") or [1] * len(response))
    except (LookupError, TypeError, AttributeError) as error:
        raise CommandError(
            f"no training row: {fields!r:.80}; write a JSON object with prompt_ids, response_ids and loss_mask"
        ) from error
    if len(mask) != len(response):
        raise CommandError(f"a row has {len(response)} response_ids and a loss_mask of {len(mask)}: give one for each")
    return ExportedRow(prompt, response, mask)


def compare(sampled: Sequence[SampledReply], rows: Iterable[ExportedRow]) -> dict[str, Tokens]:
    """The counts of each conversation. A row belongs to the one whose context it shares most of.

    No two replies may have the same prompt and first token.
    """
    trained, invented, wrong, lost = Counter[tuple[int, int]](), Counter[str](), Counter[str](), Counter[str]()
    in_a_row: set[tuple[int, int]] = set()
    for row in rows if sampled else ():
        ids, mask = row.prompt_ids + row.response_ids, [0] * len(row.prompt_ids) + row.loss_mask
        row_bytes = token_bytes(ids)
        shared = [common_tokens(row_bytes, token_bytes(reply.context)) for reply in sampled]
        known = max(shared)
        conversation = sampled[shared.index(known)].conversation
        places: dict[int, tuple[int, int]] = {}  # of the sampled tokens: number of the reply, index in it
        for number, (reply, length) in enumerate(zip(sampled, shared, strict=True)):
            start = len(reply.prompt_ids)
            places |= {start + i: (number, i) for i in range(length - start)}
        in_a_row.update(place for position, place in places.items() if position >= len(row.prompt_ids))
        trained.update(place for position, place in places.items() if mask[position])
        invented[conversation] += len(ids) - known
        wrong[conversation] += sum(mask[position] for position in range(known) if position not in places)
    for number, reply in enumerate(sampled):
        found = [i for i in range(len(reply.response_ids)) if (number, i) in in_a_row]
        lost[reply.conversation] += len(reply.response_ids) - len(found)
        wrong[reply.conversation] += sum(trained[number, i] != 1 for i in found)
    return {
        name: Tokens(lost=lost[name], masked_wrongly=wrong[name], invented=invented[name])
        for name in dict.fromkeys(reply.conversation for reply in sampled)
    }
