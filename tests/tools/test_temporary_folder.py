"""A temporary folder of a killed process is removed, and that of a living one is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from groundwire.tools.files import TemporaryFolder, remove_temporary_folders

PREFIX = "groundwire-test-"
OTHER = """
import sys
from groundwire.tools.files import TemporaryFolder
folder = TemporaryFolder(sys.argv[1])
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one() -> None:
    command = [sys.executable, "-c", OTHER, PREFIX]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        first = TemporaryFolder(PREFIX)
        assert (theirs / "file").exists()
        process.kill()
        process.wait()
        assert (theirs / "file").exists()
        second = TemporaryFolder(PREFIX)
    assert not theirs.exists()
    assert first.path.exists()
    assert second.path.exists()
    for folder in (first, second):
        folder.remove()
        assert not folder.path.exists()


@pytest.mark.parametrize("end", ["", "from groundwire.tools.errors import exit_now; exit_now(0)"])
def test_a_process_that_ends_by_itself_leaves_no_folder(tmp_path: Path, end: str) -> None:
    subprocess.run([sys.executable, "-c", OTHER + end, PREFIX], input="", check=True, capture_output=True, text=True)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_fork_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    with TemporaryFolder(PREFIX, tmp_path) as folder:
        child = os.fork()
        if not child:
            remove_temporary_folders()
            os._exit(0)
        os.waitpid(child, 0)
        assert folder.exists()
    assert not list(tmp_path.iterdir())


def test_only_folders_with_a_lock_are_removed(tmp_path: Path) -> None:
    kept = [tmp_path / f"{PREFIX}of-a-user", tmp_path / "other"]
    for folder in kept:
        folder.mkdir()
        (folder / "file").write_text("x")
    target = tmp_path / "target"
    target.mkdir()
    (target / ".lock").write_text("")
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    TemporaryFolder(PREFIX).remove()
    assert all((folder / "file").exists() for folder in kept)
    assert (target / ".lock").exists()
