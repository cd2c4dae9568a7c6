"""The wire APIs that the proxy and the policy server have."""

from __future__ import annotations

from groundwire.adapters.tracing.wire.call import ChatCall, WireCall
from groundwire.adapters.tracing.wire.completions import CompletionsCall
from groundwire.adapters.tracing.wire.messages import MessagesCall
from groundwire.adapters.tracing.wire.responses import ResponsesCall

APIS: tuple[type[WireCall], ...] = (ChatCall, ResponsesCall, MessagesCall, CompletionsCall)

PATHS: dict[str, type[WireCall]] = {**{api.api: api for api in APIS}, "v1/messages": MessagesCall}
"""The paths below ``/v1``. Anthropic's clients add the ``/v1`` themselves, also to a base URL that ends with it."""

COUNT_PATHS = tuple(f"{path}/count_tokens" for path, api in PATHS.items() if api is MessagesCall)
"""Where Anthropic's clients ask for the length of a prompt."""
