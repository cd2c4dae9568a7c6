"""Agent Lightning's parts without the whole of it: import this first, then each part from where it lives.

Python runs a package's ``__init__`` before any module of it, and Agent Lightning's imports all that it has: LiteLLM's
proxy server, AgentOps, every adapter. That is seven times the CPU of the types, stores and runner that are used here,
and four times their memory. So the ``__init__`` of the packages below waits until somebody asks for a name that only it
has: ``from agentlightning.types import Span`` costs what it says, and an agent that says ``import agentlightning as
agl`` finds ``agl.LLM`` as ever.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import warnings
from types import ModuleType
from typing import Any

__all__: list[str] = []

_PACKAGES = ("agentlightning", "agentlightning.runner", "agentlightning.tracer")
_lock = threading.RLock()


class _Late(ModuleType):
    """A package whose ``__init__`` runs when a name is missing."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            # Names that are missing while it runs are really missing; other threads wait until it has run.
            if not self.__dict__.get("_runs"):
                self.__dict__["_runs"] = True
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


def _import_late(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or name in sys.modules:
        return
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    module.__class__ = _Late
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


# LiteLLM, which the whole of Agent Lightning imports, otherwise fetches a list of prices from the network.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
# Its runner imports a module of its own that warns of being imported.
warnings.filterwarnings("ignore", message="agentlightning.reward is deprecated")
for _name in _PACKAGES:
    _import_late(_name)
