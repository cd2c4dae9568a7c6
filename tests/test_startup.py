"""What is imported once is out of the garbage collector's way, and the collector works again."""

from __future__ import annotations

import gc

import pytest

from groundwire.tools.fast_import import fast_import


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_imported_is_not_looked_through_again(fails: bool) -> None:
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
