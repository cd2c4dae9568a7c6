"""The domains that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.tools.plugins import hookimpl


@hookimpl
def register_domains(register: Callable[[str, str], None]) -> None:
    """Text-to-SQL on Spider, questions on medicine in prose, and whatever has the shape of either."""
    register("medical", "groundwire.domains.medical:domain")
    register("spider", "groundwire.domains.spider:domain")
