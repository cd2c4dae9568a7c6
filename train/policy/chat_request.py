"""The chat completion requests that the policy server accepts.

Unknown fields are ignored, and null is the same as a missing field, as on other servers.
"""

from __future__ import annotations

import json
import re
import reprlib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.policy.types import Sampling

__all__ = ["ChatRequest", "parse_request"]


class _JsonObject(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return (
            {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields
        )


def _joined_text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {kind!r}; this model reads only text parts")
    return "".join(part["text"] for part in content)


def _parsed_arguments(arguments: Any) -> Any:
    """Chat templates write the arguments as JSON themselves, so they get the object, as with vLLM."""
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        raise ValueError(f"must be JSON, not {arguments!r}") from None


def _checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("must be of type 'function' and have a function with a name")
    return tool


class _Function(_JsonObject):
    name: str
    arguments: Annotated[Any, BeforeValidator(_parsed_arguments)] = Field(default_factory=dict)


class _ToolCall(_JsonObject):
    id: str | None = None
    type: Any = "function"
    function: _Function


class _Message(_JsonObject):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined_text)] = ""
    tool_calls: list[_ToolCall] = []
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _require_content(self) -> _Message:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("must have a content: a string or a list of text parts")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it. They know OpenAI's newer role "developer" as "system"."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls and self.role == "assistant":
            message["tool_calls"] = [
                {
                    **({} if call.id is None else {"id": call.id}),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in optional.items() if value is not None}


class _StreamOptions(_JsonObject):
    include_usage: bool = False


class ChatRequest(_JsonObject):
    """A checked request."""

    model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[Annotated[dict[str, Any], AfterValidator(_checked_tool)]] = []
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
    """The rollout that sends the request; from the request's header or address."""

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
        message = f"the model {request.model!r} does not exist; this server has {served!r}"
        raise ChatRequestError(message, param="model", status=404, code="model_not_found")
    return request


def _first_error(error: ValidationError) -> ChatRequestError:
    """pydantic's first error in the words of OpenAI's: ``messages[0].role must be 'user' or …, not 'robot'``."""
    first = error.errors()[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        problem = "is required"
    elif first["type"] in ("too_short", "string_too_short"):
        problem = "must not be empty"
    elif first["type"] == "value_error":
        problem = str(first["ctx"]["error"])
    elif first["type"] in ("model_type", "dict_type"):
        problem = f"must be an object, not {reprlib.repr(first['input'])}"
    else:
        requirement = re.sub(r"^\w+ should", "must", first["msg"])
        problem = f"{requirement}, not {reprlib.repr(first['input'])}"
    return ChatRequestError(f"{field} {problem}", param=field)
