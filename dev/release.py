"""``make release``: checks that the clone is ready for its version, and makes tag, wheel, archive and notes.

The wheel is that of ``make wheel``, installed and checked there. ``dist/`` gets it, the source archive, and
``notes.md``, the version's part of CHANGELOG.md. Nothing is uploaded.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


class NotReadyError(Exception):
    """What has to change before the release."""


def version_of(root: Path) -> str:
    """The version in pyproject.toml, which CITATION.cff repeats. Raises :class:`NotReadyError`."""
    [version] = re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        raise NotReadyError(f"CITATION.cff has not the version {version} of pyproject.toml: write version: {version}")
    return version


def notes_of(root: Path, version: str) -> str:
    """What CHANGELOG.md says of a version, whose heading has a date. Raises :class:`NotReadyError`."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)} \(([^)\n]+)\)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None or not found[2].strip():
        raise NotReadyError(f"CHANGELOG.md has nothing on {version}: begin it with '## {version} (YYYY-MM-DD)'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise NotReadyError(f"CHANGELOG.md says '## {version} ({found[1]})': write the date, as (YYYY-MM-DD)")
    return found[2].strip() + "\n"


def check_git(root: Path, tag: str) -> None:
    """Raise :class:`NotReadyError` for changes without a commit, or a tag that is there."""
    if changed := _git(root, "status", "--porcelain"):
        raise NotReadyError(f"there are changes without a commit, {changed.split()[-1]} among them: commit them")
    if _git(root, "tag", "--list", tag):
        raise NotReadyError(f"the tag {tag} is there: give pyproject.toml and CITATION.cff the next version")


def main() -> None:
    """Make the release of the clone's version."""
    try:
        tag = f"v{(version := version_of(ROOT))}"
        notes = notes_of(ROOT, version)
        check_git(ROOT, tag)
    except NotReadyError as error:
        sys.exit(f"not ready: {error}")
    [wheel] = (ROOT / "build" / "wheel").glob(f"groundwire-{version}-*.whl")  # make wheel has just made it
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(dist)], cwd=ROOT, check=True)
    shutil.copy(wheel, dist)
    (dist / "notes.md").write_text(notes, encoding="utf-8")
    _git(ROOT, "tag", "--annotate", tag, "--cleanup=verbatim", "--file", str(dist / "notes.md"))
    print(f"{tag} is tagged; dist/ has {', '.join(sorted(path.name for path in dist.iterdir()))}")
    print(f"nothing is uploaded: git push origin {tag}, then upload dist/")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
