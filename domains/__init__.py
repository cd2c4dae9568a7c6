"""Domains: what is asked, over which database, and how an answer is judged."""

from __future__ import annotations

from domains._contract import DataError, Domain, Task, TaskData, answer_form
from domains._registry import check, get, names

__all__ = ["DataError", "Domain", "Task", "TaskData", "answer_form", "check", "get", "names"]
