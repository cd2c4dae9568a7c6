"""A database is opened right or refused in one sentence, whatever its path leads to, and no file is changed or made."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from programs import run
from spider_folder import make_database

from groundwire import rewards
from groundwire.rewards import RewardError
from groundwire.tools.files import copy_file, size_on_disk
from groundwire.tools.schema import describe_table, table_info
from groundwire.tools.sql import DatabaseCopies, DatabaseError, SqlError, file_problem, is_sqlite, run_query
from groundwire.tools.sql.opening import open_readonly

SCRIPT = "CREATE TABLE t (a INT, b TEXT); INSERT INTO t VALUES (1, 'one')"
ALL = "SELECT * FROM t"


def _reward(path: str | Path) -> float:
    task = {"id": "1", "question": "q", "query": ALL, "db_path": str(path), "db_id": "t"}
    return float(asyncio.run(rewards.get("spider_exec_match")(task, ALL, [])))


READERS: dict[str, Callable[[str | Path], Any]] = {
    "run_query": lambda path: run_query(path, ALL).rows,
    "table_info": table_info,
    "describe_table": lambda path: describe_table(path, "t"),
    "reward": _reward,
}


def _outcome(read: Callable[[str | Path], Any], path: str | Path) -> Any:
    """What ``read`` returns or raises. One that waits for ever is a failure."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(read(path))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(600)
    assert outcome, "it waits"
    return outcome[0]


def _content(folder: Path) -> dict[str, Any]:
    """All that a reader could change in a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).digest() if path.is_file() else path.lstat().st_mode
        for path in folder.iterdir()
    }


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = _content(folder)
    yield
    assert _content(folder) == before


def _assert_refused(path: str | Path, message: str) -> None:
    assert message in file_problem(path)
    assert not is_sqlite(path)
    for name, read in READERS.items():
        error = _outcome(read, path)
        assert isinstance(error, RewardError if name == "reward" else DatabaseError), (name, error)
        assert message in str(error)
        assert str(error).isprintable()


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, _in_folder(path.parent):  # the path of a socket is short
        bound.bind(path.name)


@contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "but a pipe"),
    "socket": (_bind, "but a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "but a device"),
    "folder": (Path.mkdir, "but a folder"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "text": (lambda path: path.write_text("hello " * 1000), "no SQLite database, or an encrypted one"),
    "encrypted": (lambda path: path.write_bytes(os.urandom(8192)), "no SQLite database, or an encrypted one"),
    "empty": (Path.touch, "the file is empty"),
}


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_database_is_refused_and_nobody_waits(tmp_path: Path, kind: str, linked: bool) -> None:
    make, message = KINDS[kind]
    path = tmp_path / "x.sqlite"
    make(path)
    if linked:
        path = tmp_path / "link.sqlite"
        path.symlink_to("x.sqlite")
    with unchanged(tmp_path):
        _assert_refused(path, message)


@pytest.mark.parametrize("name", ["x\0.sqlite", "x\ud800.sqlite"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    _assert_refused(f"{tmp_path}/{name}", "no file can have this name")


@pytest.mark.parametrize("end", ["", "-journal", "-wal", "-shm"])
@pytest.mark.parametrize("read", READERS)
def test_a_pipe_that_takes_a_files_place_after_the_check_does_not_hold_up_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, end: str
) -> None:
    path, connect = tmp_path / "t.sqlite", sqlite3.connect
    make_database(path, SCRIPT)
    if end in ("-wal", "-shm"):
        with closing(connect(path)) as writer:
            writer.execute("PRAGMA journal_mode=WAL")

    def connect_late(name: Any, *values: Any, **options: Any) -> Any:
        if "t.sqlite" in str(name):
            Path(f"{path}{end}").unlink(missing_ok=True)
            os.mkfifo(f"{path}{end}")
        return connect(name, *values, **options)

    monkeypatch.setattr(sqlite3, "connect", connect_late)
    outcome = _outcome(READERS[read], path)
    assert isinstance(outcome, DatabaseError | RewardError) or end in ("-wal", "-shm"), outcome


def test_the_first_readers_of_a_process_may_be_many_threads(tmp_path: Path) -> None:
    make_database(tmp_path / "t.sqlite", SCRIPT)
    code = """
import sys, threading
from groundwire.tools.sql import opening
sys.setswitchinterval(1e-6)
ready = threading.Barrier(32)
def read():
    ready.wait()
    with opening.without_waiting("t.sqlite"):
        pass
readers = [threading.Thread(target=read) for _ in range(32)]
[reader.start() for reader in readers]
[reader.join() for reader in readers]
print(threading.active_count())
"""
    for _ in range(5):
        done = run("-c", code, folder=tmp_path)
        assert (done.stderr, done.stdout) == ("", "2\n")


@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_a_pipe_or_the_like_in_place_of_a_log_is_refused(tmp_path: Path, kind: str, end: str) -> None:
    make, message = KINDS[kind]
    path = tmp_path / "x.sqlite"
    make_database(path, SCRIPT)
    make(Path(f"{path}{end}"))
    with unchanged(tmp_path):
        _assert_refused(path, message)
        with pytest.raises(OSError, match="not a regular file"):
            DatabaseCopies().take(str(path)) if end != "-shm" else open_readonly(str(path))


@pytest.mark.parametrize("end", ["", "-journal", "-wal"])
def test_a_database_that_becomes_a_pipe_is_refused_though_it_was_open(tmp_path: Path, end: str) -> None:
    path = tmp_path / "x.sqlite"
    make_database(path, SCRIPT)
    assert run_query(path, ALL).rows == [(1, "one")]
    Path(f"{path}{end}").unlink(missing_ok=True)
    os.mkfifo(f"{path}{end}")
    _assert_refused(path, "but a pipe")


@pytest.mark.parametrize("name", [b"caf\xe9.sqlite", b"a\nb.sqlite", b"a\x1b[31m.sqlite", b"q?mode=rwc#%41&x.sqlite"])
def test_a_name_of_any_bytes_is_opened(tmp_path: Path, name: bytes) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    try:
        make_database(tmp_path / "x.sqlite", SCRIPT)
        os.rename(tmp_path / "x.sqlite", path)
    except OSError:
        pytest.skip("the file system refuses the name")
    assert run_query(path, ALL).rows == [(1, "one")]
    assert table_info(path, example_values=0).text == "CREATE TABLE t ( a int , b text )"
    assert _reward(path) == 1
    os.truncate(path, 5000)
    with pytest.raises(DatabaseError) as error:
        run_query(path, ALL)
    assert str(error.value).isprintable()


# Write-ahead logs


def _with_log(path: Path, *, rows: int = 1) -> Path:
    """A database whose last rows are in a log, without its index: as a killed program leaves it."""
    live = path.with_name(f"live-{path.name}")
    with closing(sqlite3.connect(live, isolation_level=None)) as writer:
        writer.executescript(
            "PRAGMA journal_mode = WAL; CREATE TABLE t (a INT, b TEXT); PRAGMA wal_checkpoint(TRUNCATE)"
        )
        writer.executemany("INSERT INTO t VALUES (?, 'log')", [(row,) for row in range(rows)])
        shutil.copy(live, path)
        shutil.copy(f"{live}-wal", f"{path}-wal")
    live.unlink()
    return path


def _read_and_close(path: str | Path) -> list[tuple[Any, ...]]:
    with closing(open_readonly(str(path))) as connection:
        return connection.execute(ALL).fetchall()


@pytest.mark.parametrize("linked", [False, True])
def test_rows_in_a_log_without_an_index_are_read_and_no_file_is_made_or_changed(tmp_path: Path, linked: bool) -> None:
    path = _with_log(tmp_path / "x.sqlite", rows=3)
    if linked:  # its log is beside the file that the link leads to
        path = tmp_path / "link" / "y.sqlite"
        path.parent.mkdir()
        path.symlink_to(tmp_path / "x.sqlite")
    with unchanged(tmp_path):
        rows = [(0, "log"), (1, "log"), (2, "log")]
        assert _read_and_close(path) == run_query(path, ALL).rows == rows
        assert table_info(path).text.endswith("-- a : 0 , 1 , 2\n-- b : 'log'")
        assert _reward(path) == 1
        copies = DatabaseCopies()
        assert run_query(copies.take(str(path)).path, ALL).rows == rows


def _damaged(log: bytes, kind: str) -> bytes:
    damaged = bytearray(log)
    if kind == "frame":
        damaged[100] ^= 1
    elif kind == "header":
        damaged[20] ^= 1
    elif kind == "page size":
        damaged[8:12] = bytes(4)
    elif kind == "no end of a transaction":
        damaged[32 + 4 : 32 + 8] = bytes(4)
    elif kind == "cut":
        del damaged[1000:]
    return bytes(damaged)


@pytest.mark.parametrize("kind", ["frame", "header", "page size", "no end of a transaction", "cut", "empty", "bytes"])
@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_a_log_without_a_transaction_is_not_deleted(tmp_path: Path, kind: str, mode: str) -> None:
    path = tmp_path / "used" / "x.sqlite"
    path.parent.mkdir()
    log = Path(f"{_with_log(path)}-wal")
    content = b"" if kind == "empty" else os.urandom(9000) if kind == "bytes" else _damaged(log.read_bytes(), kind)
    if mode == "DELETE":
        path.unlink()
        make_database(path, "CREATE TABLE t (a INT, b TEXT)")
    log.write_bytes(content)
    shutil.copytree(path.parent, tmp_path / "copy")
    with closing(sqlite3.connect(tmp_path / "copy" / "x.sqlite")) as plain:
        rows = plain.execute(ALL).fetchall()
    with unchanged(path.parent):
        assert _read_and_close(path) == run_query(path, ALL).rows == rows == []


def test_a_database_that_another_program_writes_while_it_is_read_without_locks_is_an_error(tmp_path: Path) -> None:
    path = _with_log(tmp_path / "x.sqlite", rows=3)
    with closing(open_readonly(str(path))) as connection:
        rows = connection.execute(ALL)
        assert rows.fetchone() == (0, "log")
        connection.check_unchanged()
        with closing(sqlite3.connect(path)) as writer, writer:
            writer.execute("DELETE FROM t")
        with pytest.raises(OSError, match="another program changed it"):
            connection.check_unchanged()
    assert run_query(path, ALL).rows == []


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_a_database_that_waits_for_a_repair_is_refused_with_the_remedy(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "x.sqlite"
    make_database(path, f"PRAGMA journal_mode = {mode}; {SCRIPT}")
    Path(f"{path}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(9000))
    with unchanged(tmp_path), pytest.raises(DatabaseError, match="open it once with one that may write"):
        run_query(path, ALL)


# Large values and files


def test_a_column_with_a_long_text_is_read_whole(tmp_path: Path) -> None:
    path, long = tmp_path / "x.sqlite", "x" * 150_000
    make_database(path, f"{SCRIPT}; INSERT INTO t VALUES (2, '{long}')")
    assert run_query(path, "SELECT b FROM t").rows == [("one",), (long,)]
    assert run_query(path, "SELECT length(b), substr(b, 1, 3) FROM t").rows == [(3, "one"), (150_000, "xxx")]
    assert table_info(path).text.endswith(f"-- b : 'one' , '{'x' * 30}...'")
    assert _reward(path) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot set SQLite's limits")
def test_a_value_beyond_the_limit_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    make_database(path, f"{SCRIPT}; INSERT INTO t VALUES (2, zeroblob(20000000))")
    with pytest.raises(SqlError, match="a value is too big: at most 16,000,000 bytes"):
        run_query(path, "SELECT b FROM t")
    assert run_query(path, "SELECT a FROM t").rows == [(1,), (2,)]


def test_a_sparse_file_is_copied_without_its_holes(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    make_database(path, SCRIPT)
    os.truncate(path, 3 << 30)
    if size_on_disk(path) > 1 << 20:
        pytest.skip("the file system has no sparse files")
    copies = DatabaseCopies()
    copy = copies.take(str(path))
    assert os.path.getsize(copy.path) == 3 << 30
    assert size_on_disk(copy.path) < 1 << 20
    assert not copy.shared  # it is small
    assert run_query(copy.path, ALL).rows == run_query(path, ALL).rows == [(1, "one")]
    copies.close()


@pytest.mark.parametrize("holes", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_a_copy_has_the_content_of_its_original(tmp_path: Path, holes: tuple[int, ...]) -> None:
    part, original = 1 << 20, tmp_path / "original"
    with original.open("wb") as file:
        for number in range(3):
            file.seek(part, os.SEEK_CUR) if number in holes else file.write(bytes([number + 1]) * part)
        file.truncate(3 * part - 1)
    copy_file(original, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == original.read_bytes()
    assert size_on_disk(tmp_path / "copy") <= size_on_disk(original)
