"""Spider: questions over SQLite databases, answered with SQL and judged by execution match."""

from __future__ import annotations

from groundwire.domains.spider.loader import SpiderDomain, domain

__all__ = ["SpiderDomain", "domain"]
