"""Verdicts that were paid for, and what they cost, in one SQLite file that every process of a machine shares.

A request is known by what was asked (model, messages, sampling), so the same answer in a second epoch costs nothing.
Spending is counted before a request is made, by the most that it may cost, and corrected afterwards: many processes at
once cannot go past a cap, and one that is killed has at worst counted too much.
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

__all__ = ["JudgeCache", "key_of"]

T = TypeVar("T")
_SCHEMA = """
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, model TEXT, reply TEXT, at TEXT DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS spent (one INTEGER PRIMARY KEY CHECK (one = 1), calls INTEGER, usd REAL);
INSERT OR IGNORE INTO spent VALUES (1, 0, 0.0);
"""
_PATIENCE_S = 10.0


def key_of(asked: Any) -> str:
    """The name of a request in the cache: a hash of all that was asked."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class JudgeCache:
    """The file at ``path``, made where it is missing. Its methods may be called from any thread.

    Each raises :class:`rewards.JudgeAbstainedError` where the file cannot be used.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    def reply(self, key: str) -> str | None:
        """The reply that was stored for a request."""

        def read(db: sqlite3.Connection) -> str | None:
            row = db.execute("SELECT reply FROM verdicts WHERE key = ?", (key,)).fetchone()
            return row[0] if row else None

        return self._do(read)

    def store(self, key: str, *, model: str, reply: str) -> None:
        """Keep a readable reply; the first one stays."""
        # A lone surrogate is no text that SQLite takes.
        text = reply.encode("utf-8", "replace").decode()
        insert = "INSERT OR IGNORE INTO verdicts (key, model, reply) VALUES (?, ?, ?)"
        self._do(lambda db: db.execute(insert, (key, model, text)))

    def reserve(self, usd: float, *, max_calls: int | None, max_usd: float | None) -> None:
        """Count a request that may cost ``usd``. Raises :class:`rewards.JudgeAbstainedError` where it is too much."""
        take = (
            "UPDATE spent SET calls = calls + 1, usd = usd + :usd WHERE (:calls IS NULL OR calls < :calls)"
            " AND (:cap IS NULL OR usd + :usd <= :cap)"
        )
        given = {"usd": usd, "calls": max_calls, "cap": max_usd}
        if self._do(lambda db: db.execute(take, given).rowcount):
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
        """Replace what was reserved for a request by what it cost."""
        self._do(lambda db: db.execute("UPDATE spent SET usd = usd + ?", (actual - reserved,)))

    def spent(self) -> tuple[int, float]:
        """Requests and USD so far."""
        calls, usd = self._do(lambda db: db.execute("SELECT calls, usd FROM spent").fetchone())
        return int(calls), float(usd)

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with self._lock:
                if self._opened is None:
                    self._opened = self._open()
                return work(self._opened)
        except (OSError, sqlite3.Error) as error:
            raise JudgeAbstainedError(
                f"the judge's cache {self._path} cannot be used: {error}; set another with cache=FILE"
            ) from error

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One statement is one transaction.
        db = sqlite3.connect(self._path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
        try:
            _share(db)
            db.executescript(_SCHEMA)
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                db.close()
            raise
        return db


def _share(db: sqlite3.Connection) -> None:
    """Let readers and a writer work at once. SQLite's own patience does not cover this: two at once are refused."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.01)
