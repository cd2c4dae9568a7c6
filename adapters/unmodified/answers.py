"""From what an agent returns to the answer that is judged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from groundwire.adapters.unmodified.conversation import Conversation, is_query
from groundwire.tools.sql.syntax import fenced_sql
from groundwire.tools.types import AnswerForm

__all__ = ["judged_answer"]

_FIELDS = ("answer", "output", "sql", "query")
_WRAPPERS = ("final_output", "output", "content", "text")
"""The attributes in which frameworks' results and messages hold the text."""


def judged_answer(result: Any, form: AnswerForm, conversation: Conversation, given: Mapping[str, Any]) -> str:
    """The text to be judged in an agent's result.

    The agent's answer is the first of the fields ``answer``, ``output``, ``sql`` and ``query`` that it has set (those
    in ``given`` are its input), else its typed output, else its last message. For an answer in SQL it is the first of
    these with a query, as a fenced block or by itself; else the last query that the agent gave to a tool, because many
    agents run the query and then answer in prose.
    """
    texts = list(_texts(result, given))
    if form != "sql":
        return texts[0].strip() if texts else ""
    for text in texts:
        fenced = fenced_sql(text)
        if fenced is not None or is_query(text):
            return text.strip() if fenced is None else fenced
    return conversation.last_query() or (texts[0].strip() if texts else "")


def _texts(result: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """The texts in ``result`` that may be its answer, the likeliest first."""
    if isinstance(result, str):
        yield result
    elif isinstance(result, (list, tuple)):  # the parts of a message
        yield "".join(text for part in result for text in _texts(part, given))
    elif (found := _own_fields(result)) is not None:
        answers = [found[name] for name in _FIELDS if found.get(name) and found[name] != given.get(name)]
        answers += [found[name] for name in ("structured_response", "text", "content") if found.get(name)]
        answers += list(found.get("messages") or ())[-1:]
        for answer in answers:
            yield from _texts(answer, given)
        if not answers:
            yield json.dumps(found, ensure_ascii=False, default=str)
    elif result is not None:
        value = next((each for name in _WRAPPERS if (each := getattr(result, name, None)) and not callable(each)), None)
        yield from [str(result)] if value is None else _texts(value, given)


def _own_fields(result: Any) -> Mapping[str, Any] | None:
    """The fields of a mapping, a dataclass or a pydantic model; None for the result objects of frameworks."""
    if isinstance(result, Mapping):
        return result
    if any(hasattr(result, name) for name in ("final_output", "content")):
        return None
    if is_dataclass(result) and not isinstance(result, type):
        return {each.name: getattr(result, each.name) for each in fields(result)}
    if hasattr(type(result), "model_fields"):
        return {name: getattr(result, name) for name in type(result).model_fields}
    return None
