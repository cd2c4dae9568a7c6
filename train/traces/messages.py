"""Messages, replies and tools of any tracer or API as those of chat completions.

Read are OpenAI's chat and Responses, Anthropic, Google, OpenTelemetry's GenAI conventions, OpenInference, LangChain and
the AI SDK. What has no place in a chat message is named in ``unread``, so that no call is learned with a part missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.chat_request import Part, assistant_message, call_part, chat_content
from groundwire.tools.files import parse_json
from groundwire.train.traces.streams import whole_reply

Message = dict[str, Any]
_ROLES = {
    "human": "user", "HumanMessage": "user", "HumanMessageChunk": "user", "ai": "assistant", "AIMessage": "assistant",
    "AIMessageChunk": "assistant", "model": "assistant", "SystemMessage": "system", "developer": "system",
    "ToolMessage": "tool", "function": "tool", "FunctionMessage": "tool", "choice": "assistant",
    "function_call": "assistant", "custom_tool_call": "assistant", "reasoning": "assistant",
    "function_call_output": "tool", "custom_tool_call_output": "tool",
}  # fmt: skip
_TEXT = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking", "reasoning_text", "summary_text")
_CALLS = ("tool_use", "tool_call", "tool-call", "function_call", "custom_tool_call")
_RESULTS = (
    "tool_result", "tool_call_response", "tool-result", "function_call_output", "custom_tool_call_output",
)  # fmt: skip
_CALL_IDS = ("call_id", "tool_use_id", "toolCallId", "toolUseId", "tool_call_id")
_ARGUMENTS, _OUTPUTS = ("arguments", "input", "args"), ("response", "result", "output", "content")
_ROLE_LINE = re.compile(r"^(system|developer|user|human|assistant|tool): ", re.MULTILINE)
_DAMAGED = re.compile(r'\s*\[?\s*\{\s*"(role|messages|parts|choices|generations|lc)"')
_FINISH = ("finish_reason", "finishReason", "stop_reason", "stopReason", "done_reason")
_WITH_FINISH = ("choices", "candidates", "generations", "generation_info", "message", "kwargs", "response_metadata")
_IMAGES = ("image_url", "input_image", "image", "uri", "blob", "file")


def value_of(text: Any) -> Any:
    """The value of a JSON text that is an object or a list; anything else as it is."""
    if isinstance(text, str) and text.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def first(holder: Mapping[str, Any], *names: str) -> Any:
    """The first field of ``names`` that is set and not empty; None if none is."""
    return next((holder[name] for name in names if holder.get(name) not in (None, "", [], {})), None)


def count_of(value: Any) -> int:
    """A number of tokens; 0 for what is none."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    return int(number) if isinstance(number, int | float) and 0 < number < _MAX_TOKENS else 0


def text_of(value: Any) -> str:
    """``value`` as text: anything but text as JSON; nothing for None."""
    return value if isinstance(value, str) else "" if value is None else to_json(value)


def read_messages(value: Any, unread: list[str]) -> list[Message]:
    """The chat messages of a request, a list of messages, one of them, or the text of a user's."""
    value = value_of(value)
    if isinstance(value, Mapping):
        system = value.get("system") or value.get("instructions") or value.get("system_instruction")
        inner = first(value, "messages", "input", "contents", "prompt")
        if inner is None:
            return list(_joined(value, unread)) if _role(value) else []
        return [*system_messages(system, unread), *read_messages(inner, unread)]
    if isinstance(value, str):
        return _written(value, unread)
    messages: list[Message] = []
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, str) for item in value):
        unread.append("messages without roles")
    for item in value if isinstance(value, list | tuple) else ():
        if item is None:
            unread.append("messages that are missing")
            continue
        if isinstance(item, list):  # LangChain's batches
            messages += read_messages(item, unread)
            continue
        for message in _joined(item if isinstance(item, Mapping) else {"role": "user", "content": item}, unread):
            if messages and _goes_on(messages[-1], message, item):
                messages[-1] = _merged(messages[-1], message)
            else:
                messages.append(message)
    return messages


def _written(text: str, unread: list[str]) -> list[Message]:
    """The messages of a request that is a text: the user's, or, as some tracers write it, all with their roles."""
    if not _ROLE_LINE.match(text):
        unread += ["requests that are damaged JSON"] if _DAMAGED.match(text) else []
        return [{"role": "user", "content": text}] if text else []
    unread.append("requests that their tracer wrote as one text")
    _, *pieces = _ROLE_LINE.split(text)
    return [
        {"role": _ROLES.get(role, role), "content": content.strip()}
        for role, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def system_messages(value: Any, unread: list[str]) -> list[Message]:
    """The system message of a field of its own: text, or parts; none if it is empty."""
    value = value_of(value)
    if isinstance(value, Mapping):
        value = value.get("parts") or value.get("content") or [value]
    return [{"role": "system", "content": chat_content(list(_parts(value, unread)))}] if value else []


def read_reply(value: Any, unread: list[str]) -> Message:
    """The assistant's message of a response of any API, of a list of messages, or of a text; empty if there is none."""
    value = whole_reply(value_of(value), unread)
    if isinstance(value, str):
        unread += ["replies that are damaged JSON"] if _DAMAGED.match(value) else []
        return {"role": "assistant", "content": value} if value else {}
    if isinstance(value, Mapping):
        for name in ("choices", "candidates", "generations", "output", "messages", "message", "content"):
            inner = value_of(value.get(name))
            if inner and not (name == "content" and _role(value)) and name in value:
                several = isinstance(inner, list) and name in ("choices", "candidates", "generations")
                inner = inner[:1] if several else inner
                return read_reply(inner, unread)
        value = [value]
    replies: list[Message] = []
    for item in value if isinstance(value, list | tuple) else ():
        if isinstance(item, list):
            return read_reply(item, unread)
        if isinstance(item, Mapping) and not _role(item) and (inner := item.get("message") or item.get("content")):
            return read_reply(inner, unread)
        message = item if isinstance(item, Mapping) else {"content": item}
        role = {} if _role(message) else {"role": "assistant"}
        replies += [reply for reply in _joined({**message, **role}, unread) if reply["role"] == "assistant"]
    if not replies:
        return {}
    first, *others = replies
    for other in others:
        first = _merged(first, other)
    return first if any(value for name, value in first.items() if name != "role") else {}


def finish_of(value: Any) -> str:
    """Why a response of any API ended, as it says itself; empty if it does not."""
    value = value_of(value)
    if isinstance(value, list):
        return finish_of(value[0]) if value else ""
    if not isinstance(value, Mapping):
        return ""
    said = next((value[name] for name in _FINISH if isinstance(value.get(name), str)), "")
    said = said or ("incomplete" if value.get("status") == "incomplete" else "")
    return said or next(filter(None, (finish_of(value[name]) for name in _WITH_FINISH if name in value)), "")


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Tool definitions as those of chat completions."""
    value = value_of(value)
    functions = []
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        tool = value_of(item)
        for name in ("tool", "json_schema", "toolSpec", "function"):
            tool = value_of(tool.get(name, tool)) if isinstance(tool, Mapping) else tool
        if not isinstance(tool, Mapping):
            continue
        if inner := tool.get("functionDeclarations") or tool.get("function_declarations"):
            functions += read_tools(inner)
        elif tool.get("name"):
            function = {  # in the order of the request, as chat templates write them
                "parameters" if key in _SCHEMAS else key: value_of(item) if key in _SCHEMAS else item
                for key, item in tool.items()
                if key in (*_SCHEMAS, "name", "description", "strict") and item is not None
            }
            functions.append({"type": "function", "function": function})
    return functions


_MAX_TOKENS = 1 << 31
_SCHEMAS = (
    "parameters", "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema", "args_schema",
)  # fmt: skip


def _role(message: Mapping[str, Any]) -> str:
    """The role of a message of chat completions; empty if it has none."""
    if message.get("lc") and isinstance(kind := message.get("id"), list):
        return _ROLES.get(str(kind[-1]), "")
    inner = message.get("message")
    role = message.get("role") or (inner.get("role") if isinstance(inner, Mapping) else None)
    if role is None and (kind := message.get("type")) in (*_ROLES, "system", "tool", "message"):
        role = kind
    return _ROLES.get(str(role), str(role or ""))


def _joined(message: Mapping[str, Any], unread: list[str]) -> Iterator[Message]:
    """The chat messages of a message: each tool result is one of its own."""
    role = _role(message)
    for name in ("kwargs", "data", "message"):  # LangChain, OpenInference
        inner = message.get(name)
        message = {**message, **inner} if isinstance(inner, Mapping) else message
    unread += [] if role in ("", "system", "user", "assistant", "tool") else ["messages with a role of their own"]
    parts = list(_parts_of(message, role, unread))
    results = [part for part in parts if part.kind == "result"]
    others = [part for part in parts if part.kind != "result"]
    for part in results:
        yield {"role": "tool", "tool_call_id": part.id, "content": part.content}
    if role == "assistant":
        yield assistant_message(others)
    elif others or not results:
        named = {"tool_call_id": first(message, "tool_call_id", "id", "call_id")} if role == "tool" else {}
        yield {"role": role or "user", **named, "content": chat_content(others) if others else ""}


def _parts_of(message: Mapping[str, Any], role: str, unread: list[str]) -> Iterator[Part]:
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(thought := message.get(name), str) and thought:
            yield Part("thinking", thought)
            break
    is_text = message.get("type") in _TEXT and isinstance(message.get("text"), str)
    if is_text or message.get("type") in (*_CALLS, *_RESULTS, *_THOUGHTS) or "toolName" in message:
        yield from _parts([message], unread)
        return
    content = first(message, "content", "contents", "parts")
    if role == "tool" and isinstance(content, Mapping):
        content = result_text(content)
    yield from _parts(content, unread)
    extra = message.get("additional_kwargs")
    calls = message.get("tool_calls") or (extra.get("tool_calls") if isinstance(extra, Mapping) else None) or ()
    legacy = message.get("function_call")
    known = content if isinstance(content, list) else ()
    ids = {part.get("id") for part in known if isinstance(part, Mapping)}
    for item in (*value_of(calls), *([{"function": legacy}] if isinstance(legacy, Mapping) else ())):
        call = item.get("tool_call", item)
        function = call.get("function") or call
        name, arguments = function.get("name"), function.get("arguments", function.get("args", function.get("input")))
        if call.get("id") is None or call.get("id") not in ids:  # LangChain repeats the blocks of Anthropic
            yield call_part(call.get("id") or call.get("call_id"), name, arguments)


def _parts(content: Any, unread: list[str]) -> Iterator[Part]:
    if not isinstance(content, list | tuple):
        content = [content if isinstance(content, str | Mapping) else text_of(content)]
    for item in content:
        if item in (None, ""):
            continue
        if isinstance(item, str):
            yield Part("text", item)
        elif not isinstance(item, Mapping):
            unread.append(f"message parts that are {type(item).__name__}")
        else:
            part = item.get("message_content", item)
            yield from _part(part if isinstance(part, Mapping) else item, unread)


def _part(part: Mapping[str, Any], unread: list[str]) -> Iterator[Part]:
    kind = part.get("type")
    call = part.get("functionCall") or part.get("function_call") or part.get("toolUse")
    result = part.get("functionResponse") or part.get("function_response") or part.get("toolResult")
    if kind in _THOUGHTS or part.get("thought") is True:
        text = first(part, "text", "thinking", "content", "summary") or ""
        yield Part("thinking", text if isinstance(text, str) else "".join(part.text for part in _parts(text, unread)))
    elif kind in _CALLS or call or (kind is None and "toolName" in part):
        function = call if isinstance(call, Mapping) else part.get("function") or part
        call_id = first({**part, **function}, *_CALL_IDS, "id")
        arguments = next((function[name] for name in _ARGUMENTS if function.get(name) is not None), None)
        yield call_part(call_id, function.get("name") or part.get("toolName"), arguments)
    elif kind in _RESULTS or result:
        place = {**part, **result} if isinstance(result, Mapping) else part
        value = next((place[name] for name in _OUTPUTS if place.get(name) is not None), "")
        yield Part("result", id=first(place, *_CALL_IDS, "id"), content=result_text(value))
    elif kind in _TEXT or (kind is None and isinstance(part.get("text"), str)):
        yield Part("text", text_of(first(part, "text", "content", "refusal")))
    elif kind in _IMAGES and (url := _image(part)):
        yield Part("image", url)
    else:
        unread.append(f"message parts of type {kind!s:.40}")


def _image(part: Mapping[str, Any]) -> str:
    """The URL of an image; empty if it is none."""
    source = part.get("image_url") or part.get("image") or part.get("source") or part
    if isinstance(source, str):
        return source
    source = source.get("image", source) if isinstance(source, Mapping) else {}
    if url := source.get("url") or source.get("uri"):
        return str(url)
    kind = str(source.get("media_type") or source.get("mime_type") or source.get("mediaType") or "")
    data = source.get("data") or source.get("content")
    return f"data:{kind};base64,{data}" if data and kind.startswith("image/") else ""


def result_text(value: Any) -> str:
    """A tool's result as text: texts of its parts, else JSON."""
    value = value_of(value) if isinstance(value, list) else value
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXT else None for part in parts]
    if isinstance(value, Mapping) and value.get("type") in ("text", "json", "error-text") and "value" in value:
        return text_of(value["value"])
    return "\n".join(map(str, texts)) if texts and None not in texts else text_of(value)


def _goes_on(last: Message, message: Message, item: Any) -> bool:
    """Whether ``message`` is a further item of the reply ``last``, as in OpenAI's Responses."""
    kinds = (*_CALLS, *_THOUGHTS)
    is_item = isinstance(item, Mapping) and (item.get("type") in (*kinds, "message"))
    return (
        is_item
        and last["role"] == message["role"] == "assistant"
        and not (last.get("tool_calls") and message.get("content"))
    )


def _merged(first: Message, second: Message) -> Message:
    """Two parts of one reply as one message."""
    merged = {**first, **{key: value for key, value in second.items() if value}}
    texts = [text for text in (first.get("content"), second.get("content")) if text]
    merged["content"] = "".join(texts) if texts else None
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged
