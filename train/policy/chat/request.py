"""The chat completion requests that the policy server accepts.

Each field that it does not apply is accepted, refused, or named in one warning.
"""

from __future__ import annotations

import functools
import logging
import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.tools.files import shorten_repr
from groundwire.train.policy.chat.messages import ChatMessage, JSONObject
from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.policy.grammar import ANY_OBJECT, calls_and_json, check_schema
from groundwire.train.policy.types import Sampling

_log = logging.getLogger(__name__)

NO_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "request_id", "priority", "cache_salt",
    }
)  # fmt: skip
"""Fields that do not change what is sampled."""
REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "this model writes text only",
    "web_search_options": "this server runs no tools of its own",
    "structured_outputs": "use response_format",
    "guided_json": "use response_format",
    "guided_regex": "use response_format with a schema that has a pattern",
    "guided_choice": "use response_format with a schema that has an enum",
    "guided_grammar": "use response_format",
    "prompt_logprobs": "only sampled tokens have log-probabilities here",
    "chat_template": "use chat_template_kwargs; the template is that of the model",
    "use_beam_search": "replies are sampled",
    "echo": "replies do not repeat the prompt",
}
"""Fields without which the reply would be another one than the agent expects, and what to do instead."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
"""Values that are the same as a missing field; so are false, empty lists and empty objects."""
_warned: set[str] = set()
_TEMPLATE_ARGUMENTS = frozenset(
    {
        "messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip


def _require_function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("must be of type 'function' and have a function with a name")
    return tool


class _JSONSchema(JSONObject):
    name: str = ""
    json_schema: Any = Field(default_factory=dict, alias="schema")


class _ResponseFormat(JSONObject):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JSONSchema | None = None

    @model_validator(mode="after")
    def _require_schema(self) -> _ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("of type 'json_schema' must have a json_schema")
        return self

    @property
    def reply_schema(self) -> Any:
        """The schema of the reply; None if it is free text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.json_schema
        return ANY_OBJECT if self.type == "json_object" else None


class _ToolChoice(NamedTuple):
    """Whether tools are called; ``names`` are those that may be, None for all."""

    mode: str
    names: tuple[str, ...] | None = None
    one: bool = False  # exactly one call

    @property
    def forced(self) -> bool:
        return self.mode not in ("none", "auto")


def _read_tool_choice(choice: Any) -> _ToolChoice:
    modes = ("none", "auto", "required")
    try:
        if choice in modes:
            return _ToolChoice(choice)
        if choice["type"] == "function":
            return _ToolChoice("required", (str(choice["function"]["name"]),), one=True)
        if choice["type"] == "allowed_tools" and choice["allowed_tools"]["mode"] in modes:
            names = (str(tool["function"]["name"]) for tool in choice["allowed_tools"]["tools"])
            return _ToolChoice(choice["allowed_tools"]["mode"], tuple(names))
    except (TypeError, LookupError):
        pass
    raise ValueError(
        "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}, "
        f"not {reprlib.repr(choice)}"
    )


def _check_template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(_TEMPLATE_ARGUMENTS & variables.keys()):
        raise ValueError(f"must not have {taken[0]!r}, which the server sets")
    return variables


class _StreamOptions(JSONObject):
    include_usage: bool = False


class ChatRequest(JSONObject):
    """A checked request."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    raw_prompt: Annotated[str, Field(min_length=1)] | list[int] | None = None
    """Of a legacy completion: sampled as it is, in place of the messages."""
    tools: list[Annotated[dict[str, Any], AfterValidator(_require_function)]] = []
    tool_choice: Annotated[Any, BeforeValidator(_read_tool_choice)] = _ToolChoice("auto")
    parallel_tool_calls: bool = True
    response_format: _ResponseFormat = _ResponseFormat(type="text")
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_template_variables)] = {}
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    return_token_ids: bool = False
    session: str = ""
    """The rollout that sends the request; from its header or URL."""
    tool_format: str = "hermes"
    """How the model writes tool calls; from the server."""

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them. As with vLLM, reasoning has two names; some know a third."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        for message in messages:
            if reasoning := message.get("reasoning"):
                message["reasoning_content"] = reasoning
                if not (message["content"] and "tool_calls" in message):  # gpt-oss's refuses all three
                    message["thinking"] = reasoning
        return messages

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools in the prompt."""
        return [] if self.tool_choice.mode == "none" else self.tools

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that a reply may call."""
        names = self.tool_choice.names
        return [tool for tool in self.offered_tools if names is None or tool["function"]["name"] in names]

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end a reply; without parallel tool calls a free reply also ends with its first call."""
        only_one = self.offered_tools and not self.parallel_tool_calls and not self.grammar
        return [*self.stop, *(["</tool_call>"] if only_one and self.tool_format == "hermes" else [])]

    @functools.cached_property
    def grammar(self) -> str:
        """What the reply must be: "" for free text, in which the model may call tools or not."""
        schema = None if self.tool_choice.forced else self.response_format.reply_schema
        if schema is None and not self.tool_choice.forced:
            return ""
        several = self.parallel_tool_calls and not self.tool_choice.one
        return calls_and_json(schema, self.callable_tools, tool_format=self.tool_format, several=several)

    @functools.cached_property
    def samplings(self) -> list[Sampling]:
        """Sampling parameters of each choice; the choices of a seeded request have different seeds."""
        grammar = self.grammar
        return [
            Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                max_tokens=self.max_completion_tokens or self.max_tokens,
                stop=tuple(self.stop_strings),
                stop_token_ids=tuple(self.stop_token_ids),
                grammar=grammar,
                seed=derive_seed(self.seed, choice) if self.seed is not None and choice else self.seed,
                session=self.session,
            )
            for choice in range(self.n)
        ]


def parse_request(body: Any, *, served: str, tool_format: str = "hermes", session: str = "") -> ChatRequest:
    """Check ``body``, the decoded JSON of a request for the model ``served``.

    A field that is not applied is refused, or a warning names it once. Raises :class:`ChatRequestError`, which names
    the field, its value, and the values that it may have.
    """
    if not isinstance(body, dict):
        raise ChatRequestError(f"the body must be a JSON object, not {reprlib.repr(body)}")
    try:
        request = ChatRequest.model_validate({**body, "session": session, "tool_format": tool_format})
    except ValidationError as error:
        raise _first_error(error) from error
    if request.model not in (None, served):
        message = f"the model {shorten_repr(request.model)} does not exist; this server has {served!r}"
        raise ChatRequestError(message, param="model", status=404, code="model_not_found")
    _check_other_fields(request.model_extra or {})
    if request.top_logprobs:
        _warn_once("top_logprobs", "requests have top_logprobs, which stays empty: only sampled tokens have logprobs")
    if request.grammar or request.tool_choice.forced:
        _check_constraint(request)
    elif any(tool["function"].get("strict") for tool in request.offered_tools):
        _warn_once(
            "strict",
            "requests have tools with strict = true, which the policy server does not apply unless tool_choice "
            "requires a call: the policy learns to write valid arguments",
        )
    return request


def _check_constraint(request: ChatRequest) -> None:
    tools = [tool["function"]["name"] for tool in request.tools]
    if request.tool_choice.forced and not request.callable_tools:
        named = " or ".join(map(repr, request.tool_choice.names or ()))
        message = f"tool_choice requires a call{named and f' of {named}'}, but the request has "
        message += f"only the tools {', '.join(map(repr, tools))}" if tools else "no tools"
        raise ChatRequestError(message, param="tool_choice")
    schemas = {"response_format.json_schema.schema": request.response_format.reply_schema}
    schemas |= {
        f"tools[{index}].function.parameters": tool["function"].get("parameters")
        for index, tool in enumerate(request.offered_tools)
    }
    for param, schema in schemas.items():
        if schema is not None:
            for warning in check_schema(schema, param):
                _warn_once(f"{param}: {warning}", f"{param} has what is not enforced on replies: {warning}")


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


def _check_other_fields(fields: Mapping[str, Any]) -> None:
    """Check the fields that :class:`ChatRequest` does not have. Raises :class:`ChatRequestError` for a refused one."""
    for name, value in fields.items():
        if name in NO_EFFECT or value in (False, [], {}) or value in _NEUTRAL.get(name, ()):
            continue
        if name in REFUSED:
            raise ChatRequestError(f"{name} is not supported: {REFUSED[name]}", param=name)
        _warn_once(name, f"requests have {name} = {shorten_repr(value)}, which the policy server does not apply")


def _warn_once(name: str, message: str) -> None:
    if name not in _warned and len(_warned) < 100:  # agents choose the names
        _warned.add(name)
        _log.warning("%s", message)
