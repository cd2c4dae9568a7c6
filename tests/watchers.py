"""Those who watch a run in tests."""

from __future__ import annotations


class Nobody:
    """Somebody to tell, who does not care."""

    def phase(self, text: str, total: int) -> None: ...

    def tick(self) -> None: ...

    def step(self, line: dict[str, object]) -> None: ...
