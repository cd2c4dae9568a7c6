"""One drawing shows all exceptions of the project."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from programs import ROOT, run

from groundwire.tools import errors


def test_the_drawing_names_every_exception() -> None:
    defined = {
        node.name
        for package in ("adapters", "domains", "rewards", "tools", "train")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and re.fullmatch(r"[A-Z]\w+(Error|Warning)", node.name)
    }
    assert set(re.findall(r"\b[A-Z]\w+(?:Error|Warning)\b", errors.__doc__ or "")) == defined


def test_a_command_in_a_folder_that_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    program = "import os; os.rmdir(os.getcwd()); from groundwire.train.run import app; app(['--print-config'])"
    done = run("-c", program, folder=tmp_path / "gone")
    assert (done.returncode, done.stderr) == (2, "error: the working folder has been removed: change to another one\n")
