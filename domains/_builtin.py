"""The domains that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from tools.plugins import hookimpl


@hookimpl
def register_domains(register: Callable[[str, str], None]) -> None:
    """Text-to-SQL on Spider, questions on medicine in prose, and whatever has the shape of either."""
    register("medical", "domains.medical:domain")
    register("spider", "domains.spider:domain")
