"""Where the package ``groundwire`` is: the code's own folder, and the entry of ``sys.path`` that has it."""

from __future__ import annotations

from pathlib import Path

import groundwire

__all__ = ["IMPORT_PATH", "PACKAGE"]

PACKAGE = Path(groundwire.__file__).parent
IMPORT_PATH = PACKAGE.parent
