"""A file of chats to learn: each line has ``messages`` and perhaps ``tools``, as in a request to OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groundwire.tools.files import parse_json, shorten_repr
from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.chat.request import parse_request
from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.sft.data.examples import Turn

__all__ = ["read_chats"]


def read_chats(file: Path) -> list[list[Turn]]:
    """The turns of each chat: one for each reply of the assistant, but for those with ``"weight": 0``.

    Raises :class:`ConfigError`, which names the line.
    """
    chats = []
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        chats.append(_turns(parse_json(line)))
                    except (ChatRequestError, ValueError) as error:
                        raise ConfigError(f"{file}, line {number}: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if not chats:
        raise ConfigError(f"{file} has no chats")
    return chats


def _turns(chat: Any) -> list[Turn]:
    if not isinstance(chat, dict):
        raise ValueError(f"a chat is a JSON object, not {shorten_repr(chat)}")
    messages: Any = chat.get("messages")
    tools = chat.get("tools") or []
    parse_request({"messages": messages, "tools": tools}, served="")
    replies = [i for i, each in enumerate(messages) if each["role"] == "assistant" and each.get("weight", 1)]
    if not replies:
        raise ValueError("messages has no reply of the assistant to learn")
    if replies[0] == 0:
        raise ValueError("messages[0] is a reply of the assistant: begin with the message that it answers")
    return [Turn(messages[:i], messages[i], tools) for i in replies]
