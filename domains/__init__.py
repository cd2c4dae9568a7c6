"""Domains: questions, their databases, and the reward that judges the answers."""

from __future__ import annotations

from groundwire.domains._registry import get, names
from groundwire.domains._types import (
    Breakdowns,
    DataError,
    Domain,
    PrivateTasks,
    Task,
    TaskData,
    as_domain,
    database_folders,
    is_inside,
    load_split,
)
from groundwire.domains.columns import columns_line, gold_answer, gold_value, visible_columns
from groundwire.domains.held_out import hold_out, shared_notes
from groundwire.domains.task_list import TaskList, task_list
from groundwire.tools.sql.answers import KINDS as ANSWER_KINDS

__all__ = [
    "ANSWER_KINDS",
    "Breakdowns",
    "DataError",
    "Domain",
    "PrivateTasks",
    "Task",
    "TaskData",
    "TaskList",
    "as_domain",
    "columns_line",
    "database_folders",
    "get",
    "gold_answer",
    "gold_value",
    "hold_out",
    "is_inside",
    "load_split",
    "names",
    "shared_notes",
    "task_list",
    "visible_columns",
]
