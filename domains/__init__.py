"""Domains: questions, their databases, and the reward that judges the answers."""

from __future__ import annotations

from groundwire.domains._types import (
    Breakdowns,
    DataError,
    Domain,
    Task,
    TaskData,
    answer_form,
    breakdowns_of,
    database_folders,
    gold_columns,
    is_inside,
    visible_columns,
)
from groundwire.tools.plugins import PluginError, Registry

__all__ = [
    "Breakdowns",
    "DataError",
    "Domain",
    "Task",
    "TaskData",
    "answer_form",
    "breakdowns_of",
    "check",
    "database_folders",
    "get",
    "gold_columns",
    "is_inside",
    "names",
    "visible_columns",
]

_registry: Registry[Domain] = Registry("domain", hook="register_domains", builtin="groundwire.domains._builtin")
check, names = _registry.check, _registry.names


def get(name: str) -> Domain:
    """The domain ``name``. Raises :class:`groundwire.tools.plugins.UnknownNameError` and
    :class:`groundwire.tools.plugins.PluginError`.
    """
    try:
        return _registry.get(name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"domain {name!r} cannot be imported: {error}") from error
