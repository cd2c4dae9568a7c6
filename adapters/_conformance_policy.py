"""The scripted policy of the conformance kit."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.scripted_server import END, Reply, encode, text_of

__all__ = ["GOLD", "ConformancePolicy", "sampled_ids"]

GOLD = "SELECT title FROM film WHERE year > 1990"
_ROLE_IDS = {"system": 257, "developer": 257, "user": 258, "assistant": 259, "tool": 260}


def sampled_ids(n: int) -> list[int]:
    """The token ids of a rollout's ``n``-th reply, from 0. No text has these ids."""
    return [1000 + 10 * n + i for i in range(5)]


class ConformancePolicy:
    """Answers the requests of several rollouts, which it identifies by their seed.

    Its tokenizer maps every reply that it finds unchanged in a prompt to the ids that were sampled for it.
    """

    def __init__(self) -> None:
        self.requests: dict[int, list[dict[str, Any]]] = defaultdict(list)
        """The bodies of each rollout's requests."""
        self._sampled: dict[int, dict[str, list[int]]] = defaultdict(dict)

    def reply(self, body: dict[str, Any]) -> Reply:
        """The next reply: a call of the tool for queries if there is one, else a query in a fenced block."""
        if not isinstance(rollout := body.get("seed"), int):
            return Reply(status=400, text="the request has no seed: the endpoint's sampling parameters were left out")
        n, sampled = len(self.requests[rollout]), self._sampled[rollout]
        calls = _query_calls(body, n)
        reply = Reply(
            text="" if calls else f"```sql\n{GOLD} -- {n}\n```\nCORRECT",
            tool_calls=calls,
            prompt_ids=_prompt_ids(body["messages"], sampled),
            token_ids=sampled_ids(n),
            logprobs=[-0.5] * 5,
        )
        self.requests[rollout].append(body)
        sampled[_content(reply.text, calls)] = sampled_ids(n)
        return reply


def _query_calls(body: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """A call of the tool that runs queries, unless there is none or it has run already."""
    if any(message["role"] == "tool" for message in body["messages"]):
        return []
    for tool in body.get("tools") or ():
        function = tool["function"]
        properties = function.get("parameters", {}).get("properties", {})
        name = next((name for name in ("sql", "query") if name in properties), None)
        if name is not None:
            call = {"name": function["name"], "arguments": json.dumps({name: GOLD})}
            return [{"id": f"call_{body['seed']}_{n}", "type": "function", "function": call}]
    return []


def _prompt_ids(messages: Sequence[dict[str, Any]], sampled: Mapping[str, list[int]]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        text = text_of(message)
        reply = sampled.get(_content(text, message.get("tool_calls"))) if message["role"] == "assistant" else None
        ids += [_ROLE_IDS[message["role"]], *(reply or [*encode(text), END])]
    return [*ids, _ROLE_IDS["assistant"]]


def _content(text: str, tool_calls: Sequence[Mapping[str, Any]] | None) -> str:
    """A key of an assistant's message: its text and its tool calls."""
    functions = [call["function"] for call in tool_calls or ()]
    return json.dumps([text, [[function["name"], json.loads(function["arguments"])] for function in functions]])
