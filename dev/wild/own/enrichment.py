"""The input of the template data-enrichment, and what of its state is the answer."""

_SCHEMA = {
    "type": "object",
    "properties": {"summary": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["summary", "year"],
}


def state(task):
    """The graph's input."""
    return {"topic": task.topic, "extraction_schema": _SCHEMA}


def info(result):
    """The answer."""
    return str(result["info"])
