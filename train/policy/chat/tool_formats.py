"""The formats in which models write tool calls, by the names that vLLM and verl use.

- ``hermes``: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Qwen 2.5 and 3, and the starter)
- ``qwen3_xml``, also ``qwen3_coder``: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>…``
- ``llama3_json``: the reply is ``{"name": …, "parameters": {…}}``, or several of them separated by semicolons
- ``deepseek_v3`` (also R1), ``deepseek_v31``: name and arguments between special tokens
- ``mistral``: ``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` for each call

The content of a reply is all text outside of its calls, without the blanks at its end if there are calls: templates
write these. A policy in training writes malformed calls. They stay in the content, where the agent and the trainer can
see them, and are never an error of the server. What is between ``<think>`` and ``</think>`` is never a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

THINK, END_THINK = "<think>", "</think>"

Parsed = tuple[str | None, list[dict[str, Any]]]
_Read = tuple[list[dict[str, Any]], int] | None
_BLANKS = re.compile(r"\s*")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_LLAMA_TAG = "<|python_tag|>"
_HERMES_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
_FUNCTION_END = re.compile(r"</function>\s*(?:</tool_call>|(?=<tool_call>|<function=)|\Z)")
_DEEPSEEK = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
    r"(?:function<｜tool▁sep｜>(?P<v3>[^\n<]+)\n```json\n|(?P<v31>[^\n<]+)<｜tool▁sep｜>)"
)
_DEEPSEEK_END = re.compile(r"(?:\s*```)?\s*(?:<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|\Z)")
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?:([^\[\]{}\s]+)\s*(?:\[CALL_ID\]([^\[\]{}\s]*)\s*)?(?:\[ARGS\])?)?")


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written. ``openings`` begin one; ``read`` reads it there."""

    name: str
    openings: tuple[str, ...]
    read: Callable[[str, int, Collection[str]], _Read]
    """From (text, place of an opening, names): the calls and where they end, or None."""
    special: tuple[str, ...] = ()
    """Its parts that are special tokens of the tokenizer."""
    written: tuple[str, ...] = ()
    """What a chat template has that writes it; by default the first opening."""
    id_form: tuple[str, int] = ("call_", 24)
    """The beginning of a call's id, and the number of characters after it."""

    def parse(self, text: str, names: Collection[str], *, ended: bool = True) -> Parsed:
        """Split ``text`` into its content, None if it has only calls, and its calls in the OpenAI API's form, with the
        ids that the model wrote.

        A call with complete JSON needs no closing tag at the end of the text. Arguments that are missing or null are
        an empty object; arguments that are text are the object in it. A call with malformed JSON, a name that is not
        one of ``names``, or other arguments stays in the content. If ``names`` maps to JSON schemas, they say the
        types of parameters that are written as text. If the text has not ``ended``, the result is what no later text
        can change.
        """
        marks, content, calls = (THINK, *self.openings), list[str](), list[dict[str, Any]]()
        kept, at, held = 0, 0, 0 if ended else max(map(len, marks)) - 1
        while places := [(place, mark) for mark in marks if (place := text.find(mark, at)) >= 0]:
            start, mark = min(places)
            at = start + len(mark)
            if mark == THINK:
                end = text.find(END_THINK, at)
                at = len(text) if end < 0 else end
            elif (read := self._read(text, start, names)) is not None:
                calls += read[0]
                content.append(text[kept:start])
                kept = at = read[1]
            elif not ended:
                text, held = text[:start], 0
        said = "".join((*content, text[kept : max(kept, len(text) - held)]))
        return (said.rstrip() or None if calls or not ended else said), calls

    def _read(self, text: str, start: int, names: Collection[str]) -> _Read:
        try:
            return self.read(text, start, names)
        except (ValueError, RecursionError):  # what is there is no JSON
            return None


def written_format(template: str) -> str | None:
    """The format in which a chat template writes calls; None if it is none of :data:`FORMATS`."""
    return next((f.name for f in FORMATS.values() if all(t in template for t in f.written or f.openings[:1])), None)


def _read_hermes(text: str, start: int, names: Collection[str]) -> _Read:
    value, end = _json(text, start + len("<tool_call>"))
    return _one(_openai_call(value, names), _HERMES_END.match(text, end))


def _read_qwen3(text: str, start: int, names: Collection[str]) -> _Read:
    function = _FUNCTION.match(text, start)
    if function is None or function[1] not in names:
        return None
    schema = names[function[1]] if isinstance(names, Mapping) else None
    schemas = schema.get("properties") if isinstance(schema, dict) else None
    arguments, at = {}, function.end()
    while parameter := _PARAMETER.match(text, at):
        key, value = parameter.groups()
        arguments[key] = _typed(value, schemas.get(key) if isinstance(schemas, dict) else None)
        at = parameter.end()
    call = _openai_call({"name": function[1], "arguments": arguments}, names)
    return _one(call, _FUNCTION_END.match(text, at))


def _typed(text: str, schema: Any) -> Any:
    """A parameter's text as a value of its schema; text if the schema allows text, or the text is no such value."""
    options = [schema, *(schema.get("anyOf") or schema.get("oneOf") or ())] if isinstance(schema, dict) else []
    named = [option.get("type") for option in options if isinstance(option, dict)]
    types = {kind for value in named for kind in (value if isinstance(value, list) else [value])} - {None}
    if "null" in types and text in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    try:
        return json.loads({"True": "true", "False": "false"}.get(text, text))  # as templates write Python's values
    except (ValueError, RecursionError):
        return text


def _read_llama(text: str, start: int, names: Collection[str]) -> _Read:
    """The whole reply is calls, or it is content."""
    calls, at = list[dict[str, Any]](), start + len(_LLAMA_TAG) * text.startswith(_LLAMA_TAG, start)
    rest = text[at:].strip()
    if text[:start].strip() or not rest:
        return None
    while rest:
        value, end = _json(rest, 0)
        call = _openai_call(value, names)
        if call is None:
            return None
        calls.append(call)
        rest = rest[end:].lstrip(" \n;")
    return calls, len(text)


def _read_deepseek(text: str, start: int, names: Collection[str]) -> _Read:
    head = _DEEPSEEK.match(text, start)
    if head is None:
        return None
    value, end = _json(text, head.end())
    call = _openai_call({"name": head["v3"] or head["v31"], "arguments": value}, names)
    return _one(call, _DEEPSEEK_END.match(text, end))


def _read_mistral(text: str, start: int, names: Collection[str]) -> _Read:
    head = _MISTRAL.match(text, start)
    assert head is not None  # the opening is there
    value, end = _json(text, head.end())
    written = [{"name": head[1], "id": head[2], "arguments": value}] if head[1] else value
    calls = []
    for item in written if isinstance(written, list) else [written]:
        call = _openai_call(item, names)
        if call is None:
            return None
        own = item.get("id")
        calls.append({"id": own, **call} if isinstance(own, str) and _ID.fullmatch(own) else call)
    return (calls, end) if calls else None


def _json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that follows blanks, and where it ends. Raises ValueError, RecursionError."""
    blanks = _BLANKS.match(text, at)
    return json.JSONDecoder().raw_decode(text, blanks.end() if blanks else at)


def _one(call: dict[str, Any] | None, end: re.Match[str] | None) -> _Read:
    return None if call is None or end is None else ([call], end.end())


def _openai_call(value: Any, names: Collection[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # a model may write the object as text, as it is in the OpenAI API
        arguments = json.loads(arguments or "null")
    if not isinstance(arguments, dict | None):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
    return {"type": "function", "function": function}


_DEEPSEEK_TOKENS = tuple(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
_QWEN3 = ("<tool_call>", "<function="), _read_qwen3, ("<tool_call>", "</tool_call>")
_MISTRALS = ("[TOOL_CALLS]",), _read_mistral, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_V3 = _DEEPSEEK_TOKENS[:2], _read_deepseek, _DEEPSEEK_TOKENS
FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat(
            "hermes", ("<tool_call>",), _read_hermes, ("<tool_call>", "</tool_call>"), ("<tool_call>", '"arguments"')
        ),
        ToolFormat("qwen3_xml", *_QWEN3, written=("<tool_call>", "<function=")),
        ToolFormat("qwen3_coder", *_QWEN3, written=("<tool_call>", "<function=")),
        ToolFormat("deepseek_v3", *_V3, written=("<｜tool▁call▁begin｜>", "```json")),
        ToolFormat("deepseek_v31", *_V3, written=("<｜tool▁call▁begin｜>",)),
        # Mistral's templates refuse other ids.
        ToolFormat("mistral", *_MISTRALS, id_form=("", 9)),
        ToolFormat("llama3_json", ("{", _LLAMA_TAG), _read_llama, written=('{"name": ', '"parameters": ')),
    )
}
"""By name; a chat template writes the first one whose ``written`` it has."""
