"""The folders of an attempt: its working folder, and those in which frameworks keep caches and state."""

from __future__ import annotations

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_PRIVATE, _RECURSIVE = 0x40000, 0x4000
_MAX_COPY = 20 << 20
"""Bytes of the largest folder that is copied where it cannot be overlaid."""
_CACHES = {
    "DSPY_CACHEDIR": "cache/dspy",
    "CREWAI_STORAGE_DIR": "state/crewai",
    "XDG_CACHE_HOME": "cache",
    "XDG_DATA_HOME": "data",
    "XDG_CONFIG_HOME": "config",
    "XDG_STATE_HOME": "state",
    "TMPDIR": "tmp",
}
_MODELS = {
    "HF_HOME": ".cache/huggingface",
    "TIKTOKEN_CACHE_DIR": None,
    "NLTK_DATA": "nltk_data",
    "TORCH_HOME": ".cache/torch",
}
"""Files of models, which each rollout would fetch again: they stay where they are."""


def own_folders(place: Path) -> dict[str, str]:
    """The variables of an attempt whose folder is ``place``; the folders are made."""
    home = Path.home()
    variables = {name: str(place / folder) for name, folder in _CACHES.items()}
    for folder in variables.values():
        os.makedirs(folder, exist_ok=True)
    for name, folder in _MODELS.items():
        if folder is not None and name not in os.environ and (home / folder).is_dir():
            variables[name] = str(home / folder)
    return {**variables, "HOME": str(_own_home(home, place / "home"))}


def _own_home(home: Path, own: Path) -> Path:
    """A home with the entries of the user's, without those in which programs keep caches and state."""
    own.mkdir()
    with suppress(OSError):
        for entry in home.iterdir():
            if entry.name not in (".cache", ".local", ".config"):
                (own / entry.name).symlink_to(entry)
    return own


def own_working_folder(place: Path, kind: str) -> None:
    """Make the working folder of this process its own: a ``copy``, ``empty``, or nothing if it is ``shared``.

    A copy is an overlay over the present folder's own path, so that absolute paths keep working. Where the system does
    not allow that, a small folder is copied, and a large one is shared.
    """
    place.mkdir(parents=True, exist_ok=True)
    if kind == "shared":
        return
    if kind == "copy":
        if overlay(Path.cwd(), place / "overlay"):
            return
        if _bytes_of(Path.cwd()) > _MAX_COPY:
            return
        shutil.copytree(Path.cwd(), place / "work", symlinks=True)
    else:
        (place / "work").mkdir()
    os.chdir(place / "work")


def overlay(folder: Path, place: Path) -> bool:
    """Mount an overlay over ``folder``, for this process and its children alone; what they write is in ``place``.

    False if the system does not allow it (https://docs.kernel.org/filesystems/overlayfs.html).
    """
    upper, work = place / "upper", place / "work"
    if any(character in f"{folder}{place}" for character in ",:\\"):
        return False
    upper.mkdir(parents=True)
    work.mkdir()
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | (_NEW_USER if user else 0)):
        return False
    if user:
        with suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    options = f"{'userxattr,' if user else ''}lowerdir={folder},upperdir={upper},workdir={work}"
    mounted = not libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None) and not libc.mount(
        b"overlay", os.fsencode(folder), b"overlay", 0, os.fsencode(options)
    )
    if mounted:
        os.chdir(folder)
    return mounted


def _bytes_of(folder: Path) -> int:
    """The size of a folder's files, up to a little more than what may be copied."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
        if total > _MAX_COPY:
            break
    return total
