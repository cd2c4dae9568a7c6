"""The folders of an attempt: its working folder, and those in which frameworks keep caches and state.

Namespaces of Linux give an attempt a view of its own of the file system, and of the network (:mod:`.network`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_MAX_COPY = 20 << 20  # bytes of the largest folder that is copied where it cannot be overlaid
SHARED = "shared"
"""The file in the folder of an attempt whose working folder was to be a copy, and is not."""
NOT_COPIED = "%s is too large to be copied, or holds TMPDIR: what one rollout writes there, others find"
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
    "NLTK_DATA": "nltk_data",
    "TORCH_HOME": ".cache/torch",
    "UV_CACHE_DIR": ".cache/uv",
    "UV_PYTHON_INSTALL_DIR": ".local/share/uv/python",
    "DENO_DIR": ".cache/deno",
    "PLAYWRIGHT_BROWSERS_PATH": ".cache/ms-playwright",
    **{"PYENV_ROOT": ".pyenv", "NVM_DIR": ".nvm", "CARGO_HOME": ".cargo", "RUSTUP_HOME": ".rustup"},
}
"""Files of models and programs, which each rollout would fetch again, and those of version managers, which write their
own path into them: they stay where they are.
"""
NEW_MOUNTS, NEW_NETWORK = 0x20000, 0x40000000
_NEW_USER = 0x10000000
_PRIVATE, _RECURSIVE = 0x40000, 0x4000


def own_folders(place: Path) -> dict[str, str]:
    """The variables of an attempt whose folder is ``place``; the folders are made."""
    home, own_home = Path.home(), place / "home"
    variables = {name: str(place / folder) for name, folder in _CACHES.items()}
    for folder in variables.values():
        os.makedirs(folder, exist_ok=True)
    models = {name: home / folder for name, folder in _MODELS.items()}
    models["TIKTOKEN_CACHE_DIR"] = Path(tempfile.gettempdir(), "data-gym-cache")
    variables |= {name: str(kept) for name, kept in models.items() if name not in os.environ and kept.is_dir()}
    own_home.mkdir()
    with suppress(OSError):  # all of the user's home but that in which programs keep caches and state
        for name in {*os.listdir(home)} - {".cache", ".local", ".config"}:
            os.symlink(home / name, own_home / name)
    return {**variables, "HOME": str(own_home)}


def way_to_own_folder(place: Path) -> str:
    """How a copy of the present folder can be made: ``overlay``, ``copy``, or ``shared`` if it cannot."""
    if Path.cwd() in place.parents:  # it would be a copy in itself
        return "shared"
    if succeeds(lambda: overlay(Path.cwd(), place)):
        return "overlay"
    return "copy" if _bytes_of(Path.cwd()) <= _MAX_COPY else "shared"


def own_working_folder(place: Path, way: str) -> None:
    """Make the working folder of this process its own: by an ``overlay``, a ``copy``, ``empty``, or ``shared``: not.

    An overlay is mounted over the present folder's own path, so that absolute paths keep working. Where there is none,
    it is a copy; if that cannot be, there is a file :data:`SHARED` in ``place``.
    """
    place.mkdir(parents=True, exist_ok=True)
    if way == "overlay":
        is_within = Path.cwd() in place.parents
        if not is_within and overlay(Path.cwd(), place / "overlay"):
            return
        if is_within or _bytes_of(Path.cwd()) > _MAX_COPY:
            (place / SHARED).touch()
            return
    elif way == "shared":
        return
    if way == "empty":
        (place / "work").mkdir()
    else:
        shutil.copytree(Path.cwd(), place / "work", symlinks=True, ignore=_pipes)
    os.chdir(place / "work")


def remove(place: Path) -> None:
    """Remove the folder of an attempt that has ended."""
    with suppress(OSError):
        (place / "overlay" / "work" / "work").chmod(0o700)  # of an ordinary user's overlay
    shutil.rmtree(place, ignore_errors=True)


def _pipes(folder: str, names: list[str]) -> list[str]:
    """Of the names in a folder those that are no files, folders or links, and cannot be copied: pipes, sockets."""
    places = {name: Path(folder, name) for name in names}
    return [name for name, path in places.items() if not (path.is_symlink() or path.is_file() or path.is_dir())]


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


def succeeds(change: Callable[[], bool]) -> bool:
    """Whether a change of its process can be made, which is tried in another one."""
    if not hasattr(os, "fork"):
        return False
    child = os.fork()
    if not child:
        code = 1
        try:
            code = not change()
        finally:
            os._exit(code)
    return not os.waitpid(child, 0)[1]


def enter(kind: int) -> bool:
    """Give this thread a namespace of its own; False if the system does not allow it.

    An ordinary user needs a user namespace for that, which is entered first, once, while there is one thread.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.unshare(kind):
        return True
    if not user or libc.unshare(kind | _NEW_USER):
        return False
    with suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    return True


def overlay(folder: Path, place: Path) -> bool:
    """Mount an overlay over ``folder``, for this process and its children alone; what they write is in ``place``.

    False if the system does not allow it (https://docs.kernel.org/filesystems/overlayfs.html).
    """
    upper, work = place / "upper", place / "work"
    if any(character in f"{folder}{place}" for character in ",:\\") or not enter(NEW_MOUNTS):
        return False
    upper.mkdir(parents=True)
    work.mkdir()
    options = f"{'userxattr,' if os.getuid() else ''}lowerdir={folder},upperdir={upper},workdir={work}"
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = not libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None) and not libc.mount(
        b"overlay", os.fsencode(folder), b"overlay", 0, os.fsencode(options)
    )
    if mounted:
        os.chdir(folder)
    return mounted
