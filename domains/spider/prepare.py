"""Check a Spider folder or zip once, and write it as parquet: ``groundwire prepare``.

Databases are copied, so the source may be deleted. See :mod:`groundwire.domains.text_to_sql.prepared_folder`.
"""

from __future__ import annotations

import shutil
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from groundwire.domains._types import DataError
from groundwire.domains.prepare import app
from groundwire.domains.spider import loader
from groundwire.tools.terminal import progress

prepare = loader.domain.prepare


def unpacked(source: Path, staging: Path | None) -> Path:
    """The folder with the data of ``source``, a folder or the published zip, which is unpacked into ``staging``.

    Raises :class:`DataError`.
    """
    if not source.exists():
        raise DataError(f"--source {source} does not exist; name a Spider folder or its zip.")
    if not source.is_dir() and not source.is_file():
        raise DataError(f"--source {source} is neither a folder nor a file; name a Spider folder or its zip.")
    if staging is None:
        return source
    return _find_root(source if source.is_dir() else _extract(source, staging / "source"))


def _find_root(folder: Path) -> Path:
    """``folder``, or the first folder inside it that holds the data, as in the published zip."""
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    for candidate in candidates:
        try:
            loader.find_files(candidate)
        except DataError:
            continue
        return candidate
    return folder


def _extract(archive: Path, target: Path) -> Path:
    """Unpack the files that are read later, and nothing outside ``target``."""
    try:
        with zipfile.ZipFile(archive) as file:
            members = [member for member in file.infolist() if _is_wanted(archive, PurePosixPath(member.filename))]
            size = sum(member.file_size for member in members)
            if size > shutil.disk_usage(target.parent).free:
                raise DataError(
                    f"{archive} unpacks to {size / 1e6:.0f} MB and {target.parent.parent} has less; free some."
                )
            with progress("Unpacking", len(members)) as advance:
                for member in members:
                    file.extract(member, target)
                    advance()
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{archive} is not a readable zip ({error}); download it again.") from error
    target.mkdir(exist_ok=True)
    return target


def _is_wanted(archive: Path, member: PurePosixPath) -> bool:
    if member.is_absolute() or ".." in member.parts or "\\" in str(member):
        raise DataError(f"{archive} holds {str(member)!r}, which would be written outside its folder; do not trust it.")
    is_database = member.suffix in (".sqlite", ".db") or member.name == "schema.sql"
    return member.name in loader.FILES or (is_database and "__MACOSX" not in member.parts)


if __name__ == "__main__":
    app()
