"""A scripted policy that plays any SQL agent correctly, and remembers every token that it gave out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing.scripted_server import END, Reply, encode, text_of
from groundwire.adapters.tracing.wire.request import is_constrained

__all__ = ["GOLD", "SQLPolicy", "Served"]

GOLD = "SELECT title FROM film WHERE year > 1990"
_ROLES = {"system": 257, "developer": 257, "user": 258, "assistant": 259, "tool": 260}
_TOKENS = 5
_ENDS = ("final",)
"""How the names of tools begin that end a run: final_answer, final_result."""
_QUERY, _COMMAND = ("sql", "query"), ("command", "cmd")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A request and the tokens of its reply."""

    body: dict[str, Any]
    prompt_ids: list[int]
    response_ids: list[int]


class SQLPolicy:
    """Follows handoffs, reads the tables, runs one query, then answers, with the tools and formats that it is offered.

    Each reply has token ids that no other one has. Its tokenizer gives a reply the same ids again in later prompts
    if the agent sends it, and all before it, back unchanged.
    """

    def __init__(self, database: str) -> None:
        self._database = database
        self.served: list[Served] = []
        self._sampled: dict[str, list[int]] = {}

    def reply(self, body: dict[str, Any]) -> Reply:
        """The reply to a request for a chat completion."""
        first = 1000 + _TOKENS * len(self.served)
        served = Served(
            body=body, prompt_ids=self._prompt_ids(body["messages"]), response_ids=list(range(first, first + _TOKENS))
        )
        self.served.append(served)
        found = self._tool_call(body)
        if found is None:
            text, calls = _final_text(body), []
        else:
            name, arguments = found
            function = {"name": name, "arguments": json.dumps(arguments)}
            text, calls = "", [{"id": f"call_{first}", "type": "function", "function": function}]
        history = [
            *map(_content, body["messages"]),
            _content({"role": "assistant", "content": text, "tool_calls": calls}),
        ]
        self._sampled[json.dumps(history)] = served.response_ids
        return Reply(
            text=text,
            tool_calls=calls,
            prompt_ids=served.prompt_ids,
            token_ids=served.response_ids,
            logprobs=[-0.5] * _TOKENS,
            grammar="of the script" if is_constrained(body) else "",
        )

    def _tool_call(self, body: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Name and arguments of the next tool call; None for the final answer."""
        offered = {tool["function"]["name"]: _properties(tool) for tool in body.get("tools") or ()}
        replies = [message for message in body["messages"] if message["role"] == "assistant"]
        history = json.dumps(replies)  # some frameworks send tool calls back as text
        unused = {name: found for name, found in offered.items() if name not in history and "checker" not in name}
        tools = {name: found for name, found in unused.items() if not name.startswith(_ENDS)}
        shell = [name for name, found in offered.items() if _first(found, _COMMAND)]
        if shell:  # a coding agent, with dozens of other tools
            return (shell[0], {_first(offered[shell[0]], _COMMAND): "echo 1"}) if shell[0] in unused else None
        for ready in (
            [name for name in tools if name.startswith("transfer_to")],
            [name for name, found in tools.items() if not _first(found, _QUERY)],
            list(tools),
            [name for name in offered if name.startswith(_ENDS)],
        ):
            if ready:
                return ready[0], {name: self._argument(name) for name in offered[ready[0]]}
        return None

    def _argument(self, name: str) -> str:
        if any(each in name.lower() for each in (*_QUERY, "answer")):
            return GOLD
        return self._database if name == "database" else "film"

    def _prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids: list[int] = []
        for number, message in enumerate(messages, start=1):
            sampled = self._sampled.get(json.dumps([_content(each) for each in messages[:number]]))
            ids += [_ROLES[message["role"]], *(sampled or [*encode(json.dumps(_content(message))), END])]
        return [*ids, _ROLES["assistant"]]


def _final_text(body: Mapping[str, Any]) -> str:
    schema = ((body.get("response_format") or {}).get("json_schema") or {}).get("schema")
    if schema:
        return json.dumps({name: GOLD for name in schema["properties"]})
    return f"```sql\n{GOLD}\n```"


def _properties(tool: Mapping[str, Any]) -> list[str]:
    return list((tool["function"].get("parameters") or {}).get("properties") or {})


def _first(properties: Sequence[str], words: Sequence[str]) -> str:
    return next((name for name in properties if any(word in name.lower() for word in words)), "")


def _content(message: Mapping[str, Any]) -> list[Any]:
    """A message without what clients add and leave out."""
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return [message["role"], text_of(message), [[each["name"], json.loads(each["arguments"])] for each in calls]]
