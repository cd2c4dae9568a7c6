"""What a prompt optimisation has paid for so far, in files of JSON lines: rollouts and the reflection model's replies.

GEPA does the same again for the same seed, scores and replies. So a run is resumed by running it again: what is in the
journal is not paid for twice. Unlike GEPA's own state, which is a pickle, such a file can run nothing when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire.tools.secrets import masked_values

__all__ = ["Journal", "digest"]


def digest(*parts: Any) -> str:
    """A short name for the JSON of ``parts``."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:24]


class Journal:
    """A file with one entry a line, ``{"key": ..., **entry}``. A line that is incomplete, after a kill, is ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._entries[entry.pop("key")] = entry
            except (ValueError, LookupError, TypeError, AttributeError):
                continue
        if text and not text.endswith("\n"):
            self._write("\n")

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry of a key."""
        return self._entries.get(key)

    def add(self, key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Write an entry, without secrets, and return it."""
        masked = self._entries[key] = masked_values(entry)
        self._write(json.dumps({"key": key, **masked}, ensure_ascii=False) + "\n")
        return masked

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
