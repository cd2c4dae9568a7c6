"""Namespaces of Linux, which give an attempt a view of its own of the file system and the network."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

NEW_MOUNTS, NEW_NETWORK = 0x20000, 0x40000000
_NEW_USER = 0x10000000
_PRIVATE, _RECURSIVE = 0x40000, 0x4000
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41


def enter(kind: int) -> bool:
    """Give this process a namespace of its own; False if the system does not allow it.

    An ordinary user needs a user namespace for that, which is entered first, once.
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


def own_network(port: int) -> socket.socket | None:
    """Give this process a network that reaches nothing; None if the system does not allow it.

    The socket listens on ``port`` of its loopback interface. A process outside may accept the connections.
    """
    if not enter(NEW_NETWORK):
        return None
    from fcntl import ioctl

    with socket.socket() as any_socket:
        ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP_AND_RUNNING))
    return socket.create_server(("127.0.0.1", port), backlog=128)
