"""Import single modules of Agent Lightning without the rest of it. Import this module before any of them.

Python runs a package's ``__init__`` before any of its modules, and Agent Lightning's imports everything: LiteLLM's
proxy server, AgentOps, every adapter. That takes seven times the CPU and four times the memory of the types, stores and
runner that are used here. So the ``__init__`` of these packages is delayed until a name is asked for that only it
defines: ``from agentlightning.types import Span`` imports that module alone, and after ``import agentlightning as agl``
all names work as usual. The names for authors of agents, ``agl.LitAgent`` or ``agl.emit_reward``, do not need it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import warnings
from types import ModuleType
from typing import Any

__all__: list[str] = []

_PACKAGES = ("agentlightning", "agentlightning.runner", "agentlightning.tracer")
_LIGHT = {"agentlightning": ("types", "litagent", "emitter")}
"""Modules whose names the package's ``__init__`` exports, and which are imported quickly."""
_lock = threading.RLock()


class _LazyPackage(ModuleType):
    """A package whose ``__init__`` runs when a name is missing that no light module has."""

    def __getattr__(self, name: str) -> Any:
        with _lock:  # other threads wait until __init__ has run
            if not self.__dict__.get("_runs"):
                for part in _LIGHT.get(self.__name__, ()):
                    exported = _exported(importlib.import_module(f"{self.__name__}.{part}"))
                    if name in exported:
                        return exported[name]
                self.__dict__["_runs"] = True  # a name that is missing meanwhile is really missing
                spec = self.__spec__
                assert spec is not None
                assert spec.loader is not None
                try:
                    spec.loader.exec_module(self)
                except BaseException:
                    del self.__dict__["_runs"]
                    raise
                self.__class__ = ModuleType  # type: ignore[assignment]
        return ModuleType.__getattribute__(self, name)


def _exported(module: ModuleType) -> dict[str, Any]:
    """What ``from module import *`` defines."""
    names = vars(module).get("__all__") or [name for name in vars(module) if not name.startswith("_")]
    return {name: vars(module)[name] for name in names}


def _import_lazily(name: str) -> None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a part of a package that is not installed
        return
    if spec is None or name in sys.modules:
        return
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    module.__class__ = _LazyPackage
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


# LiteLLM, which Agent Lightning's __init__ imports, would otherwise download a list of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
# Agent Lightning's runner imports agentlightning.reward, which it has deprecated itself.
warnings.filterwarnings("ignore", message="agentlightning.reward is deprecated")
for _name in _PACKAGES:
    _import_lazily(_name)
