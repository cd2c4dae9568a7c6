"""From what an agent returns to the answer that is judged, never a dump of all that it returned; and its steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from groundwire.adapters._types import AgentSetupError
from groundwire.adapters.tracing.wire.call import WireCall
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.tools.types import AgentResult, AgentStep, AnswerKind, Candidate

ASK = "name a function that returns the answer from the result: --agent-output module:name"
_FINAL = ("final_output", "structured_response", "output_text")
_USUAL = ("answer", "final_answer", "generation", "response", "result", "output", "report", "final_report")
_TEXTS = ("text", "content", "raw", "message", "choices")  # of messages, and of the results of other frameworks
_WAITING = ("__interrupt__", "interruptions", "interrupts", "user_input_requests", "is_paused")
"""What says that an agent waits for a person: of LangGraph, the Agents SDK, Strands, Agent Framework, Agno."""
_SHOWN = 300  # characters of a result in a message
_MISSING = object()
_MAX_CALLS = 1000


def check_done(result: Any) -> None:
    """Raise :class:`adapters.AgentSetupError` if the agent has stopped to wait for a person."""
    for name in _WAITING:
        if (waits := _read(result, name)) and not callable(waits):
            raise AgentSetupError(
                f"the agent was interrupted to ask a person ({name}: {waits!r:.{_SHOWN}}), and nobody answers in a "
                "rollout: give an agent without interrupts and approvals, or a function that runs it and answers them"
            )


def judged_answer(
    result: Any, answers: AnswerKind, steps: Sequence[AgentStep], agent_input: Mapping[str, Any]
) -> Candidate:
    """The text to be judged in an agent's result, and the name of the field that holds it.

    It is a framework's final output, else the last message, else the first of the usual fields. What is as in
    ``agent_input`` is no answer. The kind of ``answers`` may know better (an answer in SQL is a query).
    Raises :class:`adapters.AgentSetupError` if no field is known to be the answer.
    """
    candidates = [Candidate(*pair) for pair in _candidates(result, answers, "what it returned", agent_input)]
    if (answer := answers.read(AgentResult(candidates, steps))) is not None:
        return answer
    names = _names(result)
    what = f"the fields {', '.join(names)}" if names else f"a {type(result).__name__}"
    raise AgentSetupError(f"the agent returned {what}, and which of it is the answer is not known: {ASK}")


def own_steps(result: Any) -> list[AgentStep]:
    """The steps that an agent returns itself, as a field ``steps`` of its result; empty if it has none like these."""
    steps, known = _read(result, "steps"), AgentStep.__annotations__.keys()
    is_own = isinstance(steps, list) and all(isinstance(step, Mapping) and step.keys() >= known for step in steps)
    return [*steps] if is_own else []


class ToolCalls:
    """The tool calls of one attempt, in the order in which its requests first show them: each request repeats the
    conversation so far.
    """

    def __init__(self) -> None:
        self._calls: dict[str, tuple[str, Any]] = {}
        self._results: dict[str, str] = {}

    def add(self, api: type[WireCall], request: Mapping[str, Any]) -> None:
        """Read the tool calls and their results in a request to ``api``."""
        for message in _messages(api, request):
            for call in _objects(message.get("tool_calls")):
                if len(self._calls) < _MAX_CALLS and isinstance(function := call.get("function"), Mapping):
                    named = str(function.get("name")), _parsed(function.get("arguments"))
                    self._calls.setdefault(str(call.get("id")), named)
            if message.get("role") == "tool" and len(self._results) < _MAX_CALLS:
                self._results.setdefault(str(message.get("tool_call_id")), _to_text(message.get("content")))

    def steps(self) -> list[AgentStep]:
        """The tool calls as steps: the input is the query if there is one, else the arguments."""
        return [
            AgentStep(
                agent=name,
                kind="tool",
                input=_query_argument(arguments) or _to_text(arguments),
                output=self._results.get(call_id, ""),
                ok=call_id in self._results,
            )
            for call_id, (name, arguments) in self._calls.items()
        ]


def lacks_answer(kind: Any, answers: AnswerKind) -> list[str]:
    """The fields of a class of results if none of them is known to be the answer; else empty."""
    names = field_names(kind)
    return names if len(names) > 1 and set(names).isdisjoint(_known_fields(answers)) else []


def _known_fields(answers: AnswerKind) -> tuple[str, ...]:
    """The fields that may be the answer, the likeliest first."""
    return (*_FINAL, "messages", *_USUAL, *answers.fields, *_TEXTS)


def field_names(kind: Any) -> list[str]:
    """The fields of a typed dict, a dataclass, a named tuple or a pydantic model; empty for any other class."""
    if not any(hasattr(kind, name) for name in ("__total__", "__dataclass_fields__", "_fields", "model_fields")):
        return []
    bases = reversed(getattr(kind, "__mro__", (kind,)))
    names = {name: None for base in bases for name in getattr(base, "__annotations__", {}) if name[0] != "_"}
    return [name for name in names if not name.startswith("model_")]


def _candidates(
    value: Any, answers: AnswerKind, field: str, agent_input: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[str, str]]:
    """The texts in ``value`` that may be its answer, the likeliest first, each with its field."""
    if (text := _plain(value)) is not None:
        yield text, field
    elif isinstance(value, Sequence | Set) and not hasattr(value, "_fields"):
        items = [{"role": item[0], "content": item[1]} if _is_pair(item) else item for item in value]
        messages = [item for item in items if _is_message(item)]
        if messages:
            last = messages[-1]
            may_be_input = _read(last, "role") in ("user", None) and _read(last, "type") in ("human", None)
            for text, _ in _candidates(last, answers, ""):
                if not may_be_input or text not in _input_texts(agent_input):
                    yield text, "the last message"
        elif (text := _joined(list(value))) is not None:
            yield text, field
    else:
        yield from _of_fields(value, answers, field, agent_input)


def _of_fields(
    value: Any, answers: AnswerKind, field: str, agent_input: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    names, known, has_text = _names(value), _known_fields(answers), False
    for name in known if len(names) != 1 else names:
        content = _read(value, name, _MISSING)
        is_structure = _plain(content) is None
        if (
            content is _MISSING
            or (callable(content) and is_structure)
            or _is_same(content, agent_input.get(name, _MISSING))
        ):
            continue
        if name not in known and isinstance(content, Sequence | Set) and is_structure:
            continue  # the one field of a result, which may be its documents
        content = content[0] if name == "choices" and content else content
        texts = list(_candidates(content, answers, name, agent_input if name == "messages" else {}))
        if not texts and name in _USUAL:
            texts = [(json.dumps(content, ensure_ascii=False, default=_jsonable), name)]
        has_text = has_text or bool(texts)
        yield from texts
    if not has_text and not names and type(value).__str__ is not object.__str__:
        yield str(value), field


def _plain(value: Any) -> str | None:
    """The text of a scalar; None for anything else."""
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    return str(value) if isinstance(value, str | int | float) else None


def _joined(items: Sequence[Any]) -> str | None:
    """The text of a list: of the parts of a message, of scalars, of rows; None if it has anything else."""
    texts = [_plain(item) for item in items]
    if None not in texts:
        return "\n".join(map(str, texts))
    if all(isinstance(item, list | tuple) for item in items):
        return json.dumps(items, ensure_ascii=False, default=str)
    items = [item for item in items if _read(item, "type") not in ("reasoning", "thinking", "redacted_thinking")]
    texts = [item if isinstance(item, str) else _read(item, "text") for item in items]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _is_message(value: Any) -> bool:
    return _plain(value) is None and bool(_read(value, "role") or _read(value, "content", _MISSING) is not _MISSING)


def _is_pair(value: Any) -> bool:
    """Whether it is a message as LangChain takes it: ``("user", "Hello")``."""
    roles = ("user", "human", "assistant", "ai", "system", "tool")
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] in roles


def _input_texts(agent_input: Mapping[str, Any]) -> set[str]:
    messages = [_read(message, "content") for message in agent_input.get("messages") or ()]
    return {text for text in (*agent_input.values(), *messages) if isinstance(text, str)}


def _read(value: Any, name: str, default: Any = None) -> Any:
    try:
        return value.get(name, default) if isinstance(value, Mapping) else getattr(value, name, default)
    except Exception:  # a property of a foreign class
        return default


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, Mapping) else field_names(type(value))


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other)
    except Exception:  # arrays
        return False


def _jsonable(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else getattr(value, "__dict__", str(value))


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _messages(api: type[WireCall], request: Mapping[str, Any]) -> list[Any]:
    """The chat messages of a request; none if the proxy refuses it."""
    try:
        return _objects(api.messages(request))
    except RefusedError:
        return []


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _query_argument(arguments: Any) -> str:
    from groundwire.tools.sql.answers import is_query  # here, as many commands do without SQL

    values = arguments.values() if isinstance(arguments, Mapping) else [arguments]
    return next((value for value in values if isinstance(value, str) and is_query(value)), "")


def _to_text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(block, Mapping) and "text" in block for block in value):
        return "".join(str(block["text"]) for block in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
