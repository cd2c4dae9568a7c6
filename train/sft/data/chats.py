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
                    chats.append(_read_line(line, f"{file}, line {number}"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if not chats:
        raise ConfigError(f"{file} has no chats")
    return chats


def _read_line(line: bytes, source: str) -> list[Turn]:
    try:
        chat = parse_json(line)
    except ValueError as error:
        shown = shorten_repr(line.decode(errors="replace").strip())
        raise ConfigError(f"{source} is not JSON, but {shown}: give an object with messages") from error
    try:
        return _turns(chat, source)
    except (ChatRequestError, ValueError) as error:
        raise ConfigError(f"{source}: {str(error).splitlines()[0]}") from error


def _turns(chat: Any, source: str) -> list[Turn]:
    if not isinstance(chat, dict):
        raise ValueError(f"a chat is a JSON object, not {shorten_repr(chat)}")
    messages: Any = chat.get("messages")
    tools = chat.get("tools") or []
    parse_request({"messages": messages, "tools": tools}, served="")
    replies = [i for i, each in enumerate(messages) if each["role"] == "assistant" and _is_learned(each, i)]
    if not replies:
        raise ValueError("messages has no reply of the assistant to learn")
    if replies[0] == 0:
        raise ValueError("messages[0] is a reply of the assistant: begin with the message that it answers")
    return [Turn(messages[:i], messages[i], tools, source) for i in replies]


def _is_learned(reply: dict[str, Any], index: int) -> bool:
    weight = reply.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"messages[{index}].weight is {shorten_repr(weight)}: give 1 to learn the reply, or 0")
    if weight and not reply.get("content") and not reply.get("tool_calls"):
        raise ValueError(
            f"messages[{index}] has neither content nor tool_calls, so there is nothing to learn: give the reply, or "
            'its "weight": 0'
        )
    return bool(weight)
