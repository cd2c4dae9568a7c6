"""Dialogues as the text of the starter's chat template, in segments of which some are replies to learn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dev.pretrain.tokenizer import IM_END, IM_START

__all__ = ["Dialogues", "Segment", "reply", "system_turn", "tool_call", "tool_turn", "user_start", "user_turn"]

Segment = tuple[str, bool]
"""Text of the chat template, and whether it is a reply to learn."""


@dataclass(frozen=True)
class Dialogues:
    """The chat template's text of a common beginning, and the dialogues that follow it."""

    prefix: str
    dialogues: list[list[Segment]]

    def texts(self) -> list[str]:
        """The prefix and all segments, in order."""
        return [self.prefix, *(text for dialogue in self.dialogues for text, _ in dialogue)]


def system_turn(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The system message and the tools; empty without both."""
    if tools:
        text = (f"{text}\n" if text else "") + "Tools:\n"
        text += "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        text += "Call a tool as <tool_call>JSON</tool_call>"
    return f"{IM_START}system\n{text}{IM_END}\n" if text else ""


def user_start() -> str:
    """What begins a user's turn."""
    return f"{IM_START}user\n"


def user_turn(text: str) -> str:
    """A user's turn up to where the reply begins."""
    return f"{user_start()}{text}{IM_END}\n{IM_START}assistant\n"


def tool_call(name: str, arguments: Mapping[str, Any], *, learned: bool = True) -> Segment:
    """A reply that calls a tool."""
    call = json.dumps(dict(arguments), ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {call}}}\n</tool_call>{IM_END}', learned


def tool_turn(result: str) -> Segment:
    """A tool's result after a call, up to where the next reply begins."""
    return "\n" + user_turn(f"<tool_response>\n{result}\n</tool_response>"), False


def reply(text: str, *, learned: bool = True) -> Segment:
    """A reply without a tool call."""
    return text + IM_END, learned
