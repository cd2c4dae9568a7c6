"""Domains: questions, their databases, and the reward that judges the answers."""

from __future__ import annotations

from groundwire.domains._registry import check, get, names
from groundwire.domains._types import DataError, Domain, Task, TaskData, answer_form

__all__ = ["DataError", "Domain", "Task", "TaskData", "answer_form", "check", "get", "names"]
