"""Training: the functions :func:`fit`, :func:`evaluate` and :func:`serve`, the commands, and the embedded trainer."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from groundwire.train.api.functions import evaluate, fit, serve

__all__ = ["evaluate", "fit", "serve"]


class _Package(ModuleType):
    """Keeps the functions: importing the command's module ``evaluate`` or ``serve`` would replace the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
