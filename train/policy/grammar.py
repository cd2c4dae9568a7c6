"""Grammars: what a constrained reply must be.

A grammar is JSON text, so that a span can hold it and a trainer can rebuild the constraint from it::

    {"schema": {…}}                                             JSON that matches a schema
    {"calls": {"format": "hermes", "tools": [{"name": …, "parameters": {…}}], "several": true}}
                                                                calls of these tools, in the model's format

With both, the reply is one or the other. JSON is written as ``json.dumps`` writes it, with one space after commas and
colons: templates render tool calls in the same way, so the next prompt repeats the sampled tokens, and a policy cannot
write spaces without end.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from groundwire.adapters.tracing.calls import to_json
from groundwire.train.policy.errors import ChatRequestError

ANY_OBJECT = {"type": "object"}
"""The schema of any JSON object."""

_CALL_TEXT = {
    "hermes": ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": ('{"name": ', ', "parameters": ', "}", "; "),
}
"""Of each format: the text before a call's name, before its arguments, after them, and between two calls."""
# Text that only one reply can have may still be written with any tokens that spell it.
_OPTIONS = '%llguidance {"no_forcing": true}'
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_POSITION = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?|\n *\d+ \|.*", re.DOTALL)


def calls_and_json(
    schema: Any = None, tools: Sequence[Mapping[str, Any]] = (), *, tool_format: str = "hermes", several: bool = True
) -> str:
    """The grammar of replies that are JSON of ``schema``, or calls of ``tools`` (OpenAI's definitions); "" for neither.

    ``several`` allows more than one call. Raises :class:`ChatRequestError` for a format that has no grammar.
    """
    if tools and tool_format not in _CALL_TEXT:
        raise ChatRequestError(
            f"calls in the format {tool_format} cannot be constrained, only those in {' or '.join(_CALL_TEXT)}: use "
            "tool_choice 'auto', and no response_format together with tools",
            param="tool_choice",
        )
    grammar: dict[str, Any] = {}
    if schema is not None:
        grammar["schema"] = schema
    if tools:
        functions = [
            {"name": tool["function"]["name"], "parameters": tool["function"].get("parameters") or ANY_OBJECT}
            for tool in tools
        ]
        grammar["calls"] = {"format": tool_format, "tools": functions, "several": several}
    return to_json(grammar) if grammar else ""


def to_lark(grammar: str) -> str:
    """The grammar in llguidance's dialect of Lark, which vLLM accepts, too."""
    wanted = json.loads(grammar)
    rules, starts = [], []
    if "schema" in wanted:
        starts.append("reply")
        rules.append(f"reply: {_json_rule(wanted['schema'])}")
    if "calls" in wanted:
        calls = wanted["calls"]
        before, between, after, separator = _CALL_TEXT[calls["format"]]
        starts.append(f"call ({json.dumps(separator)} call)*" if calls["several"] else "call")
        names = [f"call_{index}" for index in range(len(calls["tools"]))]
        rules.append(f"call: {' | '.join(names)}")
        for name, tool in zip(names, calls["tools"], strict=True):
            opening = before + json.dumps(tool["name"], ensure_ascii=False) + between
            rules.append(f"{name}: {json.dumps(opening)} {_json_rule(tool['parameters'])} {json.dumps(after)}")
    return "\n".join([_OPTIONS, f"start: {' | '.join(starts)}", *rules]) + "\n"


def check_schema(schema: Any, param: str) -> tuple[str, ...]:
    """Keywords of a JSON schema that are not enforced, as llguidance describes them.

    Raises :class:`ChatRequestError`, naming ``param``, if no reply can be constrained to the schema.
    """
    problems, warnings = _compile_schema(json.dumps(schema))
    if problems:
        raise ChatRequestError(f"{param} cannot be used as a JSON schema: {problems}", param=param)
    return warnings


@functools.lru_cache(maxsize=256)
def _compile_schema(schema: str) -> tuple[str, tuple[str, ...]]:
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(f"start: {_json_rule(json.loads(schema))}")
    if is_error:
        return " ".join(_POSITION.sub("", messages[0]).split())[:500], ()
    if '"$ref"' in schema and not _has_end(json.loads(schema)):
        return "it refers to itself without end, so no reply fulfils it", ()
    return "", tuple(messages)


def _has_end(schema: Any) -> bool:
    """Whether some finite value fulfils a JSON schema, as far as its references say."""
    needs, waiting = dict[int, list[list[Any]]](), [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            needs[id(each)] = _needed(each, schema)
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    order, before = [*needs], 0
    while len(order) != before:  # what has all that it needs is taken out
        before = len(order)
        for part in order:
            if all(any(id(each) not in needs for each in options) for options in needs[part]):
                del needs[part]
        order = [part for part in reversed(order) if part in needs]
    return id(schema) not in needs


def _needed(part: Mapping[str, Any], whole: Any) -> list[list[Any]]:
    """What a value of this part of a schema needs: one of each of these schemas."""

    def listed(name: str) -> list[Any]:
        return part[name] if isinstance(part.get(name), list) else []

    needed = [[each] for each in listed("allOf")] + [
        options for name in ("anyOf", "oneOf") if (options := listed(name))
    ]
    if str(reference := part.get("$ref", "")).startswith("#"):
        target = whole
        for name in unquote(reference).split("/")[1:]:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        needed.append([target])
    properties = part.get("properties")
    if part.get("type") == "object" and isinstance(properties, dict):
        needed += [[properties.get(name)] for name in listed("required") if isinstance(name, str)]
    if part.get("type") == "array" and part.get("minItems") and not listed("prefixItems"):
        needed.append([part.get("items")])
    return needed


def _json_rule(schema: Any) -> str:
    options = {"x-guidance": _JSON_OPTIONS}
    return f"%json {json.dumps({**schema, **options} if isinstance(schema, dict) else {'allOf': [schema], **options})}"
