"""Which fields of messages, items, blocks and tools reach the policy, by API and kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groundwire.adapters.tracing.wire.request import warn_ignored

_READ: Mapping[str, Mapping[str, str]] = {
    "chat completions": {
        "message": "role content name status",
        "assistant message": "role content name status tool_calls reasoning_content reasoning thinking "
        "thinking_blocks reasoning_details",
        "text": "text",
        "input_text": "text",
        "output_text": "text",
        "refusal": "refusal",
    },
    "Responses": {
        "message": "role content status",
        "function_call": "name namespace arguments status",
        "custom_tool_call": "name namespace input status",
        "function_call_output": "output name namespace status",
        "custom_tool_call_output": "output name namespace status",
        "reasoning": "content summary encrypted_content status",
        "additional_tools": "role tools",
        "input_text": "text",
        "output_text": "text",
        "refusal": "refusal",
        "input_image": "image_url detail",
        "function": "name namespace description parameters strict",
        "custom": "name namespace description",
        "namespace": "name tools",
    },
    "Messages": {
        "message": "role content",
        "text": "text",
        "thinking": "thinking",
        "redacted_thinking": "",
        "image": "source",
        "tool_use": "name input",
        "tool_result": "content",
        "tool": "name description input_schema strict",
    },
    "generateContent": {
        "content": "role parts",
        "part": "text thought functionCall functionResponse inlineData fileData",
        "functionCall": "name args",
        "functionResponse": "name response",
        "functionDeclaration": "name description parameters parametersJsonSchema",
    },
    "Converse": {
        "message": "role content",
        "reasoningContent": "reasoningText",
        "reasoningText": "text",
        "toolUse": "name input",
        "toolResult": "content",
        "toolSpec": "name description inputSchema strict",
    },
    "Ollama": {
        "message": "role content images thinking tool_calls tool_name name",
        "tool_call": "function",
        "function": "name description arguments parameters",
    },
}
_HARMLESS = {
    "type", "id", "call_id", "tool_use_id", "toolUseId", "tool_call_id", "index", "caller", "annotations", "citations",
    "logprobs", "cache_control", "prompt_cache_breakpoint", "signature", "thoughtSignature", "object", "weight",
    "provider_specific_fields",
}  # fmt: skip
"""Facts for clients, and for the providers' servers."""
_KNOWN = {(api, kind): _HARMLESS.union(names.split()) for api, kinds in _READ.items() for kind, names in kinds.items()}
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {}, "success")
_MAX_WARNINGS = 100  # agents choose the names


def warn_unread(api: str, kind: Any, fields: Mapping[str, Any]) -> None:
    """Warn once for each of the ``fields`` of a known ``kind`` that is set and has no effect on the policy."""
    known = _KNOWN.get((api, kind)) if isinstance(kind, str) else None
    if known is None or fields.keys() <= known:
        return
    for name in sorted(fields.keys() - known):
        if fields[name] not in _NEUTRAL and warn_ignored.cache_info().currsize < _MAX_WARNINGS:
            warn_ignored(api, f"{kind}.{name:.60}")
