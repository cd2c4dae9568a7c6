"""``read_traces``: exported traces as rollouts, one at a time.

Which reader takes a record is seen in the record, so files and formats may be mixed. The records of one trace may lie
anywhere in the files: all are sorted by trace in a temporary database first, which keeps memory small.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import orjson

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.exchange import UNREADABLE
from groundwire.tools.errors import UserError
from groundwire.tools.files import parse_json
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces import atif, chats, claude_code, codex, har, langfuse, langsmith, openinference, otlp
from groundwire.train.traces.files import records
from groundwire.train.traces.masking import Masker
from groundwire.train.traces.spans import rollout_of

_CACHE_KB = 32 << 10
_NO_TOOLS = "replies that call tools whose definitions were not recorded: their prompts lack them"


class TraceError(UserError):
    """Trace files that cannot be read."""


class Reader(Protocol):
    """The module of a format."""

    name: str

    def takes(self, record: Any) -> bool:
        """Whether a record is of this format."""

    def split(self, record: Any, file: str, unread: Counter[str]) -> Iterator[tuple[str, Any]]:
        """The traces of a record of ``file``, each with what it has of it; ``unread`` counts what is left out.

        A trace without a name is one of its own, but an item that is a score belongs to the trace of its span.
        """

    def build(self, trace_id: str, items: Sequence[Any], unread: Counter[str]) -> Iterator[Rollout]:
        """The rollouts of a trace with these items, in the order of the files."""


READERS: tuple[Reader, ...] = (openinference, otlp, har, atif, langsmith, langfuse, claude_code, codex, chats)
"""The first that takes a record reads it."""


class Traces:
    """The rollouts of trace files. Each iteration reads the files anew; the counts are those of the last one.

    Every rollout has a ``task`` with ``id``, ``question`` (the first user turn) and ``inputs`` (what the agent was
    called with); ``calls`` (:class:`.record.TracedCall`), each with ``messages``, ``tools``, ``reply`` and
    ``untrainable_reason``; an ``outcome`` with ``answer``, ``steps``, ``reward``, ``reward_components`` (exported
    scores) and ``failure``; and ``metadata``.
    """

    def __init__(self, files: Sequence[Path], *, mask: bool = True) -> None:
        self.files, self.is_masked = files, mask
        self.unread = Counter[str]()
        """What could not be read, or was read with a doubt, by reason."""
        self.masked = Counter[str]()
        """How many texts were replaced, by kind."""

    def __iter__(self) -> Iterator[Rollout]:
        self.unread.clear()
        self._records = 0
        masker = Masker() if self.is_masked else None
        self.masked = masker.replaced if masker else self.masked
        with closing(_temporary()) as spool, closing(_temporary()) as seen:
            seen.execute("CREATE TABLE items (digest INTEGER PRIMARY KEY, file INT)")
            spool.execute("CREATE TABLE items (reader INT, trace TEXT, span TEXT, item BLOB)")
            for place, file in enumerate(self.files):
                try:
                    spool.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", self._items(file, place, seen))
                except OSError as error:
                    raise TraceError(f"{file} cannot be read: {error.strerror or error}") from error
            if spool.execute("SELECT 1 FROM items WHERE trace = ''").fetchone():
                spool.execute("CREATE INDEX spans ON items (span, trace)")
                known = "SELECT trace FROM items AS other WHERE other.span = items.span AND other.trace > ''"
                spool.execute(f"UPDATE items SET trace = ({known}) WHERE trace = ''")  # noqa: S608 - no value
                [lost] = spool.execute("SELECT count(*) FROM items WHERE trace IS NULL").fetchone()
                if lost:
                    self.unread["annotations of spans that are not there"] += lost
                    spool.execute("DELETE FROM items WHERE trace IS NULL")
            rows = spool.execute("SELECT reader, trace, item FROM items ORDER BY reader, trace, rowid")
            for (number, trace), group in groupby(rows, lambda row: row[:2]):
                try:
                    trace_id, items = trace, [orjson.loads(item) for *_, item in group]
                    if masker:
                        masker.begin()
                        trace_id, items = masker.mask(trace_id), masker.mask(items)
                    rollouts = list(filter(_has_calls, READERS[number].build(trace_id, items, self.unread)))
                    if not rollouts:
                        self.unread["traces without an LLM call"] += 1
                    bare = sum(bool(call.reply.get("tool_calls")) for call in _without_tools(rollouts))
                    self.unread.update({_NO_TOOLS: bare} if bare else {})
                    yield from rollouts
                except UNREADABLE as error:
                    self.unread[f"traces of another form ({type(error).__name__})"] += 1

    def _items(self, file: Path, place: int, seen: sqlite3.Connection) -> Iterator[tuple[int, str, str | None, bytes]]:
        for record in records(file, self.unread):
            self._records += 1
            try:
                reader = next((reader for reader in READERS if reader.takes(record)), None)
            except UNREADABLE:  # a name of the format with a value of another type
                reader = None
            if reader is None:
                self.unread["records of no known format"] += 1
                continue
            number = [other.build for other in READERS].index(reader.build)  # tracers' spans may be in one trace
            try:
                for trace_id, item in reader.split(record, str(file), self.unread):
                    span = item.get("span_id") if reader.build is rollout_of else None
                    trace, blob = trace_id or ("" if span else f"{self._records:09}"), _encoded(item)
                    if (
                        len(self.files) > 1
                        and _file_of(f"{number} {trace_id} ".encode("utf-8", "replace") + blob, place, seen) != place
                    ):
                        self.unread["records that an earlier file has, too"] += 1
                    else:
                        yield number, trace, span, blob
            except UNREADABLE as error:
                self.unread[f"{reader.name}: records of another form ({type(error).__name__})"] += 1


def _temporary() -> sqlite3.Connection:
    """A database in a temporary file, which only large input needs."""
    database = sqlite3.connect("")
    database.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
    return database


def _file_of(record: bytes, file: int, seen: sqlite3.Connection) -> int:
    """The first file that has the record, which may have it several times; ``file`` if none had it."""
    digest = int.from_bytes(hashlib.blake2b(record, digest_size=7).digest(), "big")
    seen.execute("INSERT OR IGNORE INTO items VALUES (?, ?)", (digest, file))
    [first] = seen.execute("SELECT file FROM items WHERE digest = ?", (digest,)).fetchone()
    return int(first)


def _has_calls(rollout: Rollout) -> bool:
    return bool(rollout.calls)


def _without_tools(rollouts: Iterable[Rollout]) -> Iterator[Any]:
    """The calls that would be learned without any tools."""
    calls = (call for rollout in rollouts for call in rollout.calls)
    return (call for call in calls if not call.tools and not call.untrainable_reason)


def _encoded(item: Any) -> bytes:
    try:
        return orjson.dumps(item)
    except (TypeError, ValueError):  # half of a surrogate pair, a large number
        return orjson.dumps(parse_json(to_json(item)))


def read_traces(*files: str | Path, mask: bool = True) -> Traces:
    """The traces in ``files``, or in the files of folders, exported by any tracer, as rollouts.

    With ``mask``, keys and personal data are replaced (:mod:`.masking`). Raises :class:`TraceError` if there is none.
    """
    paths = [Path(file) for file in files]
    found = [inner for path in paths for inner in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    found = [path for path in found if path in paths or (path.is_file() and not path.name.startswith("."))]
    if missing := next((path for path in found if not path.exists()), None):
        pipe = "; standard input cannot be read twice: write it into a file" if str(missing) == "-" else ""
        raise TraceError(f"{missing} does not exist{pipe}: give files of exported traces, or a folder of them")
    if not found:
        raise TraceError(f"{', '.join(map(str, paths)) or 'no argument'} has no file: give files of exported traces")
    return Traces(found, mask=mask)
