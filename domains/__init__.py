"""Domains: what is asked, over which database, and how an answer is judged."""

from __future__ import annotations

from domains._contract import DataError, Domain, Task, TaskData
from domains._registry import get, names

__all__ = ["DataError", "Domain", "Task", "TaskData", "get", "names"]
