"""The files that a run writes, and its trackers."""
