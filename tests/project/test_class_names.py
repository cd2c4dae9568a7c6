"""A class is found by its name: no two public classes of the package share one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND_BY_MODULE = {"FrameworkDriver"}
"""Each framework's module has one, by whose name it is looked up (``adapters/agents/drivers``)."""
FOLDERS = ("adapters", "domains", "rewards", "tools", "train")


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(file.relative_to(ROOT)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert shared.keys() - FOUND_BY_MODULE == set(), shared
