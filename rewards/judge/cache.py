"""Verdicts and their costs in one SQLite file, shared by all processes of a machine.

The key of a request is everything in it (model, messages, sampling), so the same answer in a second epoch is free.
Before a request its maximum cost is reserved, and corrected afterwards: concurrent processes cannot exceed a cap
together, and a killed process has at worst counted too much.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

from groundwire.rewards._types import JudgeAbstainedError
from groundwire.tools.files import new_database

_SCHEMA = """
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, model TEXT, reply TEXT, at TEXT DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS spent (one INTEGER PRIMARY KEY CHECK (one = 1), calls INTEGER, usd REAL);
INSERT OR IGNORE INTO spent VALUES (1, 0, 0.0);
"""
_LOCK_TIMEOUT_S = 10.0


def cache_key(request: Any) -> str:
    """A hash of everything in a request."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class JudgeCache:
    """The file at ``path``, which is created if it is missing. The methods may be called from any thread.

    Each raises :class:`rewards.JudgeAbstainedError` if the file cannot be used.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def reply(self, key: str) -> str | None:
        """The stored reply to a request."""
        rows, _ = self._run("SELECT reply FROM verdicts WHERE key = ?", key)
        return rows[0][0] if rows else None

    def store(self, key: str, *, model: str, reply: str) -> None:
        """Store a readable reply."""
        self._run("INSERT OR REPLACE INTO verdicts (key, model, reply) VALUES (?, ?, ?)", key, model, reply)

    def reserve(self, usd: float, *, max_calls: int | None, max_usd: float | None) -> None:
        """Count a request that costs at most ``usd``. Raises :class:`rewards.JudgeAbstainedError` at a cap."""
        _, reserved = self._run(
            "UPDATE spent SET calls = calls + 1, usd = usd + ?1"
            " WHERE (?2 IS NULL OR calls < ?2) AND (?3 IS NULL OR usd + ?1 <= ?3)",
            *(usd, max_calls, max_usd),
        )
        if reserved:
            return
        calls, spent = self.spent()
        used = f"max_usd: {spent:.4f} of {max_usd} USD, and a request may cost {usd:.4f}"
        if max_calls is not None and calls >= max_calls:
            used = f"max_calls: {calls} of {max_calls} requests"
        raise JudgeAbstainedError(f"the judge has used its {used}, counted in {self._path}; raise it")

    def settle(self, reserved: float, actual: float) -> None:
        """Replace the reserved cost of a request by its actual cost."""
        self._run("UPDATE spent SET usd = usd + ?", actual - reserved)

    def spent(self) -> tuple[int, float]:
        """Requests and USD so far."""
        [(calls, usd)], _ = self._run("SELECT calls, usd FROM spent")
        return calls, usd

    def _run(self, statement: str, *values: Any) -> tuple[list[Any], int]:
        """The rows of a statement, and the number of rows that it changed. Each statement is a transaction."""
        try:
            with self._lock:
                if self._connection is None:
                    self._connection = self._connect()
                cursor = self._connection.execute(statement, values)
                return cursor.fetchall(), cursor.rowcount
        except (OSError, sqlite3.Error) as error:
            raise JudgeAbstainedError(
                f"the judge's cache {self._path} cannot be used: {error}; set another with cache=FILE"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new_database(self._path)
        db = sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            db.executescript(_SCHEMA)
        except sqlite3.Error:
            db.close()
            raise
        return db
