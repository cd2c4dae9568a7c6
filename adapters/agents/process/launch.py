"""Starts a program in folders of its own, below a guard: ``python launch.py PLACE WAY PROGRAM ARGUMENTS``.

It is run as a file, with the modules beside it: their package would import much that no program needs to wait for.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Become the guard of the program, which is in the present folder or a copy; see :mod:`.folders`."""
    guard = import_module("guard")
    sys.modules["groundwire.adapters.agents.process.namespaces"] = import_module("namespaces")
    folders = import_module("folders")
    place, way, *command = sys.argv[1:]
    guard.end_with(os.getppid(), signal.SIGTERM)
    guard.guard()
    folders.own_working_folder(Path(place), way)
    if way != "shared":
        os.environ.update(folders.own_folders(Path(place)))
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
