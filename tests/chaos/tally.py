"""What a run did, and what went wrong."""

from __future__ import annotations

from collections import Counter

__all__ = ["FAULTS", "MAX_MEMORY_MB", "Tally"]

MAX_MEMORY_MB = 1000
FAULTS = ("lost", "trained twice", "hangs", "tracebacks", "crashes", "status 500", "too much memory")


class Tally:
    """Counts by name. The names of ``FAULTS`` must stay at 0."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.memory_mb: dict[str, float] = {}
        self.slowest_s: dict[str, float] = {}
        self.faults: Counter[tuple[str, str]] = Counter()
        self._details: dict[tuple[str, str], str] = {}

    def add(self, name: str, number: int = 1) -> None:
        """Count something that is no fault."""
        assert name not in FAULTS
        self.counts[name] += number

    def fault(self, name: str, what: str, detail: str = "") -> None:
        """Count a fault. Of equal ones only the first ``detail`` is kept, which should allow to repeat it."""
        assert name in FAULTS
        self.counts[name] += 1
        self.faults[name, what] += 1
        self._details.setdefault((name, what), detail)

    def memory(self, server: str, megabytes: float) -> None:
        """Note the memory of a server; only its peak is kept. Too much is one fault for each server."""
        before = self.memory_mb.get(server, 0.0)
        self.memory_mb[server] = max(before, megabytes)
        if before <= MAX_MEMORY_MB < megabytes:
            self.fault("too much memory", f"{server} has {megabytes:.0f} MB")

    def slowest(self, server: str, seconds: float) -> None:
        """Note how long a valid request took; only the longest time is kept."""
        self.slowest_s[server] = max(seconds, self.slowest_s.get(server, 0.0))

    def table(self) -> str:
        """All counts, those of the faults last."""
        counts = {**self.counts, **{name: self.counts[name] for name in FAULTS}}
        lines = [f"{name:44}{number:>10,}" for name, number in counts.items() if name not in FAULTS]
        lines += [f"{'peak memory, MB: ' + name:44}{peak:>10,.0f}" for name, peak in sorted(self.memory_mb.items())]
        lines += [f"{'slowest answer, s: ' + name:44}{s:>10,.1f}" for name, s in sorted(self.slowest_s.items())]
        lines += [f"{name:44}{counts[name]:>10,}" for name in FAULTS]
        return "\n".join(lines)

    def fault_list(self) -> str:
        """Each different fault with its number and its first detail."""
        lines = []
        for (name, what), number in self.faults.most_common():
            lines.append(f"FAULT {name}, {number} times: {what}")
            if detail := self._details[name, what]:
                lines.append(f"      {detail:.700}")
        return "\n".join(lines)
