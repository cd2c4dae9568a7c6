"""What an attempt has for itself: folders, environment, connections, random numbers."""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from groundwire.adapters.agents.process.environment import hooked_python, provider_urls, without_proxy
from groundwire.adapters.agents.process.folders import own_folders, own_working_folder
from groundwire.adapters.agents.process.relay import swap_port


def isolate(base_url: str, place: Path, *, folder: str, seed: str, placeholder: int, forked: bool) -> None:
    """Give this process what is its own, in ``place``; ``placeholder`` is the port of clients that were made before."""
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own_working_folder(place, folder)
    os.environ.update(own_folders(place))
    tempfile.tempdir = None
    os.environ.update(without_proxy(urlsplit(base_url).hostname or "", os.environ))
    if forked:
        _hang_up()
    if placeholder:
        os.environ.update({**provider_urls(base_url), **hooked_python(os.environ)})
        swap_port(placeholder, base_url)
    number = int(seed[:8], 16)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def _hang_up() -> None:
    """Make each inherited TCP connection one whose peer has hung up: siblings would read each other's replies."""
    if not os.path.isdir("/proc/self/fd"):
        return
    ours, theirs = socket.socketpair()
    theirs.close()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            number = int(name)
            if number <= 2 or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(number)) as inherited:
                if inherited.family in (socket.AF_INET, socket.AF_INET6) and _connected(inherited):
                    os.dup2(ours.fileno(), number)
    ours.close()


def _connected(inherited: socket.socket) -> bool:
    try:
        inherited.getpeername()
    except OSError:
        return False
    return True


def own_bytes() -> int:
    """The memory of this process alone, in bytes; 0 if the system does not say."""
    with suppress(OSError):
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    return 0
