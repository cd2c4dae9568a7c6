"""The commands that pages show, as a shell makes them: each program is one that only records how it was called."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from programs import ROOT

_FENCE = r"^ *```{}\n(.*?)^ *```"
_BLOCKS = re.compile(_FENCE.format("(?:sh|bash)"), re.MULTILINE | re.DOTALL)
_FENCES = re.compile(_FENCE.format(".*?"), re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(^\| *|(?<!`))`((?:\w+=\S* )*(?:groundwire|python|make|pip|uv|ray)\s[^`…]*)`(?!`)", re.MULTILINE)
FILE_PROGRAMS = ("cat", "cp", "mkdir")
"""Programs that are also run, as the shell or a later command needs what they do; the scratch folder has links only."""
_RECORDER = """\
#!/bin/sh
{{ printf '%s\\0' $# "$PWD" "$0" "$@"; {env} -0; printf '\\0'; }} >> '{record}'
case ${{0##*/}} in {real}) PATH={path} exec ${{0##*/}} "$@"; esac
"""
_OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL", "LOGNAME", "_")


class Command(NamedTuple):
    """A command that a shell started."""

    words: tuple[str, ...]
    folder: str
    """Relative to the folder where the page's reader began."""
    variables: tuple[tuple[str, str], ...]
    """Environment variables that the page sets."""


def blocks(page: Path) -> list[str]:
    """What a reader can paste, in its order: blocks of commands, first cells of tables, and commands in sentences.

    Two words in a sentence are the name of a command.
    """
    text = page.read_text(encoding="utf-8")
    found = [(block.start(), block[1]) for block in _BLOCKS.finditer(text)]
    for match in _INLINE.finditer(_FENCES.sub(lambda fence: " " * len(fence[0]), text)):
        words = match[2].split()
        if match[1] or len(words) > 2 or words[0] == "make":
            found.append((match.start(), " ".join(words)))
    return list(dict.fromkeys(block for _, block in sorted(found)))


def commands(block: str, scratch: Path, programs: Collection[str], *shell: str) -> list[Command]:
    """The commands that ``shell`` starts for ``block``, in the new folder ``scratch``.

    There are only the ``programs``, by name or by a path in the reader's folder. A block that ends with a status, names
    another program or a variable that it does not set, or writes to stderr is a failure.
    """
    folder, home, path, record = (scratch / name for name in ("folder", "home", "bin", "record"))
    for each in (folder, home / ".local/state/groundwire", path):
        each.mkdir(parents=True)
    (home / ".local/state/groundwire/token").write_text("TOKEN\n")
    recorder = scratch / "recorder"
    real = {"real": "|".join(FILE_PROGRAMS), "path": shlex.quote(os.environ["PATH"])}
    recorder.write_text(_RECORDER.format(env=shutil.which("env"), record=record, **real))
    recorder.chmod(0o755)
    record.touch()
    for program in (*programs, *FILE_PROGRAMS):
        place = (folder if "/" in program else path) / program
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(recorder)
    (folder / "groundwire").symlink_to(ROOT)
    (folder / "examples").symlink_to(ROOT / "examples")
    variables = {"PATH": str(path), "HOME": str(home), "PS1": "", "PS2": ""}
    done = subprocess.run(
        [str(shutil.which(shell[0])), *shell[1:]],
        input=block,
        text=True,
        check=False,
        capture_output=True,
        cwd=folder,
        env=variables,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{' '.join(shell)}:\n{block}\n{done.stderr}"
    return list(_read(record.read_text().replace(str(home), "~"), folder, variables))


def _read(record: str, folder: Path, before: Mapping[str, str]) -> Iterator[Command]:
    fields = iter(record.split("\0"))
    while number := next(fields):
        where, program, *arguments = (next(fields) for _ in range(int(number) + 2))
        variables = dict(field.partition("=")[::2] for field in iter(lambda: next(fields), ""))
        own = {
            name: value
            for name, value in variables.items()
            if name not in _OF_THE_SHELL and value != before.get(name, "").replace(before["HOME"], "~")
        }
        by_name = Path(program).parent == Path(before["PATH"])
        words = (Path(program).name if by_name else program, *arguments)
        yield Command(words, os.path.relpath(where, folder), tuple(sorted(own.items())))
