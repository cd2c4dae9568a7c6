"""``prepare`` writes a complete, independent folder or nothing."""

from __future__ import annotations

import itertools
import json
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import time
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
from programs import Program, until
from spider_folder import DEV, make_database, make_spider
from typer.testing import CliRunner

from groundwire.domains import DataError
from groundwire.domains.spider.loader import domain
from groundwire.domains.spider.prepare import app, prepare
from groundwire.domains.text_to_sql import suspects
from groundwire.domains.text_to_sql.golds import FAILS, NO_ROWS, SLOW
from groundwire.tools.sql import run_query


def zipped(folder: Path, archive: Path, *, under: str = "spider_data") -> Path:
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*")):
            file.write(path, f"{under}/{path.relative_to(folder)}")
    return archive


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refusal(source: Path, out: Path) -> str:
    """The one-line error of the command."""
    result = CliRunner().invoke(app, ["--source", str(source), "--out", str(out)])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_what_is_written_can_be_loaded_without_the_source(tmp_path: Path) -> None:
    source = make_spider(tmp_path / "source")
    prepare(source, tmp_path / "out")
    source.rename(tmp_path / "gone")
    data = domain.load(str(tmp_path / "out"))
    assert [task["query"] for task in data.train] == ["SELECT count(*) FROM pet"]
    assert [task["id"] for task in data.validation] == ["d0", "d1"]
    assert data.validation[0]["db_path"] == str((tmp_path / "out/database/cars/cars.sqlite").resolve())


def test_rows_in_the_log_of_a_database_are_prepared_too(tmp_path: Path) -> None:
    source = make_spider(tmp_path / "source")
    with closing(sqlite3.connect(source / "database/pets/pets.sqlite", isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("INSERT INTO pet VALUES ('Old', 95)")
        prepare(source, tmp_path / "out")
    assert "SELECT name FROM pet WHERE age > 90" in {task["query"] for task in domain.load(str(tmp_path / "out")).train}
    out = str(tmp_path / "out/database/pets/pets.sqlite")
    assert run_query(out, "SELECT name FROM pet").rows == [("Rex",), ("Old",)]


def test_a_prepared_folder_can_be_moved(tmp_path: Path) -> None:
    prepare(make_spider(tmp_path / "source"), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    assert Path(domain.load(str(tmp_path / "moved")).train[0]["db_path"]).is_file()


def test_the_report_lists_every_gold_that_cannot_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain, "gold_timeout_s", 0.1)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    source = make_spider(tmp_path / "source", dev=[*DEV, {**DEV[0], "id": "d2", "query": endless}])
    report = prepare(source, tmp_path / "out")
    assert report == json.loads((tmp_path / "out/report.json").read_text())
    assert [(gold["id"], gold["split"], gold["reason"]) for gold in report["golds"]] == [
        ("train_spider-1", "train", NO_ROWS),
        ("train_spider-2", "train", FAILS),
        ("d1", "validation", NO_ROWS),
        ("d2", "validation", SLOW),
    ]
    assert "no such column: nickname" in report["golds"][1]["detail"]
    assert report["left_out_of_training"] == {NO_ROWS: 1, FAILS: 1}
    assert report["tasks"] == {"train_spider": 1, "test_dev": 2, "test_dev_500": 2}


def test_the_sample_of_500_does_not_depend_on_the_order(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows = [{**DEV[0], "id": f"d{index}"} for index in range(700)]
    prepare(make_spider(tmp_path / "one", dev=rows), tmp_path / "a")
    prepare(make_spider(tmp_path / "two", dev=rows[::-1]), tmp_path / "b")
    one, two = (pq.read_table(tmp_path / name / "test_dev_500.parquet")["id"].to_pylist() for name in "ab")
    assert len(one) == 500
    assert two == one[::-1]
    assert one != [row["id"] for row in rows[:500]]


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    source = make_spider(tmp_path / "source")
    prepare(source, tmp_path / "a")
    prepare(source, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_published_zip_is_read_in_its_own_top_folder(tmp_path: Path) -> None:
    archive = zipped(make_spider(tmp_path / "source"), tmp_path / "spider.zip")
    prepare(archive, tmp_path / "zipped")
    prepare(tmp_path / "source", tmp_path / "plain")
    one, two = contents(tmp_path / "zipped"), contents(tmp_path / "plain")
    del one["report.json"], two["report.json"]  # which name the source
    assert one == two


@pytest.mark.parametrize("name", ["../dev.json", "/tmp/dev.json", "a/../../dev.json", "..\\dev.json"])
def test_a_zip_that_would_write_outside_is_refused(tmp_path: Path, name: str) -> None:
    archive = zipped(make_spider(tmp_path / "source"), tmp_path / "spider.zip")
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(name, "[]")
    before = contents(tmp_path)
    assert "outside its folder" in refusal(archive, tmp_path / "inner" / "out")
    assert contents(tmp_path) == before


def test_a_zip_that_is_a_bomb_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    archive = zipped(make_spider(tmp_path / "source"), tmp_path / "spider.zip")
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file, file.open("database/x/x.sqlite", "w") as member:
        for _ in range(100):
            member.write(bytes(1 << 20))
    before = contents(tmp_path)
    assert "unpacks to 105 MB, more than 100 times its own size" in refusal(archive, tmp_path / "out")
    assert contents(tmp_path) == before


def test_a_zip_with_a_list_of_too_many_members_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "spider.zip", "w") as file:
        for number in range(9):
            file.writestr(zipfile.ZipInfo(f"{number}"), "")
            file.filelist[-1].comment = bytes(65_000)
        file.filelist *= 15  # the members' places are not looked at before
    assert "its list of members is larger than 8 MB" in refusal(tmp_path / "spider.zip", tmp_path / "out")


@pytest.mark.parametrize(("kind", "message"), [("link", "holds the link"), ("bzip2", "compression other than deflate")])
def test_members_that_a_published_zip_does_not_have_are_refused(tmp_path: Path, kind: str, message: str) -> None:
    archive = zipped(make_spider(tmp_path / "source"), tmp_path / "spider.zip")
    member = zipfile.ZipInfo("spider_data/database/x/x.sqlite")
    if kind == "link":
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(member, "/etc/passwd", zipfile.ZIP_BZIP2 if kind == "bzip2" else None)
    assert message in refusal(archive, tmp_path / "out")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no zip"])
def test_a_damaged_zip(tmp_path: Path, damage: str) -> None:
    archive = zipped(make_spider(tmp_path / "source"), tmp_path / "spider.zip")
    whole = archive.read_bytes()
    middle = whole.index(b"SELECT count")
    archive.write_bytes(
        {"truncated": whole[:-50], "flipped": whole[:middle] + b"X" + whole[middle + 1 :], "no zip": b"hello"}[damage]
    )
    assert "is not a readable zip" in refusal(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_preparing_again_replaces_what_prepare_wrote(tmp_path: Path) -> None:
    prepare(make_spider(tmp_path / "one"), tmp_path / "out")
    prepare(make_spider(tmp_path / "two", dev=DEV[:1]), tmp_path / "out")
    assert len(domain.load(str(tmp_path / "out")).validation) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out", "two"]


def test_a_folder_that_prepare_did_not_write_is_never_replaced(tmp_path: Path) -> None:
    source = make_spider(tmp_path / "source")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("years of work")
    assert "was not written by this command" in refusal(source, tmp_path / "thesis")
    assert (tmp_path / "thesis/chapter.txt").read_text() == "years of work"


def test_the_output_may_not_contain_the_source(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(make_spider(tmp_path / "source"), out)
    inside = make_spider(out / "source")
    for source in (out, inside):
        assert "holds the source" in refusal(source, out)


def test_a_missing_source(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_source_leaves_the_output_unchanged(tmp_path: Path) -> None:
    prepare(make_spider(tmp_path / "source"), tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "source/dev.json").write_text("[{]")
    assert "dev.json cannot be read (not valid JSON: " in refusal(tmp_path / "source", tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_failing_write_leaves_the_output_unchanged(tmp_path: Path) -> None:
    source, out = make_spider(tmp_path / "source"), tmp_path / "out"
    prepare(source, out)
    before = contents(out)
    make_database(
        source / "database/pets/pets.sqlite", "CREATE TABLE big (x); INSERT INTO big VALUES (zeroblob(900000))"
    )

    # A limit on the file size fails like a full disk, in the middle of a write.
    process = subprocess.run(
        [sys.executable, "-m", "domains.spider.prepare", "--source", str(source), "--out", str(out)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.startswith(f"error: preparing {out} failed: File too large")
    assert "Traceback" not in process.stderr
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_ctrl_c_while_a_gold_runs_leaves_the_output_unchanged(tmp_path: Path) -> None:
    source, out = make_spider(tmp_path / "source"), tmp_path / "out"
    prepare(source, out)
    before = contents(out)
    for_ever = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    dev = [{**DEV[0], "query": for_ever}, {**DEV[1], "query": f"{for_ever} WHERE x > 1"}]  # ten seconds: both are slow
    (source / "dev.json").write_text(json.dumps(dev))
    program = Program("-m", "domains.spider.prepare", "--source", str(source), "--out", str(out))
    until(lambda: list(tmp_path.glob(".out.*")), program)
    time.sleep(0.5)
    program.send_signal(signal.SIGINT)
    assert program.wait(600).returncode == 130
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_what_a_kill_leaves_is_repaired_and_removed_by_the_next_command(tmp_path: Path) -> None:
    source, out, bad = make_spider(tmp_path / "source"), tmp_path / "out", tmp_path / "bad.zip"
    prepare(source, out)
    before = contents(out)
    slow = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    (source / "dev.json").write_text(json.dumps([{**DEV[0], "query": slow}]))
    program = Program("-m", "domains.spider.prepare", "--source", str(source), "--out", str(out))
    until(lambda: list(tmp_path.glob(".out.*/.lock")), program)
    program.send_signal(signal.SIGKILL)
    assert program.wait(600).returncode == -signal.SIGKILL
    out.rename(tmp_path / ".out.previous")  # killed between the two renames
    bad.write_text("no zip")
    with pytest.raises(DataError):
        prepare(bad, out)
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.zip", "out", "source"]


@pytest.mark.parametrize("interrupted", [1, 2])
def test_ctrl_c_between_two_renames_leaves_the_output_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    source, out = make_spider(tmp_path / "source"), tmp_path / "out"
    prepare(source, out)
    before, rename, count = contents(out), Path.rename, itertools.count(1)

    def once(path: Path, target: Path) -> Path:
        if next(count) == interrupted:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out)
    assert contents(out) == before


def test_a_too_small_disk_is_detected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(DataError, match="0 MB free"):
        prepare(make_spider(tmp_path / "source"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_suspicious_golds_are_listed_with_their_reasons(tmp_path: Path) -> None:
    golds = {
        "SELECT maker FROM car ORDER BY doors LIMIT 1": suspects.TIES,
        "SELECT sum(doors) FROM car WHERE maker = 'Fiat'": suspects.CONSTANT,
        "SELECT 7": suspects.NO_TABLE,
        'SELECT doors FROM car WHERE maker = "maker"': suspects.COLUMN,
        "SELECT maker FROM car WHERE doors > 9": NO_ROWS,
        'SELECT doors FROM car WHERE maker = "Volvo"': None,
        "SELECT maker FROM car ORDER BY maker LIMIT 1": None,
    }
    tasks = [{"db_id": "cars", "question": "?", "query": gold} for gold in golds]
    source = make_spider(tmp_path / "source", train=tasks, dev=[{**tasks[-1], "id": "d"}])
    database = source / "database" / "cars" / "cars.sqlite"
    database.unlink()
    make_database(database, "CREATE TABLE car (maker, doors); INSERT INTO car VALUES ('Volvo', 5), ('Saab', 5)")
    report = prepare(source, tmp_path / "out")
    listed = json.loads((tmp_path / "out" / "suspects.json").read_text())
    assert {row["query"]: row["reasons"] for row in listed} == {
        gold: [reason] for gold, reason in golds.items() if reason
    }
    assert [row["trust"] for row in listed] == sorted(row["trust"] for row in listed)
    assert report["suspects"] == len(listed) == 5
