"""Spider: questions over SQLite databases, judged by execution match; and whatever has Spider's shape."""

from __future__ import annotations

from groundwire.domains.spider.loader import SpiderDomain

__all__ = ["SpiderDomain", "domain"]

domain = SpiderDomain()
