"""Which API a request is for, by the end of its path: clients put versions, deployments and projects before it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from groundwire.adapters.tracing.wire.call import ChatCall, WireCall
from groundwire.adapters.tracing.wire.completions import CompletionsCall
from groundwire.adapters.tracing.wire.converse import ConverseCall
from groundwire.adapters.tracing.wire.generate_content import GenerateContentCall
from groundwire.adapters.tracing.wire.messages import MessagesCall
from groundwire.adapters.tracing.wire.ollama import OllamaCall
from groundwire.adapters.tracing.wire.responses import ResponsesCall

APIS: tuple[type[WireCall], ...] = (
    ChatCall,
    ResponsesCall,
    MessagesCall,
    CompletionsCall,
    GenerateContentCall,
    ConverseCall,
    OllamaCall,
)
SERVED = (
    "OpenAI's chat completions and Responses, Anthropic's Messages, Google's generateContent, Bedrock's Converse and "
    "Ollama's chat"
)
"""The APIs in messages."""
_PATHS = [(api, re.compile(rf"/(?:{api.path})(?:\?(?P<query>.*))?$")) for api in APIS]


class ApiPath(NamedTuple):
    """What the path of a request says."""

    api: type[WireCall]
    path: str
    """The end of the path, with the query."""
    fields: Mapping[str, Any]
    """Fields of the request that are in the path."""
    counts: bool
    """Whether only the length of the prompt is asked for."""


def find_api(path: str) -> ApiPath | None:
    """What ``path`` says, which is still percent-encoded and may end with a query; None if it is of no known API."""
    for api, pattern in _PATHS:
        if (match := pattern.search(path)) is not None:
            groups = match.groupdict()
            fields: dict[str, Any] = {}
            if model := groups.get("model"):
                fields = {"model": unquote(model), "stream": bool(groups.get("stream"))}
            if sse := "alt=sse" in (groups["query"] or "").split("&"):
                fields["alt"] = "sse"
            end = match.group().partition("?")[0] + "?alt=sse" * sse
            return ApiPath(api, end, fields, bool(groups.get("count")))
    return None
