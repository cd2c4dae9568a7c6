"""Where a Lightning store keeps its data: in memory, in a SQLite file, or in MongoDB."""
