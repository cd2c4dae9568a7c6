"""The records of trace files: JSON lines, JSON documents, OTLP as protobuf, CSV, parquet; also with gzip.

Memory holds one record. A file that is cut off, or has a damaged line, loses that record alone, which is counted.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from groundwire.tools.files import MAX_BYTES, open_regular, parse_json
from groundwire.train.traces.otlp import parts_in

_OTLP_LISTS = ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
_LISTS = ("data", "entries", "traces", "runs", "spans", "items")
"""Keys of a document whose list has the records."""
_NAMED = {"traceId", "timeUnixNano", "observedTimeUnixNano"}
"""Of fields that a span or a log record has, and not what is read as the other one."""
_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*+"?|[{}\[\]]', re.DOTALL)
_BLOCK = 1 << 20
_SPACE = b"\xef\xbb\xbf \t\r\n"
_BLANK = _SPACE + b"\0"
"""Around a line of JSON; zeros are in logs that were cut while they were written."""
_NOT_JSON, _CUT = "lines that are no JSON", "files that end in the middle of a record"
_UNKNOWN = "files that are neither JSON nor OTLP"
_LARGE = f"records larger than {MAX_BYTES >> 20} MB"


def records(file: Path, unread: Counter[str]) -> Iterator[Any]:
    """The records of a file; what cannot be read is counted in ``unread``, by its reason. Raises ``OSError``."""
    with open_regular(file) as raw:
        head = raw.read(4)
        raw.seek(0)
        if head == b"PAR1":
            yield from _parquet(raw)
            return
        stream: Any = gzip.GzipFile(fileobj=raw) if head[:2] == b"\x1f\x8b" else raw
        try:
            if stream.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                stream = _recoded(stream)
            stream.seek(0)
            start = stream.read(4096)
            stream.seek(0)
            if start.lstrip(_SPACE if start[:4].strip(b"\0") else _SPACE + b"\0")[:1] in (b"{", b"["):
                yield from _lines(stream, unread) if _is_lines(stream) else _document(stream, unread)
            elif not start.strip(_SPACE):
                unread["files that are empty"] += 1
            elif start[:1] in (b"\n", b"\0"):
                yield from _protobuf(stream, unread)
            elif ".csv" in file.suffixes:
                yield from _rows(stream, unread)
            elif head == b"PK\3\4":
                unread["archives: unpack them first"] += 1
            else:
                unread[_UNKNOWN] += 1
        except (EOFError, gzip.BadGzipFile, zlib.error):
            unread[_CUT] += 1


def _recoded(stream: Any) -> Any:
    """The text of a stream in UTF-16, as PowerShell writes it, in a temporary file in UTF-8."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when this has returned
    stream.seek(0)
    shutil.copyfileobj(codecs.EncodedFile(stream, "utf-8", "utf-16", errors="replace"), copy)
    return copy


def _rows(stream: Any, unread: Counter[str]) -> Iterator[Any]:
    """The rows of a table with a line of names, without what is empty."""
    csv.field_size_limit(MAX_BYTES)
    rows = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline=""))
    try:
        yield from ({name: value for name, value in row.items() if name and value} for row in rows)
    except csv.Error:
        unread["tables that are no CSV from some row on"] += 1


def _whole_lines(stream: Any) -> Iterator[bytes]:
    """The lines that are not blank; of one that is too long its beginning."""
    while line := stream.readline(MAX_BYTES):
        rest = line
        while len(rest) in (_BLOCK, MAX_BYTES) and not rest.endswith(b"\n"):
            rest = stream.readline(_BLOCK)
        if line.strip(_SPACE):
            yield line


def _is_lines(stream: Any) -> bool:
    """Whether one of the first two lines is a value of its own, and there is more than one."""
    lines = list(islice(_whole_lines(stream), 2))
    stream.seek(0)
    return len(lines) > 1 and any(_parsed(line.strip(_BLANK)) is not None for line in lines)


def _parsed(text: bytes) -> Any:
    """A list or an object; None for anything else."""
    try:
        value = parse_json(text) if text[:1] in (b"{", b"[") else None
    except ValueError:
        return None
    return value if isinstance(value, dict | list) else None


def _lines(stream: Any, unread: Counter[str]) -> Iterator[Any]:
    for line in _whole_lines(stream):
        if len(line) == MAX_BYTES:
            unread[_LARGE] += 1
        elif (value := _parsed(line.strip(_BLANK))) is not None:
            yield from _unwrapped(value)
        else:
            unread[_NOT_JSON if line.endswith(b"\n") else _CUT] += 1


def _unwrapped(value: Any) -> Iterator[Any]:
    """The elements of a list, or of the list that a document is around; else the value."""
    holder = value.get("log", value) if isinstance(value, dict) else value
    if isinstance(holder, dict) and not {"id", "traceId", "trace_id", "messages"} & holder.keys():
        lists = [holder[name] for name in _LISTS if isinstance(holder.get(name), list)]
        holder = lists[0] if lists else value
    yield from holder if isinstance(holder, list) else [value]


def _document(stream: Any, unread: Counter[str]) -> Iterator[Any]:
    """The records of a document, of several one after the other, or of one that is cut off or too large for memory."""
    text = stream.read(MAX_BYTES + 1)
    if len(text) <= MAX_BYTES and (value := _parsed(text.strip(_SPACE))) is not None:
        yield from _unwrapped(value)
        return
    start = _list_start(text[:_BLOCK])
    del text
    stream.seek(start)
    found = False
    for record in _objects(stream, unread):
        found = True
        if (value := _parsed(record)) is None:
            unread[_NOT_JSON] += 1
        else:
            yield from _unwrapped(value)
    unread.update({} if found else {_NOT_JSON: 1})


def _list_start(head: bytes) -> int:
    """Where the list of records begins, inside of objects only; 0 if there is none."""
    key, depth = b"", 0
    for token in _TOKEN.finditer(head):
        if token[0] == b"[" and key in map(str.encode, (*_OTLP_LISTS, *_LISTS)):
            return token.end()
        if token[0] in (b"[", b"]"):
            depth += 1000 if token[0] == b"[" else -1000
        key = token[0][1:-1] if depth < 1000 else b""
    return 0


def _objects(stream: Any, unread: Counter[str]) -> Iterator[bytes]:
    """The texts of the outermost objects; brackets of lists around them do not count."""
    buffer, place, start, depth, block = b"", 0, 0, 0, b"."
    while block:
        block = stream.read(_BLOCK)
        kept = start if depth else place
        buffer, place, start = buffer[kept:] + block, place - kept, 0
        if len(buffer) > MAX_BYTES:
            unread[_LARGE] += 1
            return
        for token in _TOKEN.finditer(buffer, place):
            if block and token.end() == len(buffer):  # a string may go on
                break
            place = token.end()
            if token[0] in (b"{", b"[") and (depth or token[0] == b"{"):
                start = start if depth else token.start()
                depth += 1
            elif token[0] in (b"}", b"]") and depth:
                depth -= 1
                if not depth:
                    yield buffer[start:place]
    if depth:
        unread[_CUT] += 1


def _protobuf(stream: Any, unread: Counter[str]) -> Iterator[Any]:
    """OTLP's ``TracesData`` or ``LogsData`` as JSON, one after the other, or each after its length (collector)."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.logs.v1.logs_pb2 import LogsData, ResourceLogs
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, TracesData

    while head := stream.read(1):
        framed = head == b"\0"
        size = int.from_bytes(stream.read(3), "big") if framed else _varint(stream)
        body = stream.read(size) if head in (b"\0", b"\n") and size <= MAX_BYTES else b""
        if not body or len(body) < size:
            unread[_CUT if body else _UNKNOWN] += 1
            return
        for form in (TracesData, LogsData) if framed else (ResourceSpans, ResourceLogs):  # with the same field numbers
            with suppress(DecodeError):
                value = MessageToDict(form.FromString(body))
                parts = list(parts_in(value))
                if not parts or any(not _NAMED.isdisjoint(part) for part in parts):
                    yield value
                    break
        else:
            unread["messages that are no OTLP"] += 1


def _varint(stream: Any) -> int:
    value = shift = 0
    while byte := stream.read(1):
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
    return value


def _parquet(raw: Any) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(raw) as table:
        for batch in table.iter_batches(batch_size=256):
            yield from batch.to_pylist()
