"""The files of a run: its folder, summary and trackers."""
