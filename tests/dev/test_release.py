"""A release is made of a clone whose version, changelog and tree are ready, and of no other."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from dev.release import NotReadyError, check_git, notes_of, version_of


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.0 (2026-11-27)\n\n- new\n\n## 1.1.0 (2026-10-01)\n\n- old"
    )
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_the_notes_are_the_versions_own_part_of_the_changelog(clone: Path) -> None:
    assert notes_of(clone, version_of(clone)) == "- new\n"
    check_git(clone, "v1.2.0")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("CITATION.cff", "1.2.0", "1.1.0", "CITATION.cff has not the version 1.2.0"),
        ("CHANGELOG.md", "2026-11-27", "unreleased", r"\(unreleased\)': write the date"),
        ("CHANGELOG.md", "1.2.0", "1.2.1", "nothing on 1.2.0"),
        ("CHANGELOG.md", "- new", "", "nothing on 1.2.0"),
    ],
)
def test_what_is_not_ready_is_named(clone: Path, file: str, old: str, new: str, message: str) -> None:
    (clone / file).write_text((clone / file).read_text().replace(old, new))
    with pytest.raises(NotReadyError, match=message):
        notes_of(clone, version_of(clone))
    with pytest.raises(NotReadyError, match=f"without a commit, {file}"):
        check_git(clone, "v1.2.0")


def test_a_version_is_released_once(clone: Path) -> None:
    subprocess.run(["git", "-C", str(clone), "tag", "v1.2.0"], check=True)
    with pytest.raises(NotReadyError, match="is there: give"):
        check_git(clone, "v1.2.0")
