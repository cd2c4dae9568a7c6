"""Training: the functions :func:`fit`, :func:`evaluate` and :func:`serve`, the commands, and the embedded trainer."""

import sys
from types import ModuleType
from typing import Any

from groundwire.train.api.functions import evaluate, fit
from groundwire.train.api.serving import serve

__all__ = ["evaluate", "fit", "serve"]


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets a submodule as an attribute: ``evaluate`` and ``serve`` would replace the functions."""
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
