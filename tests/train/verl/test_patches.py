"""What is replaced in verl and Ray is in one list."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from programs import ROOT

from groundwire.train.verl import patches
from groundwire.train.verl.patches import PATCHES, patched


def test_a_function_is_replaced_inside_of_the_block_alone_and_only_if_it_is_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_library.py").write_text("class Trainer:\n    balance = staticmethod(lambda rows: rows)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(patches, "PATCHES", {"a_library.Trainer.balance": "a_library"})
    import a_library  # type: ignore[import-not-found]

    with patched("a_library.Trainer.balance", lambda balance: lambda rows: [*balance(rows), "more"]):
        assert a_library.Trainer.balance([1]) == [1, "more"]
    assert a_library.Trainer.balance([1]) == [1]
    with pytest.raises(KeyError, match="other"), patched("a_library.other", lambda _: None):
        pass
    del sys.modules["a_library"]


def test_the_list_has_what_is_replaced_and_nothing_else() -> None:
    text = "".join(file.read_text() for file in (ROOT / "train" / "verl").rglob("*.py"))
    assert set(re.findall(r'patch(?:ed)?\(\s*"([\w.]+)"', text)) == set(PATCHES)
    assert "setattr(" not in text.replace(Path(patches.__file__).read_text(), "")
