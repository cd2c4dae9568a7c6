"""Any folder of SQLite files with a file of questions, answered with SQL and judged by execution match."""

from __future__ import annotations

from groundwire.domains.sqlite.loader import SqliteDomain, domain

__all__ = ["SqliteDomain", "domain"]
