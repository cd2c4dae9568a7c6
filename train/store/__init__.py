"""The store of rollouts: in memory, in SQLite, behind HTTP; its edge speaks Agent Lightning 0.3."""
