"""Modules of Agent Lightning are imported without the rest; the rest is imported when a name needs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import ROOT, run

from groundwire.train.store import _lazy_agentlightning


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``heavy`` whose ``__init__`` has a name of its own, and a module ``heavy.part``."""
    folder = tmp_path / "heavy"
    folder.mkdir()
    (folder / "__init__.py").write_text("from heavy.part import light\n__all__ = ['light', 'WHOLE']\nWHOLE = 1\n")
    (folder / "part.py").write_text("light = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "heavy"]:
        del sys.modules[name]


def test_a_module_is_imported_alone_and_the_package_at_its_first_name(package: Path) -> None:
    _lazy_agentlightning._import_lazily("heavy")
    part = importlib.import_module("heavy.part")
    heavy = sys.modules["heavy"]
    assert part.light == 2
    assert "WHOLE" not in vars(heavy)
    assert heavy.WHOLE == 1
    assert heavy.light == 2
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = heavy.nothing


def test_a_star_import_finds_every_name(package: Path) -> None:
    _lazy_agentlightning._import_lazily("heavy")
    names: dict[str, int] = {}
    exec("from heavy import *", names)
    assert (names["light"], names["WHOLE"]) == (2, 1)


def test_a_name_of_a_light_module_is_found_without_the_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_lazy_agentlightning._LIGHT, "heavy", ("part",))
    _lazy_agentlightning._import_lazily("heavy")
    heavy = importlib.import_module("heavy")
    assert heavy.light == 2
    assert "WHOLE" not in vars(heavy)
    assert heavy.WHOLE == 1


def test_an_imported_package_is_not_replaced(package: Path) -> None:
    heavy = importlib.import_module("heavy")
    _lazy_agentlightning._import_lazily("heavy")
    assert sys.modules["heavy"] is heavy


def test_a_failed_import_is_tried_again(package: Path) -> None:
    (package / "__init__.py").write_text("import not_installed")
    _lazy_agentlightning._import_lazily("heavy")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="not_installed"):
            _ = sys.modules["heavy"].WHOLE


def test_trainer_runner_backends_and_an_authors_agents_do_not_import_all_of_agentlightning(tmp_path: Path) -> None:
    script = tmp_path / "imported.py"
    script.write_text(f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\nimport lit_agents\nprint(*sys.modules)")
    imported = run(str(script)).stdout.split()  # in a process that has imported all that a run needs
    assert {
        "groundwire.train.local.trainer",
        "groundwire.train.rollouts.runner.lightning_agents",
        "groundwire.adapters.sql_agents.langgraph",
        "agentlightning.tracer.base",
    } <= set(imported)
    assert not {"litellm", "agentlightning.llm_proxy", "agentlightning.tracer.agentops"} & set(imported)
