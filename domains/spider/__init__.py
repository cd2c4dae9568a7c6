"""Spider: questions over SQLite databases, answered with SQL and judged by execution match."""
