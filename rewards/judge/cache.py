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
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from groundwire.rewards._types import JudgeAbstainedError

T = TypeVar("T")
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
        row = self._do(lambda db: db.execute("SELECT reply FROM verdicts WHERE key = ?", (key,)).fetchone())
        return row[0] if row else None

    def store(self, key: str, *, model: str, reply: str) -> None:
        """Store a readable reply."""
        insert = "INSERT OR REPLACE INTO verdicts (key, model, reply) VALUES (?, ?, ?)"
        self._do(lambda db: db.execute(insert, (key, model, reply)))

    def reserve(self, usd: float, *, max_calls: int | None, max_usd: float | None) -> None:
        """Count a request that costs at most ``usd``. Raises :class:`rewards.JudgeAbstainedError` at a cap."""
        update = (
            "UPDATE spent SET calls = calls + 1, usd = usd + :usd WHERE (:calls IS NULL OR calls < :calls)"
            " AND (:cap IS NULL OR usd + :usd <= :cap)"
        )
        values = {"usd": usd, "calls": max_calls, "cap": max_usd}
        if self._do(lambda db: db.execute(update, values).rowcount):
            return
        calls, spent = self.spent()
        if max_calls is not None and calls >= max_calls:
            raise JudgeAbstainedError(
                f"the judge has used its max_calls: {calls} of {max_calls} requests, counted in {self._path}; raise it"
            )
        raise JudgeAbstainedError(
            f"the judge has used its max_usd: {spent:.4f} of {max_usd:g} USD, and a request may cost {usd:.4f}, "
            f"counted in {self._path}; raise it"
        )

    def settle(self, reserved: float, actual: float) -> None:
        """Replace the reserved cost of a request by its actual cost."""
        self._do(lambda db: db.execute("UPDATE spent SET usd = usd + ?", (actual - reserved,)))

    def spent(self) -> tuple[int, float]:
        """Requests and USD so far."""
        calls, usd = self._do(lambda db: db.execute("SELECT calls, usd FROM spent").fetchone())
        return int(calls), float(usd)

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with self._lock:
                if self._connection is None:
                    self._connection = self._connect()
                return work(self._connection)
        except (OSError, sqlite3.Error) as error:
            raise JudgeAbstainedError(
                f"the judge's cache {self._path} cannot be used: {error}; set another with cache=FILE"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Autocommit: each statement is a transaction.
        db = sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            _enable_wal(db)
            db.executescript(_SCHEMA)
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                db.close()
            raise
        return db


def _enable_wal(db: sqlite3.Connection) -> None:
    """Let processes read during a write. SQLite's timeout does not cover this statement when two processes issue it."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
