"""Domains: questions, their databases, and the reward that judges the answers."""

from __future__ import annotations

from groundwire.domains._registry import check, get, names
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
    load_split,
    visible_columns,
    watch_reward,
)
from groundwire.domains.task_list import TaskList, task_list

__all__ = [
    "Breakdowns",
    "DataError",
    "Domain",
    "Task",
    "TaskData",
    "TaskList",
    "answer_form",
    "breakdowns_of",
    "check",
    "database_folders",
    "get",
    "gold_columns",
    "is_inside",
    "load_split",
    "names",
    "task_list",
    "visible_columns",
    "watch_reward",
]
