"""The messages of chat requests, as the policy's chat template reads them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from groundwire.adapters.tracing.wire.chat_request import MALFORMED
from groundwire.adapters.tracing.wire.request import warn_unread

_API = "chat completions"
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of text parts, and their fields with the text."""
_REASONING = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")
_THOUGHTS = ("thinking", "reasoning")  # the types of parts that are reasoning


def _join_text_parts(content: Any) -> Any:
    """A message's parts as one text, joined as vLLM joins them."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        fields = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = fields.get("type") if isinstance(fields, dict) else fields
        name = _TEXT_PARTS.get(kind, "") if isinstance(kind, str) else ""
        if not isinstance(text := fields.get(name) if name else None, str):
            raise ValueError(f"has a part of type {kind!r}; this model reads only text parts")
        warn_unread(_API, kind, fields)
        texts.append(text)
    return "\n".join(texts)


def _read_arguments(arguments: Any) -> Any:
    """Chat templates write the arguments as JSON themselves, so they get the object, as with vLLM.

    What a model has cut off, or written wrongly, stays text.
    """
    value = arguments
    for _ in range(2):  # a client may write the text as JSON once more
        if isinstance(value, str):
            try:
                value = json.loads(value or "{}")
            except (ValueError, RecursionError):
                break
    if value is None:
        return {}
    if isinstance(value, dict):
        raw = value.get(MALFORMED)
        return raw if len(value) == 1 and isinstance(raw, str) else value
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _reasoning_text(value: Any) -> str:
    """Reasoning as text, or as a list of blocks."""
    if isinstance(value, str):
        return value
    blocks = [block for block in value if isinstance(block, dict)] if isinstance(value, list) else []
    texts = (block.get(name) for block in blocks for name in ("thinking", "text", "summary"))
    return "\n".join(text for text in texts if isinstance(text, str))


def _drop_nulls(fields: Any) -> Any:
    if not isinstance(fields, dict):
        return fields
    return {name: value for name, value in fields.items() if value is not None}


class JSONObject(BaseModel):
    """A JSON object; null is the same as a missing field."""

    model_config = ConfigDict(strict=True, frozen=True)

    _normalize = model_validator(mode="before")(_drop_nulls)


class _ToolFunction(JSONObject):
    name: str
    arguments: Annotated[Any, BeforeValidator(_read_arguments)] = Field(default_factory=dict)

    @model_serializer
    def _dump(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments}  # arguments may be null, and are never left out


class _ToolCall(JSONObject):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _ToolFunction


class ChatMessage(JSONObject):
    """A checked message."""

    # Chat templates know OpenAI's newer role "developer" as "system".
    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(_join_text_parts)]
    reasoning: str | None = None
    tool_calls: Annotated[list[_ToolCall] | None, AfterValidator(lambda calls: calls or None)] = None
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, fields: Any) -> Any:
        """Only an assistant may leave out the content, and have tool calls and reasoning, which has many names."""
        fields = _drop_nulls(fields)
        if not isinstance(fields, dict):
            return fields
        kind = "message"
        if fields.get("role") == "assistant":
            kind = "assistant message"
            content, thoughts = fields.get("content"), []
            if isinstance(content, list):
                thoughts = [part for part in content if isinstance(part, dict) and part.get("type") in _THOUGHTS]
                content = [part for part in content if part not in thoughts]
            if not content:
                content = fields.pop("refusal", "")
            said = (_reasoning_text(value) for value in (*map(fields.get, _REASONING), thoughts) if value)
            fields = {**fields, "content": content, "reasoning": next(filter(None, said), None)}
        warn_unread(_API, kind, fields)
        unread = () if kind == "assistant message" else ("tool_calls", *_REASONING)
        return {name: value for name, value in fields.items() if name not in unread}
