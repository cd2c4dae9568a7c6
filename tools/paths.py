"""The folder of the package ``groundwire``, and the entry of ``sys.path`` that contains it."""

from __future__ import annotations

from pathlib import Path

import groundwire

__all__ = ["IMPORT_PATH", "PACKAGE"]

PACKAGE = Path(groundwire.__file__).parent
IMPORT_PATH = PACKAGE.parent
