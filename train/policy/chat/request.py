"""The chat completion requests that the policy server accepts. Unknown fields are ignored, as on other servers."""

from __future__ import annotations

import json
import re
import reprlib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from groundwire.tools.files import shorten_repr
from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.policy.types import Sampling

__all__ = ["ChatRequest", "parse_request"]


def _join_text_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {kind!r}; this model reads only text parts")
    return "".join(part["text"] for part in content)


def _parse_arguments(arguments: Any) -> Any:
    """Chat templates write the arguments as JSON themselves, so they get the object, as with vLLM."""
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        raise ValueError(f"must be JSON, not {arguments!r}") from None


def _require_function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("must be of type 'function' and have a function with a name")
    return tool


def _drop_nulls(fields: Any) -> Any:
    if not isinstance(fields, dict):
        return fields
    return {name: value for name, value in fields.items() if value is not None}


class _Object(BaseModel):
    """A JSON object; null is the same as a missing field."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, fields: Any) -> Any:
        return _drop_nulls(fields)


class _Function(_Object):
    name: str
    arguments: Annotated[Any, BeforeValidator(_parse_arguments)] = Field(default_factory=dict)

    @model_serializer
    def _dump(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments}  # arguments may be null, and are never left out


class _ToolCall(_Object):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Object):
    # Chat templates know OpenAI's newer role "developer" as "system".
    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(_join_text_parts)]
    tool_calls: Annotated[list[_ToolCall] | None, AfterValidator(lambda calls: calls or None)] = None
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, fields: Any) -> Any:
        """Only an assistant may leave out the content and have tool calls."""
        fields = _drop_nulls(fields)
        if isinstance(fields, dict):
            if fields.get("role") == "assistant":
                return {"content": "", **fields}
            fields.pop("tool_calls", None)
        return fields


class _StreamOptions(_Object):
    include_usage: bool = False


class ChatRequest(_Object):
    """A checked request."""

    model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[Annotated[dict[str, Any], AfterValidator(_require_function)]] = []
    tool_choice: Literal["none", "auto"] = "auto"
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    return_token_ids: bool = False
    session: str = ""
    """The rollout that sends the request; from its header or URL."""

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them."""
        return [message.model_dump(exclude_none=True) for message in self.messages]

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that a reply may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def samplings(self) -> list[Sampling]:
        """Sampling parameters of each choice; the choices of a seeded request have different seeds."""
        return [
            Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                max_tokens=self.max_completion_tokens or self.max_tokens,
                stop=tuple(self.stop),
                seed=None if self.seed is None else self.seed + choice,
                session=self.session,
            )
            for choice in range(self.n)
        ]


def parse_request(body: Any, *, served: str, session: str = "") -> ChatRequest:
    """Check ``body``, the decoded JSON of a request of ``session`` for the model ``served``.

    Raises:
        ChatRequestError: naming the field, its value, and the values that it may have.
    """
    if not isinstance(body, dict):
        raise ChatRequestError(f"the body must be a JSON object, not {reprlib.repr(body)}")
    try:
        request = ChatRequest.model_validate({**body, "session": session})
    except ValidationError as error:
        raise _first_error(error) from error
    if request.model not in (None, served):
        message = f"the model {shorten_repr(request.model)} does not exist; this server has {served!r}"
        raise ChatRequestError(message, param="model", status=404, code="model_not_found")
    return request


def _first_error(error: ValidationError) -> ChatRequestError:
    """pydantic's first error as OpenAI words it: ``messages[0].role must be 'user' or …, not 'robot'``."""
    first = error.errors()[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    value = reprlib.repr(first["input"])
    problems = {
        "missing": "is required",
        "too_short": "must not be empty",
        "string_too_short": "must not be empty",
        "model_type": f"must be an object, not {value}",
        "dict_type": f"must be an object, not {value}",
        "value_error": str(first.get("ctx", {}).get("error")),
    }
    requirement = re.sub(r"^\w+ should", "must", first["msg"])
    return ChatRequestError(f"{field} {problems.get(first['type'], f'{requirement}, not {value}')}", param=field)
