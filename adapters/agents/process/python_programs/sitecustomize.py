"""Python reads it first in each program that a rollout starts, as its folder is on ``PYTHONPATH``.

Some clients have the URL of their provider in their code, which no variable moves. If our base is installed beside such
a program, its calls are sent to the attempt as those of the rollout's own process are, from the first import of a
client on. Any other program starts as it would without this file.
"""

import os
import sys
from contextlib import suppress
from importlib.util import find_spec

_CLIENTS = ("aiohttp", "botocore", "httpx", "httpx2", "requests")


class _Clients:
    """Finds clients for the import system, until the first is found: our hooks then wait for the others."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in _CLIENTS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                load(module)
                try:
                    from groundwire.adapters.agents.redirection import redirect_program
                except ImportError:  # our base is not installed here
                    return
                redirect_program()

            spec.loader.exec_module = exec_module
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Clients())
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    own = sys.modules.pop(__name__)
    with suppress(ImportError):
        import sitecustomize  # noqa: F401  that of the system, whose place this one has taken
    sys.modules.setdefault(__name__, own)
