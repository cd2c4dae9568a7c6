"""The domains that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.tools.plugins import hookimpl


@hookimpl
def register_domains(register: Callable[[str, str], None]) -> None:
    """Text-to-SQL on Spider, BIRD and any folder of databases; questions on medicine answered in prose."""
    register("bird", "groundwire.domains.bird.loader:domain")
    register("medical", "groundwire.domains.medical.loader:domain")
    register("spider", "groundwire.domains.spider.loader:domain")
    register("sqlite", "groundwire.domains.sqlite.loader:domain")
