"""The domains that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from tools.plugins import hookimpl


@hookimpl
def register_domains(register: Callable[[str, str], None]) -> None:
    """Text-to-SQL on Spider, and on whatever has Spider's shape."""
    register("spider", "domains.spider:domain")
