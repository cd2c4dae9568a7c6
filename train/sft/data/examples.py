"""From messages to token ids: the prompt as the policy server makes it, and the reply as the engine samples it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.chat.prompt import tokenize, write
from groundwire.train.policy.chat.request import parse_request
from groundwire.train.policy.chat.template import TemplateLimitError, TemplateRefusedError, has_tools

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """A reply to learn after its messages."""

    messages: Sequence[Message]
    reply: Message
    tools: Sequence[Mapping[str, Any]] = ()
    source: str = ""
    """Where it is from, for messages: a file and its line."""
    held_out: bool = False


@dataclass(frozen=True)
class Example:
    """A reply to learn, as token ids, after its prompt."""

    prompt_ids: list[int]
    response_ids: list[int]

    @property
    def mask(self) -> list[int]:
        """Every token of the reply is learned."""
        return [1] * len(self.response_ids)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def encode(tokenizer: Any, turns: Sequence[Turn]) -> list[Example]:
    """The token ids of ``turns``; a reply ends with the token that ends a reply when it is sampled.

    Raises :class:`ConfigError` if the chat template cannot write them.
    """
    texts = [text for turn in turns for text in _texts(tokenizer, turn)]
    if not texts:
        return []
    ids = [list(tokenize(tokenizer, text)) for text in texts]
    end = tokenizer.eos_token_id
    return [Example(ids[i], [*ids[i + 1], end]) for i in range(0, len(ids), 2)]


def _texts(tokenizer: Any, turn: Turn) -> tuple[str, str]:
    request = parse_request({"messages": [*turn.messages, turn.reply], "tools": list(turn.tools)}, served="")
    messages, tools = request.template_messages, request.tools or None
    template = f"{turn.source}: the model's chat template".removeprefix(": ")
    if tools and not has_tools(tokenizer):
        raise ConfigError(f"{template} has no tools: learn turns without them, or use another model")
    try:
        prompt = write(tokenizer, messages[:-1], tools=tools)
        whole = write(tokenizer, messages, tools=tools, add_generation_prompt=False)
    except (TemplateRefusedError, TemplateLimitError) as error:
        raise ConfigError(f"{template} cannot write the training data: {error}") from error
    if not whole.startswith(prompt):
        raise ConfigError(f"{template} changes the prompt when the reply follows it, so that no reply can be cut out")
    return prompt, whole[len(prompt) :].partition(tokenizer.eos_token)[0]
