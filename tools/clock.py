"""A clock that nobody sets."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch, as the system's clock said at the start of this process and steady since then.

    When the system's clock is set, by hand or by NTP, deadlines and durations of what runs stay right.
    """
    return _BEGAN + time.monotonic()
