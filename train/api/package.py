"""Keeps the functions of the package ``groundwire.train`` when its commands of the same names are imported."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["keep_functions"]


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets a submodule as an attribute: ``evaluate`` and ``serve`` would replace the functions."""
        if name not in self.__all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


def keep_functions(package: str) -> None:
    """Let no submodule of ``package`` replace a name in its ``__all__``."""
    sys.modules[package].__class__ = _Package
