"""Runs the parts of a measurement as processes of their own, and writes each line of JSON that they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["collect"]


def collect(
    module: str, parts: Sequence[str], folder: str, result: dict[str, Any], file: Path, limit_s: float, trl: str = ""
) -> int:
    """Run ``module`` again for each part, with ``--only PART FOLDER`` after the present options.

    ``result`` gets the lines of JSON as ``figures``, and in ``failed`` why a part ended early; other output goes to a
    log beside ``file``. The part ``trl`` finds TRL in the folder of that name. After ``limit_s`` for all parts the
    running one is ended with all of its processes. Returns the number of parts that failed.
    """
    ends = time.monotonic() + limit_s
    result |= {"figures": [], "failed": {}, "seconds": {}}
    for part in parts:
        started = time.monotonic()
        path = os.pathsep.join([*([trl] if part == "trl" and trl else []), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", module, *sys.argv[1:], "--only", part, folder]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
            start_new_session=True,
        )  # fmt: skip
        timer = threading.Timer(max(1.0, ends - started), os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        log = [f"== {part}\n"]
        for line in process.stdout or ():
            if line.startswith('{"part"'):
                print(line, end="", flush=True)
                result["figures"].append(json.loads(line))
                file.write_text(json.dumps(result, indent=1))
            else:
                log.append(line)
        with file.with_suffix(".log").open("a") as text:
            text.writelines(log)
        if code := process.wait():
            result["failed"][part] = f"exit {code}" if timer.is_alive() else "the time was over"
            print(f"{part}: {result['failed'][part]}", *log[-12:], sep="\n  ", flush=True)
        timer.cancel()
        result["seconds"][part] = round(time.monotonic() - started, 1)
        file.write_text(json.dumps(result, indent=1))
    return len(result["failed"])
