"""What a competent model would reply: an answer to any chat request, made from its tools, schemas and formats.

It calls the tools that the agent offers, in order, each once after the last message of the user and at most three, with
arguments that fit their schemas. It fills JSON schemas, and writes the formats of code agents, DSPy and mini-swe-agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import count
from types import MappingProxyType
from typing import Any

from groundwire.adapters.tracing.scripted_server import Reply, text_of

_MOST_CALLS = 3
_URL = "URL"
_VALUES: dict[str, Any] = {
    "a": 6,
    "agent_name": "Stock Lookup Agent",
    "b": 7,
    "city": "Tokyo",
    "command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    "confirmation_number": "ABC123",
    "coworker": "Software Quality Control Engineer",
    "customer_id": "123",
    "date": "2025-01-10",
    "day": 1,
    "destination": "ANC",
    "expression": "6*7",
    "flight_number": "SFO-AK123",
    "hour": 1,
    "is_math_homework": False,
    "location": "Tokyo",
    "month": 9,
    "name": "Adam",
    "new_seat": "12A",
    "origin": "SFO",
    "price": 350,
    "query": "SELECT customer_name FROM receipts ORDER BY price DESC LIMIT 1",
    "question": "How many seats are on the plane?",
    "square": 18,
    "url": _URL,
    "year": 2025,
}
"""Values of fields by their names."""
_LAST = re.compile(r"final|submit|finish|complete|_result", re.IGNORECASE)
"""Tools that end a conversation."""
_DELEGATES = {"Agent", "ScheduleWakeup", "Skill", "Workflow"}
"""Tools of Claude Code that start other agents, or this one again: none is needed."""
_DSPY = {
    "next_thought": "I finish.",
    "next_tool_name": "finish",
    "next_tool_args": "{}",
    "reasoning": "It is simple.",
}
_ANSWER = "The answer is 42: there are 120 seats, and you are welcome"
_EXCERPT = 80
"""Characters of the question that are in an answer: no two answers are equal."""
_numbers = count(1)


def reply(body: Mapping[str, Any], url: str = "") -> Reply:
    """The reply to a chat request. ``url`` is a page that agents may read."""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or () if "function" in tool}
    name = _tool(body, tools)
    if not name:
        return Reply(text=_text(body))
    asked = _question(body["messages"]) if _LAST.search(name) else ""
    values = _values(body["messages"])
    arguments = json.dumps(_instance(tools[name].get("parameters") or {"type": "object"}, asked, values))
    call = {
        "id": f"call_{next(_numbers)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments.replace(_URL, url)},
    }
    return Reply(tool_calls=[call])


def _tool(body: Mapping[str, Any], tools: Mapping[str, Any]) -> str:
    """The tool to call next; empty for a reply in text."""
    choice = body.get("tool_choice")
    if not tools or choice == "none":
        return ""
    if isinstance(choice, dict) and "function" in choice:
        return str(choice["function"]["name"])
    messages = body["messages"]
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    called, called_now = _called(messages), _called(messages[last_user:])
    question = text_of(messages[last_user]).lower()
    topic = "seat" if "seat" in question else "faq"
    order = sorted(
        (name for name in tools if name not in _DELEGATES and not _LAST.search(name)),
        key=lambda name: topic not in name,
    )
    handoffs = [name for name in called if name.startswith("transfer")]
    for name in order:
        if name in called_now or name.startswith(("transfer_to_triage", "RequestTransfer")):  # back
            continue
        if len(called_now) >= _MOST_CALLS or (name.startswith("transfer") and (name in handoffs or len(handoffs) > 1)):
            break
        return name
    if last := [name for name in tools if _LAST.search(name)]:
        return last[0]
    return (order or list(tools))[0] if choice == "required" else ""


def _question(messages: Any) -> str:
    """The end of the last message of the user, within quotation marks and code."""
    texts = [text_of(message) for message in messages if message["role"] == "user"]
    return re.sub(r"[^\w ?!.,:-]+", " ", texts[-1] if texts else "")[-_EXCERPT:].strip()


def _values(messages: Any) -> dict[str, Any]:
    """Values of fields: the number of the question, and what the last tool said of it."""
    number = re.search(r"\bsquare (\d+)", _question(messages))
    lost = text_of(messages[-1]) == "loser"
    return {**_VALUES, **({"square": int(number[1])} if number else {}), **({"response": False} if lost else {})}


def _called(messages: Any) -> list[str]:
    return [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]


def _text(body: Mapping[str, Any]) -> str:  # noqa: PLR0911 - one for each format
    """The reply in the format that the request or its prompt asks for."""
    form, messages = body.get("response_format") or {}, body["messages"]
    asked = _question(messages)
    if form.get("type") == "json_schema":
        return json.dumps(_instance(form["json_schema"].get("schema", {}), asked))
    if form.get("type") == "json_object":
        return json.dumps({"answer": f"42 {asked}", "reasoning": "because"})
    prompt, last = "\n".join(map(text_of, messages)), text_of(messages[-1])
    first = not any(message["role"] == "assistant" for message in messages)
    if "final_answer(" in prompt and ("<code>" in prompt or "```py" in prompt):  # smolagents
        query = f'result = sql_engine("{_VALUES["query"]}")\nfinal_answer(f"{{result}} {asked}")'
        return f"Thought: I query.\n<code>\n{query if first else 'final_answer(42)'}\n</code>"
    if "[[ ## " in prompt:  # DSPy
        names = re.findall(r"\[\[ ## (\w+) ## \]\]", last.rsplit("Respond with", 1)[-1])
        fields = {**_DSPY, "process_result": f"Booked: {asked}"}
        if "get_user_info" in prompt and "observation_0" not in prompt:
            fields |= {"next_tool_name": "get_user_info", "next_tool_args": '{"name": "Adam"}'}
        filled = [
            f"[[ ## {name} ## ]]\n{fields.get(name, '42')}" for name in dict.fromkeys(names) if name != "completed"
        ]
        return "\n\n".join([*filled, "[[ ## completed ## ]]"])
    if "mswea_bash_command" in prompt:  # mini-swe-agent
        command = "ls" if first else f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '42 {asked}'"
        return f"THOUGHT: I go on.\n\n```mswea_bash_command\n{command}\n```"
    if "<move>" in prompt:  # the chess player
        move = re.search(r"legal moves: (\w+)", prompt)
        return f"<move>{move.group(1) if move else 'e2e4'}</move>"
    if "Final Answer:" in prompt:  # CrewAI
        return f"Thought: I now know the answer.\nFinal Answer: {_ANSWER}. {asked}"
    return f"{_ANSWER}. {asked}"


def _instance(schema: Mapping[str, Any], text: str = "", values: Mapping[str, Any] = MappingProxyType(_VALUES)) -> Any:
    """An instance of a JSON schema, with ``values`` of fields by their names; ``text`` is in its other texts."""
    definitions = schema.get("$defs") or schema.get("definitions") or {}
    return _fill(schema, {"text": text, "values": values, **definitions}, "", 0)


def _fill(schema: Any, definitions: Mapping[str, Any], key: str, depth: int) -> Any:  # noqa: PLR0911 - the kinds of schemas
    if not isinstance(schema, dict):
        return "x"
    if "$ref" in schema:
        return _fill(definitions.get(schema["$ref"].rsplit("/", 1)[-1], {}), definitions, key, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if choices := schema.get(name):
            choice = next((choice for choice in choices if choice.get("type") != "null"), choices[0])
            return _fill(choice, definitions, key, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "string")
    if kind == "object" or "properties" in schema:
        fields = schema.get("properties", {})
        required = schema.get("required") or list(fields) if depth < 12 else ()
        return {name: _fill(fields[name], definitions, name, depth + 1) for name in fields if name in required}
    if kind == "array":
        item = _fill(schema.get("items", {"type": "string"}), definitions, key, depth + 1)
        return [item] * max(1, schema.get("minItems", 1))
    values = definitions["values"]
    if kind in ("integer", "number"):
        value = values.get(key)
        return value if isinstance(value, int) else max(1, schema.get("minimum", 1))
    if kind in ("boolean", "null"):
        return values.get(key, True) if kind == "boolean" else None
    return (
        "2025-01-10"
        if schema.get("format") == "date"
        else str(values.get(key, f"a {key or 'text'} {definitions['text']}".strip()))
    )
