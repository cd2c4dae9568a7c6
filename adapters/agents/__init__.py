"""Agents as their authors wrote them: loaded by name, given a task by its fields, traced without a changed line."""
