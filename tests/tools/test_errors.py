"""One drawing shows all exceptions of the project."""

from __future__ import annotations

import ast
import re

from programs import ROOT

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
