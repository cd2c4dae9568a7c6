"""Imported objects are frozen, and the garbage collector works again."""

from __future__ import annotations

import gc

import pytest

from groundwire.tools.startup import fast_import


@pytest.mark.parametrize("fails", [False, True])
def test_imported_objects_are_frozen(fails: bool) -> None:
    gc.unfreeze()
    kept = []
    try:
        with fast_import():
            assert not gc.isenabled()
            kept.append({})
            if fails:
                raise ImportError
    except ImportError:
        pass
    later: list[object] = []
    seen = {id(each) for each in gc.get_objects()}  # those that it looks through
    assert gc.isenabled()
    assert id(kept) not in seen
    assert id(later) in seen
    gc.unfreeze()
