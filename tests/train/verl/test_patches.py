"""What is replaced in verl, Ray and vLLM is in one list, and is what verl 0.9.1 has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT

from groundwire.train.verl import patches
from groundwire.train.verl.patches import (
    EXTENDED,
    PATCHES,
    Patch,
    changed_functions,
    patched,
    source_digest,
    source_of,
)

SOURCE = """
def other():
    return 1


class Trainer:
    @staticmethod
    def balance(rows):
        return rows
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``a_library`` with :data:`SOURCE`, of which ``Trainer.balance`` is in the list."""
    file = tmp_path / "a_library" / "trainer.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").touch()
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    entry = Patch("a_library.trainer", source_digest("a_library/trainer.py:Trainer.balance"))
    monkeypatch.setattr(patches, "PATCHES", {"trainer.Trainer.balance": entry})
    monkeypatch.setattr(patches, "EXTENDED", {})
    return file


@pytest.mark.parametrize("package", ["verl", "ray"])
def test_no_function_that_is_replaced_or_extended_has_changed(package: str) -> None:
    pytest.importorskip(package)
    assert [name for name in changed_functions() if name.startswith(package)] == []
    for source in map(source_of, PATCHES):
        assert not source.startswith(package) or source_digest(source), source


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return 1", "return 2", False),
        ("return rows", "return rows[::-1]", True),
        ("def balance(rows)", "def balance(rows, size=None)", True),
        ("    @staticmethod\n", "", True),
        ("def balance", "def divide", True),
    ],
)
def test_a_change_of_the_source_is_found(library: Path, old: str, new: str, changed: bool) -> None:
    assert changed_functions() == []
    library.write_text(SOURCE.replace(old, new))
    assert changed_functions() == ["a_library/trainer.py:Trainer.balance"] * changed
    assert "a_library" not in sys.modules  # nothing was imported


@pytest.mark.usefixtures("library")
def test_a_function_is_replaced_inside_of_the_block_alone_and_only_if_it_is_in_the_list() -> None:
    import a_library.trainer  # type: ignore[import-not-found]

    with patched("trainer.Trainer.balance", lambda balance: lambda rows: [*balance(rows), "more"]):
        assert a_library.trainer.Trainer.balance([1]) == [1, "more"]
    assert a_library.trainer.Trainer.balance([1]) == [1]
    with pytest.raises(KeyError, match="other"), patched("trainer.other", lambda _: None):
        pass
    del sys.modules["a_library.trainer"], sys.modules["a_library"]


@pytest.mark.parametrize("methods", [(), ("get_unstacked_mapper",), ("get_rename_mapper",)])
def test_verl_finds_the_names_of_adapters_in_each_vllm(methods: tuple[str, ...], tmp_path: Path) -> None:
    """0.24 has no method for it and needs none, 0.25 has verl's, and 0.31 another."""
    folder = tmp_path / "vllm" / "model_executor" / "models"
    folder.mkdir(parents=True)
    body = "".join(f"    def {name}(self): return {name!r}\n" for name in methods)
    (folder / "utils.py").write_text(f"class WeightsMapper:\n    pass\n{body}")
    program = "\n".join(
        [
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})",
            "from groundwire.train.verl.patches import patch_vllm",
            "from vllm.model_executor.models.utils import WeightsMapper",
            "patch_vllm()",
            "print(getattr(WeightsMapper(), 'get_unstacked_mapper', tuple)())",
        ]
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    assert shown.stdout.strip() == (methods[0] if methods else "()")


def test_the_list_has_what_is_replaced_and_nothing_else() -> None:
    package = ROOT / "train" / "verl"
    text = "".join(file.read_text() for file in package.rglob("*.py"))
    made = set(re.findall(r'patch(?:ed)?\(\s*"([\w.]+)"', text))
    assert made == set(PATCHES)
    assert len({*map(source_of, PATCHES), *EXTENDED}) == len(PATCHES) + len(EXTENDED)
    assert "setattr(" not in text.replace(Path(patches.__file__).read_text(), "")


def test_a_run_names_what_another_verl_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from groundwire.train.verl import launch

    monkeypatch.setattr(launch, "changed_functions", lambda: ["verl/a.py:A.run", "verl/b.py:pad"])
    monkeypatch.setattr(launch, "installed_version", lambda _: "0.10.0")
    assert launch.patch_problem() == (
        "verl 0.10.0 differs from verl 0.9.1, for which this project is made, in what it replaces there: "
        "verl/a.py:A.run, verl/b.py:pad; train a step and compare, or pip install verl==0.9.1"
    )
    monkeypatch.setattr(launch, "changed_functions", list)
    assert launch.patch_problem() == ""
